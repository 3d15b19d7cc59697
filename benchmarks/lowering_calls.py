"""Counts what a reader of the lowering steps through: the Python functions of jax_ring that lower one ring_psum.

    python benchmarks/lowering_calls.py --list

A program with one ring_psum in a shard_map is lowered twice, because the first lowering fills caches that last, and the
calls of the second are counted. Python 3.12 and newer inline comprehensions, older versions count each as a call.
"""

import argparse
import collections
import pathlib
import sys

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P


def lowering_of(mesh):
    """A traced program, whose lowering no cache of JAX has."""
    from jax_ring import ring_psum

    mapped = jax.shard_map(lambda x: ring_psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P())
    return jax.jit(mapped).trace(jax.ShapeDtypeStruct((mesh.size,), jnp.float32))


def calls_in_lowering(mesh) -> collections.Counter[tuple[str, str]]:
    """How often each function of jax_ring is called, by file and name."""
    import jax_ring

    package = pathlib.Path(jax_ring.__file__).parent
    lowering_of(mesh).lower()
    traced = lowering_of(mesh)
    calls: collections.Counter[tuple[str, str]] = collections.Counter()

    def count(frame, event, _):
        path = pathlib.Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(package):
            calls[path.relative_to(package).as_posix(), frame.f_code.co_qualname] += 1

    sys.setprofile(count)
    traced.lower()
    sys.setprofile(None)
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--devices", type=int, default=8, help="(%(default)s)")
    parser.add_argument("--list", action="store_true", help="name the functions")
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", arguments.devices)
    jax.config.update("jax_platforms", "cpu")
    calls = calls_in_lowering(jax.sharding.Mesh(jax.devices(), ("data",)))
    files = {file for file, _ in calls}
    print(f"{calls.total()} calls in {len(files)} files (Python {sys.version.split()[0]}, JAX {jax.__version__})")
    if arguments.list:
        for (file, function), count in sorted(calls.items()):
            print(f"{count:>5} {file}: {function}")


if __name__ == "__main__":
    main()
