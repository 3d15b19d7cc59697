"""Prints the memory of parameters and Adam's state between steps, of replicated training and of ZeRO's stages 2 and 3.

    python benchmarks/memory_at_rest.py --processes 1,2,4 --megabytes 200

Each number is measured in p processes of one device: the resident memory after a step, less that after the same step
with parameters of a few bytes. It is that of the largest process, relative to the bytes of the parameters, beside what
was to be expected: 3 for the parameters and two moments of them.
"""

import argparse
import ctypes
import gc
import pathlib
import subprocess
import sys

from harness import options

MODES = {
    "replicated": lambda p: 3.0,
    "stage 2": lambda p: 1 + 2 / p,
    "stage 3": lambda p: 3 / p,
    "stage 3, whole parameters": lambda p: 3 / p,
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    numbers = options.several(options.count)
    parser.add_argument("--processes", type=numbers, default="1,2,4", help="numbers of processes, separated by commas")
    parser.add_argument("--megabytes", type=options.positive, default=200, help="bytes of the parameters, in 10^6")
    parser.add_argument("--worker", choices=MODES, help=argparse.SUPPRESS)
    return parser.parse_args()


def resident_bytes() -> int:
    """The memory that this process holds, when what it has freed is given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    fields = pathlib.Path("/proc/self/status").read_text().split("VmRSS:")[1].split()
    return int(fields[0]) * 1024


def bytes_held(mode: str, count: int) -> int:
    """The memory of one of the processes after a step of training, with so many parameters."""
    import jax
    import jax.numpy as jnp
    import optax
    from jax.sharding import PartitionSpec as P

    from jax_ring import sync_gradients, zero

    mesh = jax.sharding.Mesh(jax.devices(), ("data",))
    tx = optax.adam(1e-3)
    leaves = [jax.ShapeDtypeStruct((max(count // 8, 1),), jnp.float32) for _ in range(8)]
    is_divided = mode.startswith("stage 3")
    options = {"stage": 3, "layout": "parameter" if "whole" in mode else "flat"} if is_divided else {}
    optimizer = zero.sharded_optimizer(tx, "data", **options)
    param_specs = optimizer.param_specs(leaves) if is_divided else P()
    specs = P() if mode == "replicated" else optimizer.specs(leaves)

    def start():
        params = [jnp.full(x.shape, 0.5, x.dtype) for x in leaves]
        if mode == "replicated":
            return params, tx.init(params)
        params = optimizer.shard(params) if is_divided else params
        return params, optimizer.init(params)

    def step(params, state):
        whole = optimizer.gather(params) if is_divided else params
        gradients = jax.grad(lambda xs: sum((x**2).sum() for x in xs))(
            [jax.lax.pcast(x, "data", to="varying") for x in whole]
        )
        if mode == "replicated":
            updates, state = tx.update(sync_gradients(gradients, "data"), state, params)
        else:
            updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    both = (param_specs, specs)
    carry = jax.jit(jax.shard_map(start, mesh=mesh, in_specs=(), out_specs=both))()
    stepped = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=both, out_specs=both), donate_argnums=(0, 1))
    carry = jax.block_until_ready(stepped(*carry))
    held = resident_bytes()
    del carry
    return held


def work(mode: str, count: int) -> None:
    """Prints the bytes that one of the processes holds for so many parameters."""
    import jax

    jax.distributed.initialize()
    without = bytes_held(mode, 0)
    print(f"bytes {bytes_held(mode, count) - without}", flush=True)


def measured(mode: str, processes: int, megabytes: float) -> list[int]:
    """The bytes that each process holds for the parameters."""
    command = [sys.executable, "-m", "jax_ring.launch", "-n", str(processes), __file__, "--worker", mode]
    result = subprocess.run([*command, f"--megabytes={megabytes}"], capture_output=True, text=True, check=False)
    if result.returncode:
        sys.exit(result.stdout + result.stderr)
    found = [int(line.split("bytes ")[1]) for line in result.stdout.splitlines() if "bytes " in line]
    assert len(found) == processes, result.stdout
    return found


def main() -> None:
    arguments = parse_arguments()
    if arguments.worker:
        work(arguments.worker, int(arguments.megabytes * 1e6) // 4)
        return
    size = arguments.megabytes * 1e6
    print("| processes | | measured | expected |\n|---|---|---|---|")
    for processes in arguments.processes:
        for mode, expected in MODES.items():
            held = max(measured(mode, processes, arguments.megabytes))
            print(f"| {processes} | {mode} | {held / size:.2f} | {expected(processes):.2f} |", flush=True)


if __name__ == "__main__":
    main()
