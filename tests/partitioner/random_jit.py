"""Random `jit` programs with random meshes and shardings, compared with the same programs by XLA's collectives.

python tests/partitioner/random_jit.py --seconds 600 --seed 0
"""

import argparse
import collections
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

ROWS, COLUMNS = 32, 16


def column(x):
    return x.mean(1, keepdims=True)


# (x, w, the axis, a small number, a sharding) to x, of any shape (m, n) with w of shape (COLUMNS, ROWS).
STEPS = {
    "product": lambda x, w, axis, n, on: jnp.tanh(
        x @ jnp.resize(w, (x.shape[1], ROWS)) @ jnp.ones((ROWS, COLUMNS)) / 9
    ),
    "sum": lambda x, w, axis, n, on: x - x.sum(axis, keepdims=True) / x.shape[axis],
    "roll": lambda x, w, axis, n, on: jnp.roll(x, n, axis),
    "transpose": lambda x, w, axis, n, on: x.T,
    "constraint": lambda x, w, axis, n, on: lax.with_sharding_constraint(x * 1.5, on),
    "update": lambda x, w, axis, n, on: lax.dynamic_update_slice(x, x[:n, :n].sum(0, keepdims=True), (n, n)),
    "scan": lambda x, w, axis, n, on: lax.scan(lambda c, _: (c + jnp.tanh(c - column(c)), c.sum()), x, length=n)[0] / n,
    "for": lambda x, w, axis, n, on: lax.fori_loop(
        0, n, lambda i, c: lax.with_sharding_constraint(c / 2 + c.sum(axis, keepdims=True) / 50, on).at[i].set(1.0), x
    ),
    "while": lambda x, w, axis, n, on: lax.scan(
        lambda c, _: (c - c.max(axis, keepdims=True) / 40, None), lax.with_sharding_constraint(x, on), length=n
    )[0],
    "cond": lambda x, w, axis, n, on: lax.cond(x.sum() > 0, lambda: x - x.mean(0), lambda: x - x.max(1, keepdims=True)),
    "cumsum": lambda x, w, axis, n, on: jnp.cumsum(x, axis) / 10,
    "sort": lambda x, w, axis, n, on: jnp.sort(x, axis),
    "take": lambda x, w, axis, n, on: x[jnp.argsort(x[:, 0])],
    "max": lambda x, w, axis, n, on: x / (1 + jnp.abs(x).max(axis, keepdims=True)),
    "concatenate": lambda x, w, axis, n, on: jnp.concatenate([x[n:], x[:n]]),
    "softmax": lambda x, w, axis, n, on: jax.nn.softmax(x, axis),
    "bfloat16": lambda x, w, axis, n, on: x - column(x.astype(jnp.bfloat16)).astype(x.dtype),
    "any": lambda x, w, axis, n, on: jnp.where((x > 0.5).any(axis, keepdims=True), x, -x),
    "checkpoint": lambda x, w, axis, n, on: jax.checkpoint(lambda x: jnp.sin(x) * x.sum(axis, keepdims=True))(x) / 30,
}


def make(seed: int):
    """(the names of its steps, the function, its operands, its options for jit)."""
    rng = np.random.default_rng(seed)
    shape = [(8,), (2, 4), (4, 2), (2, 2, 2), (2, 2), (6,)][rng.integers(6)]
    devices = np.array(jax.devices()[: np.prod(shape)])
    devices = rng.permutation(devices) if rng.random() < 0.4 else devices
    mesh = Mesh(devices.reshape(shape), tuple("abc"[: len(shape)]))

    def sharding():
        left = [str(name) for name in rng.permutation(mesh.axis_names)]
        taken = [[left.pop() for _ in range(min(rng.choice([0, 0, 1, 1, 2]), len(left)))] for _ in range(2)]
        return NamedSharding(mesh, P(*(tuple(names) or None for names in taken)))

    names = rng.choice(list(STEPS), rng.integers(3, 9))
    steps = [(STEPS[name], int(rng.integers(2)), int(rng.integers(1, 7)), sharding()) for name in names]

    def run(x, w):
        for step, axis, n, on in steps:
            x = step(x, w, axis, n, on)
        return x

    def grad(x, w):
        return jax.value_and_grad(lambda w: (run(x, w) ** 2).sum())(w)

    def operand(*shape):
        on = sharding()
        return jax.device_put(
            rng.normal(size=shape).astype(np.float32), on if _fits(on, shape) else NamedSharding(mesh, P())
        )

    options = {"out_shardings": NamedSharding(mesh, P())} if rng.random() < 0.5 else {}
    return list(names), grad if rng.random() < 0.4 else run, (operand(ROWS, COLUMNS), operand(COLUMNS, ROWS)), options


def _fits(on: NamedSharding, shape: tuple) -> bool:
    """Whether an array can be an operand with this sharding, which divides it evenly."""
    try:
        on.shard_shape(shape)
    except ValueError:
        return False
    return True


def compare(seed: int) -> str:
    """Runs a program three times under the override, and returns the text of what was compiled."""
    from jax_ring import override_lax

    names, fun, operands, options = make(seed)
    expected = jax.jit(lambda *x: fun(*x), **options)(*operands)
    with override_lax(partitioner=True):
        compiled = jax.jit(lambda *x: fun(*x), **options).lower(*operands).compile()
        for result in (compiled(*operands) for _ in range(3)):
            for actual, wanted in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
                np.testing.assert_array_equal(actual, wanted, err_msg=f"seed {seed}: {names}, {operands[0].sharding}")
    return compiled.as_text()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    end, seed, calls = time.monotonic() + arguments.seconds, arguments.seed, collections.Counter()
    while time.monotonic() < end:
        calls.update(re.findall(r"jax_ring_\w+(?=\")| all-[a-z\-]+(?=\()| collective-permute(?=\()", compare(seed)))
        seed += 1
    print(f"{seed - arguments.seed} programs with the bits of XLA's: {dict(calls)}")


if __name__ == "__main__":
    main()
