"""Weak types, of Python numbers and of what is computed from them alone: as from `lax`, so that they widen nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collectives import vary
from helpers import RANKS, ours_and_lax, sharded
from jax import lax

import jax_ring

X = np.ones(2 * RANKS, np.float32)
TO_NEXT = [(i, (i + 1) % RANKS) for i in range(RANKS)]


def stacked(x):
    return jax.tree.map(lambda leaf: jnp.stack([leaf] * RANKS), x)


CALLS = {
    "psum": lambda f, x: f(x, "i"),
    "pmean": lambda f, x: f(x, "i"),
    "pmax": lambda f, x: f(x, "i"),
    "pmin": lambda f, x: f(x, "i"),
    "psum_scatter": lambda f, x: f(stacked(x), "i"),
    "all_gather": lambda f, x: f(x, "i"),
    "all_to_all": lambda f, x: f(stacked(x), "i", 0, 0, tiled=True),
    "pswapaxes": lambda f, x: f(stacked(x), "i", 0),
    "ppermute": lambda f, x: f(x, "i", TO_NEXT),
    "pshuffle": lambda f, x: f(x, "i", [*range(RANKS)]),
    # Of JAX 0.10 it does not cast constants to varying ones.
    "pbroadcast": lambda f, x: f(jax.tree.map(lambda leaf: vary(jnp.asarray(leaf), "i"), x), "i", 3),
}
OPERANDS = {
    "weak float": lambda x: jnp.where(x > 0, 1.0, 2.0),
    "weak integer": lambda x: jnp.where(x > 0, 1, 2),
    "bfloat16": lambda x: x.astype(jnp.bfloat16),
    "Python float": lambda x: 1.5,
    "Python integer": lambda x: 3,
    "NumPy scalar": lambda x: np.float64(1.5),
    "weak constant": lambda x: jnp.asarray(1.0),
    "literal in a tree": lambda x: {"literal": 1.0, "array": x},
}


@pytest.mark.filterwarnings("ignore:ring_pmean")
@pytest.mark.parametrize("name", CALLS)
def test_as_from_lax(name, check_vma):
    types: list = []
    for function in ours_and_lax(getattr(jax_ring, f"ring_{name}"), getattr(lax, name)):

        def body(x, function=function):
            for kind, operand in OPERANDS.items():
                out = CALLS[name](function, operand(x))
                types[-1][kind] = jax.tree.map(lambda leaf: (jax.typeof(leaf), jax.typeof(leaf).weak_type), out)
            return x

        types.append({})
        jax.make_jaxpr(sharded(body, check_vma=check_vma))(X)
    assert types[0] == types[-1]


@pytest.mark.parametrize(
    "send", [lambda x: jax_ring.ring_broadcast(x, "i"), lambda x: jax_ring.ring_ppermute(x, "i", TO_NEXT)]
)
def test_the_carry_of_a_scan_stays_bfloat16(send, check_vma):
    def body(x):
        factor = send(jnp.where(x[0] > 0, 1.0, 2.0))
        return lax.scan(lambda v, _: (v * factor, None), x.astype(jnp.bfloat16), length=3)[0]

    assert sharded(body, check_vma=check_vma)(X).dtype == jnp.bfloat16
