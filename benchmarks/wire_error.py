"""Prints what each argument `wire` of `sync_gradients` costs: bytes sent, and errors of the mean over ranks.

    python benchmarks/wire_error.py --devices 8

Every rank has constant gradients. An error is that of the mean against float64, as the mean over all elements, relative
to the mean magnitude of the exact gradient. After several steps, it is that of the mean of their results. Bytes are
counted in the compiled program, relative to float32. The figures are the same on every machine.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np
from harness import options
from jax.sharding import PartitionSpec as P

WIRES = [None, "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8"]
GRADIENTS = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "heavy-tailed": lambda rng, shape: rng.standard_t(3, shape),
}


def errors(mesh, gradients: np.ndarray, num_steps: int, *, feedback=False, stochastic=False, **options):
    """The errors after one step and after `num_steps`."""
    from jax_ring import sync_gradients, sync_with_feedback

    @functools.partial(jax.jit, donate_argnums=1)
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P("data"), P("data"), P()), out_specs=(P(), P("data")), check_vma=False
    )
    def step(gradients, residual, key):
        rounding = {"key": key} if stochastic else {}
        if not feedback:
            return sync_gradients(gradients[0], "data", **rounding, **options), residual
        mean, residual = sync_with_feedback(gradients[0], residual[0], "data", **rounding, **options)
        return mean, residual[None]

    exact = gradients.astype(np.float64).mean(0)
    total, residual, found = np.zeros_like(exact), jnp.zeros_like(gradients), []
    for n, key in enumerate(jax.random.split(jax.random.key(0), num_steps), 1):
        mean, residual = step(gradients, residual, key)
        total += np.asarray(mean, np.float64)
        if n in (1, num_steps):
            found.append(np.abs(total / n - exact).mean() / np.abs(exact).mean())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--devices", type=options.count, default=8)
    parser.add_argument("--elements", type=options.count, default=1 << 16, help="gradients of each rank (65536)")
    parser.add_argument("--steps", type=options.count, default=64)
    parser.add_argument("--gradients", choices=[*GRADIENTS], nargs="+", default=[*GRADIENTS])
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", arguments.devices)
    jax.config.update("jax_platforms", "cpu")
    from jax_ring import explain, sync_gradients

    mesh = jax.sharding.Mesh(jax.devices(), ("data",))
    shape = (arguments.devices, arguments.elements)

    def sent(wire) -> float:
        fun = jax.shard_map(
            lambda x: sync_gradients(x[0], "data", wire=wire), mesh=mesh, in_specs=P("data"), out_specs=P()
        )
        return explain(fun, jnp.zeros(shape, jnp.float32)).counted_bytes

    print(
        "| gradients | wire | bytes | one step | 64 steps | 64 steps with feedback |".replace(
            "64", str(arguments.steps)
        )
    )
    print("|---|---|---|---|---|---|")
    for name in arguments.gradients:
        gradients = GRADIENTS[name](np.random.default_rng(0), shape).astype(np.float32)
        for wire, stochastic in [*((wire, False) for wire in WIRES), ("int8", True)]:
            measure = functools.partial(errors, mesh, gradients, arguments.steps, wire=wire, stochastic=stochastic)
            figures = [*measure(), measure(feedback=True)[1]] if wire else measure()
            cells = " | ".join(f"{figure:.1e}" for figure in figures) + ("" if wire else " | -")
            label = f"{wire or 'float32'}{', stochastic' if stochastic else ''}"
            print(f"| {name} | {label} | {sent(wire) / sent(None):.3f} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
