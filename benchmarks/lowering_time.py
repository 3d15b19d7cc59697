"""Times what a program waits for before XLA: the import, and tracing and lowering of a sum of many leaves.

    python benchmarks/lowering_time.py --leaves 100,1000

The sum is one call or one for each leaf, by ring_psum, by lax.psum, and by lax.psum under override_lax(). Milliseconds
of CPU time of this process: the median of several runs, which take turns, and the least and the most of them.
"""

import argparse
import contextlib
import gc
import statistics
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

IMPORT = "import time, jax, jax.numpy; begin = time.process_time(); import jax_ring; print(time.process_time() - begin)"


def measure(mesh, run, context, leaves: int) -> tuple[float, float, int]:
    """Seconds of tracing and of lowering, and the number of all-reduces in the program before XLA looks at it."""
    shapes = [jax.ShapeDtypeStruct((mesh.size, 4 + i % 5), jnp.float32) for i in range(leaves)]
    # A new function each time avoids all caches.
    mapped = jax.shard_map(lambda tree: run(tree), mesh=mesh, in_specs=(P("data"),), out_specs=P())
    gc.collect()
    with context():
        begin = time.process_time()
        traced = jax.jit(mapped).trace(shapes)
        middle = time.process_time()
        lowered = traced.lower()
        end = time.process_time()
    text = lowered.as_text()
    count = text.count("@jax_ring_all_reduce(") + text.count('"stablehlo.all_reduce"')
    return middle - begin, end - middle, count


def import_time() -> float:
    """Seconds that a new process takes to import jax_ring after jax."""
    return float(subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True).stdout)


def spread(seconds) -> str:
    return f"{statistics.median(seconds) * 1e3:.1f} ({min(seconds) * 1e3:.1f}-{max(seconds) * 1e3:.1f})"


def main() -> None:
    from harness import options
    from harness.machine import describe, heading

    from jax_ring import override_lax, ring_psum

    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--devices", type=options.count, default=8)
    parser.add_argument("--leaves", type=options.several(options.count), default="100,1000", help="(%(default)s)")
    parser.add_argument("--runs", type=options.count, default=7)
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", arguments.devices)
    jax.config.update("jax_platforms", "cpu")
    mesh = jax.sharding.Mesh(jax.devices(), ("data",))
    by_tree, by_leaf = (lambda f: lambda tree: f(tree, "data")), (lambda f: lambda tree: [f(x, "data") for x in tree])
    variants = {
        "lax.psum, tree": (by_tree(lax.psum), contextlib.nullcontext),
        "lax.psum, per leaf": (by_leaf(lax.psum), contextlib.nullcontext),
        "lax.psum, tree, override_lax": (by_tree(lax.psum), override_lax),
        "ring_psum, tree": (by_tree(ring_psum), contextlib.nullcontext),
        "ring_psum, per leaf": (by_leaf(ring_psum), contextlib.nullcontext),
    }
    machine = describe()
    print(heading(machine, f"{arguments.devices} CPU devices"))
    print(f"# import jax_ring, after jax: {spread([import_time() for _ in range(arguments.runs)])} ms")
    print(f"# {'leaves':>6} {'variant':>30} {'trace, ms':>22} {'lower, ms':>22} {'all-reduces':>12}")
    for leaves in arguments.leaves:
        measured: dict[str, list[tuple[float, float, int]]] = {name: [] for name in variants}
        for _ in range(arguments.runs):
            for name, (run, context) in variants.items():
                measured[name].append(measure(mesh, run, context, leaves))
        for name, runs in measured.items():
            traced_s, lowered_s, counts = zip(*runs, strict=True)
            print(
                f"  {leaves:>6} {name:>30} {spread(traced_s):>22} {spread(lowered_s):>22} {counts[0]:>12}", flush=True
            )


if __name__ == "__main__":
    main()
