"""axis_index_groups of all collectives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collectives import (
    COLLECTIVES,
    a_subtest_for_each_collective,
    assert_family_matches_lax,
    every_collective,
    supports_groups,
)
from helpers import RANKS, assert_matches_lax, assert_same_bits, make_mesh, num_calls, sharded
from jax.sharding import PartitionSpec as P
from tiers import full_but

from jax_ring import ring_psum_scatter

pytestmark = pytest.mark.one_pair  # the values of the family cover all of its code

# Operands that groups of 2, 4 and 8 ranks can scatter.
X = (np.arange(RANKS * 8 * 16) % 7 - 3).astype(np.float32).reshape(RANKS * 8, 16)
GROUPS = {
    "all": [[7, 6, 5, 4, 3, 2, 1, 0]],
    "halves": [[0, 1, 2, 3], [4, 5, 6, 7]],
    "permuted": [[5, 0, 3, 6], [2, 7, 4, 1]],
    "pairs": ((0, 7), (6, 1), (2, 5), (3, 4)),
}
UNEVEN = [[0, 1, 2], [3, 4, 5, 6, 7]]
VARYING = ("psum_scatter", "all_gather", "all_to_all")
grouped = every_collective(supports_groups)


def operand(collective, x, groups):
    """x, or as many rows as the group has ranks for an untiled scatter."""
    return x[: len(groups[0])] if collective is COLLECTIVES["psum_scatter"] else x


def varying(name, pair):
    return name.startswith(VARYING) and supports_groups(name, pair)


@pytest.mark.parametrize("name", full_but(GROUPS, ["permuted"]))
def test_matches_lax(subtests, name):
    groups = GROUPS[name]

    def body(fun, x, collective):
        x = operand(collective, x, groups)
        f = lambda x: fun({"a": x, "b": x + 1}, "i", axis_index_groups=groups)  # noqa: E731
        out = [f(x)]
        if collective is not COLLECTIVES["all_to_all"]:  # lax.all_to_all refuses groups there
            out.append(jax.vmap(f)(jnp.stack([x, x + 1])))
        if collective.differentiable:
            out.append(jax.grad(lambda x: sum(map(lambda y: (y**2).sum(), jax.tree.leaves(f(x)))))(x))  # noqa: C417
        return out

    assert_family_matches_lax(subtests, body, X, supports_groups, check_vma=False)


def test_with_vma_tracking(subtests):
    # Results that vary may differ between groups.
    groups = GROUPS["permuted"]

    def body(fun, x, collective):
        return fun(operand(collective, x, groups), "i", axis_index_groups=groups)

    assert_family_matches_lax(subtests, body, X, varying, check_vma=True)


@every_collective(lambda name, pair: name in ("psum", "pmean", "pmax", "pmin"))
def test_reductions_require_check_vma_false(collective):
    with pytest.raises(NotImplementedError, match=r"not invariant over the axis.*Use check_vma=False"):
        sharded(lambda x: collective.ring(x, "i", axis_index_groups=GROUPS["pairs"]))(X)


@every_collective(lambda name, pair: name in ("psum", "pmax", "pmin"))
def test_reductions_in_groups_of_different_sizes(collective):
    values = np.random.default_rng(0).standard_normal((RANKS, 5)).astype(np.float32)
    f = sharded(lambda x: collective.ring(x, "i", axis_index_groups=UNEVEN), check_vma=False)
    results = np.asarray(f(values))
    for group in UNEVEN:
        for rank in group:
            assert_same_bits(results[rank], collective.oracle(values[group])[0])


@every_collective(varying)
def test_results_of_different_sizes_are_refused(collective):
    for fun in collective[:2]:
        with pytest.raises(ValueError, match=r"must all be of one size|must match|divisible|replica id"):
            sharded(lambda x, fun=fun: fun(x[:3], "i", axis_index_groups=UNEVEN), check_vma=False)(X)
    with pytest.raises(ValueError, match=r"one size, got \[\[0, 1, 2\], \[3, 4, 5, 6, 7\]\]"):
        sharded(lambda x: collective.ring(x, "i", axis_index_groups=UNEVEN), check_vma=False)(X)


@pytest.mark.parametrize("groups", [[[0, 1, 2, 3], [4, 5, 6, 6]], [[0, 1, 2, 3]], []], ids=str)
@a_subtest_for_each_collective(supports_groups)
def test_malformed_groups(collective, groups, check_vma):
    with pytest.raises(ValueError, match=r"ring_.*must hold every rank of .* exactly once, that is 0 to 7"):
        sharded(lambda x: collective.ring(x, "i", axis_index_groups=groups), check_vma=check_vma)(X)


@grouped
def test_groups_of_one_need_no_call(collective):
    groups = [[i] for i in range(RANKS)]
    body = lambda x: collective.ring(operand(collective, x, groups), "i", axis_index_groups=groups)  # noqa: E731
    assert num_calls(sharded(body, check_vma=False), X) == 0
    assert_matches_lax(
        lambda fun, x: fun(operand(collective, x, groups), "i", axis_index_groups=groups), X,
        pair=collective[:2], check_vma=False,
    )  # fmt: skip


def test_groups_of_one_axis_of_two(subtests):
    mesh = make_mesh((2, 8), ("j", "i"))
    groups = GROUPS["permuted"]
    spec = P(("j", "i"))
    assert_family_matches_lax(
        subtests, lambda fun, x, collective: fun(operand(collective, x, groups), "i", axis_index_groups=groups),
        np.concatenate([X, X + 1]), supports_groups, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False,
    )  # fmt: skip


def test_ring_order_in_groups():
    groups = GROUPS["permuted"]
    values = np.random.default_rng(0).standard_normal((RANKS, 4, 3)).astype(np.float32)
    f = sharded(
        lambda v: ring_psum_scatter(v[0], "i", axis_index_groups=groups, order="ring")[None], check_vma=False
    )  # fmt: skip
    results = np.asarray(f(values))
    for group in groups:
        for place, rank in enumerate(group):
            order = np.roll(group, -(place + 1))
            total = values[order[0], place]
            for member in order[1:]:
                total = total + values[member, place]
            assert_same_bits(results[rank], total)
