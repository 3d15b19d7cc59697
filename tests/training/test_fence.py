"""fence: what is before it and what is after it are not computed in one loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import SHARDED, assert_same_bits, make_mesh, sharded
from tiers import vma_fixture

from jax_ring.training.same_bits.fence import fence

check_vma = vma_fixture(without_vma=pytest.mark.one_pair)  # plain JAX on top of the collectives

A, B, C = np.random.default_rng(0).standard_normal((3, 4096)).astype(np.float32)


def test_a_product_is_rounded_before_it_is_added(check_vma):
    f = sharded(lambda a, b, c: fence(a * b) + c, mesh=make_mesh((1,)), in_specs=SHARDED, check_vma=check_vma)
    assert_same_bits(f(A, B, C), A * B + C)


def test_trees_of_all_types_come_back():
    tree = {
        "half": jnp.ones((2, 3), jnp.bfloat16), "scalar": jnp.float32(2), "complex": jnp.array([1 + 2j]),
        "none": jnp.zeros((0, 4)), "count": jnp.int32(3), "key": jax.random.key(0), "flag": jnp.array([True]),
        "nan": jnp.array([jnp.nan, jnp.inf, -0.0]),
    }  # fmt: skip
    fenced, key = jax.jit(fence)(tree), tree.pop("key")
    assert_same_bits(jax.random.key_data(fenced.pop("key")), jax.random.key_data(key))
    assert_same_bits(fenced, tree)


def test_it_can_be_mapped():
    x = {"a": jnp.arange(12.0).reshape(3, 4), "b": jnp.arange(3.0)}
    assert_same_bits(jax.vmap(fence)(x), x)
