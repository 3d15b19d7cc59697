"""Times tracing and lowering of a sum of many leaves: in one call, with one for each leaf, and by lax.psum.

    python benchmarks/lowering_time.py --leaves 100,1000

Seconds of this process, the least of several runs.
"""

import argparse
import contextlib
import gc
import time

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P


def measure(mesh, run, context, leaves: int, runs: int) -> tuple[float, float, int]:
    """Seconds of tracing and of lowering, and the number of all-reduces in the program before XLA looks at it."""
    shapes = [jax.ShapeDtypeStruct((mesh.size, 4 + i % 5), jnp.float32) for i in range(leaves)]
    traced_s, lowered_s, text = [], [], ""
    for _ in range(runs):
        # A new function each time, so that nothing is cached.
        mapped = jax.shard_map(lambda tree: run(tree), mesh=mesh, in_specs=(P("data"),), out_specs=P())
        gc.collect()
        with context():
            begin = time.process_time()
            traced = jax.jit(mapped).trace(shapes)
            middle = time.process_time()
            lowered = traced.lower()
            lowered_s.append(time.process_time() - middle)
        traced_s.append(middle - begin)
        text = lowered.as_text()
    return min(traced_s), min(lowered_s), text.count("@jax_ring_all_reduce(") + text.count('"stablehlo.all_reduce"')


def main() -> None:
    import report

    from jax_ring import override_lax, ring_psum

    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--leaves", default="100,1000", help="numbers of leaves (default: 100,1000)")
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", arguments.devices)
    jax.config.update("jax_platforms", "cpu")
    mesh = jax.sharding.Mesh(jax.devices(), ("data",))
    variants = {
        "lax.psum, tree": (lambda tree: lax.psum(tree, "data"), contextlib.nullcontext),
        "lax.psum, tree, override_lax": (lambda tree: lax.psum(tree, "data"), override_lax),
        "ring_psum, tree": (lambda tree: ring_psum(tree, "data"), contextlib.nullcontext),
        "ring_psum, per leaf": (lambda tree: [ring_psum(x, "data") for x in tree], contextlib.nullcontext),
    }
    machine = report.machine()
    print(f"# {machine['cpu']}, {machine['cores']} cores; JAX {machine['jax']}; {arguments.devices} CPU devices")
    print(f"# {'leaves':>6} {'variant':>30} {'trace, s':>9} {'lower, s':>9} {'all-reduces':>12}")
    for leaves in map(int, arguments.leaves.split(",")):
        for name, (run, context) in variants.items():
            traced_s, lowered_s, count = measure(mesh, run, context, leaves, arguments.runs)
            print(f"  {leaves:>6} {name:>30} {traced_s:>9.3f} {lowered_s:>9.3f} {count:>12}", flush=True)


if __name__ == "__main__":
    main()
