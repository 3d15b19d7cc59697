"""Pytrees in all collectives: one call for all leaves of a dtype, and none for unused results."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collectives import SHAPE, assert_family_matches_lax, every_collective, vary
from helpers import RANKS, compiled_text, num_calls, sharded
from jax import lax

from jax_ring import ring_all_gather, ring_pmax, ring_pmin, ring_psum, ring_psum_scatter

pytestmark = pytest.mark.one_pair  # the values of the family cover all of its code

X = (np.arange(RANKS * np.prod(SHAPE)) % 7 - 3).astype(np.float32).reshape(RANKS * SHAPE[0], SHAPE[1])
KINDS = ["all_reduce", "reduce_scatter", "all_gather", "reduce", "broadcast", "all_to_all", "permute"]


def tree_of(x):
    """Several shapes and dtypes."""
    return {"a": x, "b": [x.astype(jnp.bfloat16), (x - 1, None)], "c": x.astype(jnp.int32), "d": 2 * x}


def test_matches_lax(subtests, check_vma):
    def body(fun, x, pair):
        return jax.tree.map(lambda y: vary(y, "i"), fun(tree_of(x), "i"))

    assert_family_matches_lax(subtests, body, X, check_vma=check_vma)


@pytest.mark.full
@every_collective()
def test_one_call_for_each_dtype(collective, check_vma):
    assert num_calls(sharded(lambda x: collective.ring(tree_of(x), "i"), check_vma=check_vma), X) == 3


@pytest.mark.full
@every_collective()
def test_the_hlo_names_the_collective(collective, check_vma):
    text = compiled_text(sharded(lambda x: collective.ring(x, "i"), check_vma=check_vma), X)
    (kind,) = [kind for kind in KINDS if f'"jax_ring_{kind}"' in text]
    name = getattr(collective.ring, "func", collective.ring).__name__
    assert kind.replace("_", "") in {
        "ring_psum_scatter": "reducescatter", "ring_all_gather": "allgather", "ring_reduce": "reduce",
        "ring_broadcast": "broadcast", "ring_all_to_all": "alltoall", "ring_ppermute": "permute",
    }.get(name, "allreduce")  # fmt: skip
    # No collective of XLA.
    ops = ("all-reduce(", "reduce-scatter(", "all-gather(", "all-to-all(", "collective-permute(")
    assert not [op for op in ops if op in text]


@every_collective()
def test_unused_results_cost_nothing(collective, check_vma):
    def body(x):
        out = collective.ring({"used": x, "unused": x + 1, "other": x.astype(jnp.int32)}, "i")
        return out["used"]

    f = sharded(body, check_vma=check_vma)
    assert num_calls(f, X) == 1
    (call,) = [line for line in compiled_text(f, X).splitlines() if "custom_call_target" in line]
    assert " of float32[8,16] over" in call


@every_collective()
def test_equal_operands_are_sent_once_in_a_joined_call(collective, check_vma):
    def body(x):
        return collective.ring(x, "i"), collective.ring(x, "i"), collective.ring(x + 1, "i")

    f = sharded(body, check_vma=check_vma)
    assert num_calls(f, X) == 1
    (line,) = [line for line in f.lower(X).as_text().splitlines() if "@jax_ring_" in line]
    operands = line.split(" : (")[1].split(") -> ")[0].split(", ")
    assert len(operands) == 3  # with the mesh position


def test_maximum_and_minimum_do_not_merge(check_vma):
    def body(x):
        return ring_pmax(x, "i"), ring_pmin(x, "i"), ring_psum(x, "i")

    of_one_rank = jax.tree.map(lambda out: out[:8], sharded(body, check_vma=check_vma)(X))
    values = X.reshape(RANKS, *SHAPE)
    chex.assert_trees_all_equal(of_one_rank, (values.max(0), values.min(0), values.sum(0)), strict=True)


@pytest.mark.parametrize("fun", [ring_all_gather, lax.all_gather], ids=["ring", "lax"])
def test_leaves_of_different_ranks_and_one_negative_axis(fun, check_vma):
    # axis=-1 is a different axis in each leaf, so each leaf is a separate call.
    def body(x):
        out = fun({"matrix": x, "vector": x[0], "scalar": x[0, 0]}, "i", axis=-1)
        return jax.tree.map(lambda y: y.reshape(-1, RANKS), out)

    out = sharded(body, check_vma=check_vma)(X)
    values = X.reshape(RANKS, *SHAPE)
    np.testing.assert_array_equal(
        out["matrix"][: SHAPE[0] * SHAPE[1]].reshape(*SHAPE, RANKS), np.moveaxis(values, 0, 2)
    )
    np.testing.assert_array_equal(out["vector"][: SHAPE[1]], values[:, 0].T)
    np.testing.assert_array_equal(out["scalar"][0], values[:, 0, 0])


def test_empty_trees(subtests, check_vma):
    assert_family_matches_lax(
        subtests, lambda fun, x, pair: (fun({}, "i"), fun(None, "i"), x), X, check_vma=check_vma
    )  # fmt: skip


def test_constants(subtests, check_vma):
    def body(fun, x, pair):
        return x + vary(fun(3, "i"), "i"), vary(fun({"n": np.ones(3, np.int32), "f": 2.5}, "i")["n"], "i") + 0

    assert_family_matches_lax(
        subtests, body, X, lambda name, pair: name in ("pmax", "pmin", "pmean", "psum"), check_vma=check_vma
    )


def test_constants_are_gathered(subtests, check_vma):
    def body(fun, x, pair):
        return x, vary(fun(np.ones((2, 3), np.float32), "i"), "i")

    assert_family_matches_lax(subtests, body, X, lambda name, pair: "all_gather" in name, check_vma=check_vma)


def test_no_copy_along_the_first_dimension():
    # Along the first dimension, the engine writes the final layout itself.
    for fun in (lambda x: ring_all_gather(x, "i", tiled=True), lambda x: ring_psum_scatter(x, "i", tiled=True)):
        text = compiled_text(sharded(fun, check_vma=False), X)
        assert "transpose" not in text
        assert "copy(" not in text
