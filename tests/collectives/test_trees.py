"""Pytrees: every container, one call for all leaves of a dtype, and constants that need no call."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    TARGET,
    assert_matches_lax,
    assert_same_bits,
    compiled_text,
    make_mesh,
    num_calls,
    rank_fold,
    sharded,
)
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_ring import ring_psum

pytestmark = pytest.mark.one_pair  # other cases run with the newest pair

RANKS = 4
MESH = make_mesh((RANKS,))
X = np.arange(8, dtype=np.float32) - 3

Pair = namedtuple("Pair", ["first", "second"])


@jax.tree_util.register_dataclass
@dataclass
class Params:
    weight: object
    bias: object


def calls_lowered(body, check_vma) -> int:
    return sharded(body, mesh=MESH, check_vma=check_vma).lower(X).as_text().count(f"@{TARGET}")


CONTAINERS = {
    "leaf": lambda x: x,
    "list": lambda x: [x, x + 1],
    "tuple": lambda x: (x, x + 1),
    "dict": lambda x: {"b": x, "a": x + 1},
    "ordered": lambda x: OrderedDict([("b", x), ("a", x + 1)]),
    "namedtuple": lambda x: Pair(x, x * x),
    "dataclass": lambda x: Params(x, [x * 2]),
    "nested": lambda x: {"a": [x, (x + 1, {"c": Pair(x, None)})], "b": Params(x * x, ())},
    "with_none": lambda x: [None, x, None, {"k": None}],
    "with_constants": lambda x: {"x": x, "int": 3, "float": 2.5, "bool": True, "complex": 1j, "array": np.arange(3)},
    "one_leaf_twice": lambda x: [x, x, {"again": x}],
    "mixed_shapes": lambda x: [x, x[0], x[None, :, None], x[:0], jnp.tile(x, 300)],
    "mixed_dtypes": lambda x: [
        x.astype(d) for d in (jnp.int32, jnp.float32, jnp.bfloat16, jnp.uint8, jnp.float32, bool)
    ],
}


@pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS.keys())
def test_containers(make, check_vma):
    def body(psum, x):
        # The new first dimension makes the result valid for both out_specs.
        return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], psum(make(x), "i"))

    assert_matches_lax(body, X, mesh=MESH, out_specs=P(None) if check_vma else P("i"), check_vma=check_vma)


@pytest.mark.parametrize("tree", [None, [], {}, (), [None, {"a": ()}]], ids=str)
def test_no_leaves(tree, check_vma):
    def body(x):
        assert ring_psum(tree, "i") == lax.psum(tree, "i") == tree
        return x

    sharded(body, mesh=MESH, check_vma=check_vma)(X)


def test_a_hundred_leaves_are_one_call(check_vma):
    def body(x):
        return ring_psum([x * k for k in range(100)], "i")

    assert calls_lowered(body, check_vma) == 1
    f = sharded(body, mesh=MESH, out_specs=P(), check_vma=check_vma)
    chex.assert_trees_all_equal(f(X), [k * X.reshape(RANKS, 2).sum(0) for k in range(100)], strict=True)


@pytest.mark.parametrize("dtypes", [["float32"], ["float32", "bfloat16"], ["float32", "int32", "float16"]], ids=len)
def test_one_call_for_each_dtype(dtypes, check_vma):
    def body(x):
        return ring_psum([(x + k).astype(d) for k in range(5) for d in dtypes], "i")

    assert calls_lowered(body, check_vma) == len(dtypes)


def test_bool_shares_the_call_of_int32(check_vma):
    def body(x):
        return ring_psum({"b": x > 0, "n": x.astype(jnp.int32)}, "i")

    assert calls_lowered(body, check_vma) == 1
    total = sharded(body, mesh=MESH, out_specs=P(), check_vma=check_vma)(X)
    chex.assert_trees_all_equal(total["b"], (X > 0).reshape(RANKS, 2).sum(0, dtype=np.int32), strict=True)


def test_fusing_does_not_change_bits(check_vma):
    values = np.random.default_rng(0).standard_normal((RANKS, 3, 1001)).astype(np.float32)

    def body(v):
        leaves = {"a": v[0, 0], "b": v[0, 1, :1], "c": v[0, :, 5:800]}
        return ring_psum(leaves, "i"), {k: ring_psum(leaf, "i") for k, leaf in leaves.items()}

    fused, alone = sharded(body, mesh=MESH, out_specs=P(), check_vma=check_vma)(values)
    assert_same_bits(fused, alone)
    assert_same_bits(fused["c"], rank_fold(values)[:, 5:800])


CONSTANTS = [1, 2.5, True, 1j, np.float32(3), np.arange(3), np.ones((2, 0), np.int8), np.array([True, False])]


@pytest.mark.parametrize("constant", CONSTANTS, ids=str)
def test_constants(constant, check_vma):
    assert_matches_lax(lambda psum, x: psum(constant, "i"), X, mesh=MESH, out_specs=P(), check_vma=check_vma)


@pytest.mark.parametrize("constant", CONSTANTS, ids=str)
def test_constants_need_no_call(constant, check_vma):
    f = sharded(lambda x: ring_psum(constant, "i"), mesh=MESH, out_specs=P(), check_vma=check_vma)
    assert num_calls(f, X) == 0


def test_python_int_stays_concrete():
    # psum(1, axis) is the usual way to get the size of an axis at trace time.
    sizes = []
    sharded(lambda x: (sizes.append(ring_psum(1, "i")), x)[1], mesh=MESH)(X)
    assert sizes == [RANKS]
    assert isinstance(int(sizes[0]), int)


def test_concrete_array_is_a_constant(check_vma):
    # A closed-over array, not an argument.
    constant = jnp.arange(3.0)
    f = sharded(lambda x: ring_psum(constant, "i"), mesh=MESH, out_specs=P(), check_vma=check_vma)
    np.testing.assert_array_equal(f(X), RANKS * np.arange(3))
    assert num_calls(f, X) == 0


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1,), (1, 1, 1)], ids=str)
def test_shapes_of_few_elements(shape, check_vma):
    def body(psum, x):
        return psum([jnp.full(shape, 2.0) * x[0], x], "i")[0]

    assert_matches_lax(body, X, mesh=MESH, out_specs=P(), check_vma=check_vma)


def test_positional_axes_of_a_tree():
    # As in lax, integers are axes of the operand; only without vma tracking.
    for axes in (0, (0,), ("i", 0), (1, "i", 0), (0, 1)):

        def body(psum, x, axes=axes):
            return psum({"a": x.reshape(1, 2), "b": x.reshape(2, 1, 1).astype(jnp.int32), "c": x[None] > 0}, axes)

        assert_matches_lax(body, X, mesh=MESH, out_specs=P(), check_vma=False)


def test_weak_types(check_vma):
    def body(psum, x):
        out = psum([jax.jit(lambda: 2.0)() * x[0], x * 2], "i")
        weak = psum(jnp.asarray(x[0].astype(int), dtype=int), "i")
        return out, weak * 2.5

    assert_matches_lax(body, X, mesh=MESH, out_specs=P(), check_vma=check_vma)


def test_equal_calls_merge(check_vma):
    def body(x):
        return ring_psum(x, "i") * ring_psum(x, "i") + ring_psum([x], "i")[0]

    assert num_calls(sharded(body, mesh=MESH, out_specs=P(), check_vma=check_vma), X) == 1
    # The operands of others are sent by the same call, which has two.
    other = sharded(lambda x: ring_psum(x, "i") * ring_psum(x + 1, "i"), mesh=MESH, out_specs=P(), check_vma=check_vma)
    assert num_calls(other, X) == 1
    ranks = X.reshape(RANKS, -1)
    np.testing.assert_array_equal(other(X), ranks.sum(0) * (ranks + 1).sum(0))


def test_dead_calls_are_removed(check_vma):
    def body(x):
        ring_psum(x * x, "i")
        return ring_psum((x, x + 1), "i")[1]

    assert num_calls(sharded(body, mesh=MESH, out_specs=P(), check_vma=check_vma), X) == 1
    assert num_calls(sharded(lambda x: (ring_psum(x, "i"), x)[1], mesh=MESH, check_vma=check_vma), X) == 0


def test_no_all_reduce_of_xla_is_left(check_vma):
    def body(x):
        tree = {"f": x, "n": x.astype(jnp.int32), "h": x.astype(jnp.bfloat16), "b": x > 0, "z": x + 1j}
        return ring_psum(tree, "i")

    text = compiled_text(sharded(body, mesh=MESH, out_specs=P(), check_vma=check_vma), X)
    assert "all-reduce" not in text
    assert text.count(f'custom_call_target="{TARGET}"') == 4
