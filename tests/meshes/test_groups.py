"""axis_index_groups of ring_psum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_matches_lax, assert_same_bits, make_mesh, num_calls, rank_fold, sharded
from jax import lax
from jax.sharding import PartitionSpec as P
from tiers import vma_fixture

from jax_ring import ring_psum

check_vma = vma_fixture(without_vma=pytest.mark.one_pair)  # plain JAX on top of the collectives

RANKS = 6
MESH = make_mesh((RANKS,))
X = np.arange(2 * RANKS, dtype=np.float32) - 4

EVEN = {
    "all": [[0, 1, 2, 3, 4, 5]],
    "halves": [[0, 1, 2], [3, 4, 5]],
    "strided": [[0, 2, 4], [1, 3, 5]],
    "permuted": [[5, 0], [3, 1], [2, 4]],
    "reversed": [[5, 4, 3, 2, 1, 0]],
    "singletons": [[0], [1], [2], [3], [4], [5]],
    "tuples": ((4, 1, 2), (0, 5, 3)),
    "numpy": np.arange(RANKS).reshape(2, 3),
}
UNEVEN = {
    "five_and_one": [[0, 1, 2, 3, 4], [5]],
    "one_and_five": [[2], [0, 1, 3, 4, 5]],
    "one_two_three": [[5], [4, 3], [2, 0, 1]],
}
every_group = pytest.mark.parametrize("groups", [*EVEN.values(), *UNEVEN.values()], ids=[*EVEN, *UNEVEN])


def psum_in(groups):
    return lambda x: ring_psum(x, "i", axis_index_groups=groups)


@pytest.mark.one_pair
@every_group
def test_sum_of_each_group(groups):
    values = X.reshape(RANKS, 2)
    total = np.asarray(sharded(psum_in(groups), mesh=MESH, check_vma=False)(X)).reshape(RANKS, 2)
    for group in map(list, groups):
        for rank in group:
            np.testing.assert_array_equal(total[rank], values[group].sum(0))


@every_group
def test_matches_lax(groups):
    def body(psum, x):
        return psum({"a": x, "b": x > 0}, "i", axis_index_groups=groups)

    assert_matches_lax(body, X, mesh=MESH, check_vma=False)


@pytest.mark.one_pair
@every_group
def test_derivatives(groups):
    def body(psum, x):
        f = lambda x: psum(x * x, "i", axis_index_groups=groups) * x  # noqa: E731
        return jax.grad(lambda x: jnp.sum(f(x)))(x), jax.jvp(f, (x,), (x + 1,)), jax.vmap(f)(x)

    assert_matches_lax(body, X, mesh=MESH, check_vma=False)


@pytest.mark.one_pair
def test_the_order_within_a_group_is_the_order_written():
    values = np.array([1e8, 3, -1e8, 1e8, -1e8, 3], np.float32)
    for groups in ([[0, 1, 2], [3, 4, 5]], [[0, 2, 1], [5, 3, 4]]):
        total = np.asarray(sharded(psum_in(groups), mesh=MESH, check_vma=False)(values))
        for group in groups:
            for rank in group:
                assert_same_bits(total[rank], rank_fold(values[group]))


@pytest.mark.one_pair
def test_groups_of_one_axis_of_two():
    mesh = make_mesh((2, 4), ("j", "i"))
    x = np.arange(16, dtype=np.float32)
    spec = P(("j", "i"))
    for groups in ([[0, 1], [2, 3]], [[3, 0], [1, 2]]):

        def body(psum, x, groups=groups):
            return psum(x * x, "i", axis_index_groups=groups) + x

        assert_matches_lax(body, x, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)


@pytest.mark.one_pair
@pytest.mark.parametrize("axes", [("i", "j"), ("j", "i")], ids=str)
def test_groups_of_a_tuple_of_axes(axes):
    # Ranks are row-major over the axes in the order given.
    mesh = make_mesh((2, 3), ("i", "j"))
    spec = P(("i", "j"))
    for groups in ([[0, 1, 2], [3, 4, 5]], [[0, 5], [1, 4], [2, 3]]):

        def body(psum, x, groups=groups):
            return psum(x * x, axes, axis_index_groups=groups) + x

        assert_matches_lax(body, X, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)


@pytest.mark.one_pair
def test_different_groups_in_one_program():
    def body(psum, x):
        rows = psum(x, "i", axis_index_groups=[[0, 1, 2], [3, 4, 5]])
        columns = psum(rows * x, "i", axis_index_groups=[[0, 3], [1, 4], [2, 5]])
        return psum(columns, "i") + psum(x, "i", axis_index_groups=[[0, 1, 2], [3, 4, 5]])

    assert_matches_lax(body, X, mesh=MESH, check_vma=False)
    # Calls with equal groups merge, whatever the container type of the groups.
    equal = lambda x: psum_in([[0, 1, 2], [3, 4, 5]])(x) * psum_in(np.arange(6).reshape(2, 3))(x)  # noqa: E731
    other = lambda x: psum_in([[0, 1, 2], [3, 4, 5]])(x) * psum_in([[0, 1, 2, 3], [4, 5]])(x)  # noqa: E731
    assert num_calls(sharded(equal, mesh=MESH, check_vma=False), X) == 1
    assert num_calls(sharded(other, mesh=MESH, check_vma=False), X) == 2


@pytest.mark.one_pair
@pytest.mark.parametrize("groups", EVEN.values(), ids=EVEN.keys())
def test_constants(groups):
    # As in lax, a constant is multiplied by the size of the first group, which is correct for groups of equal size.
    f = sharded(lambda x: x * psum_in(groups)(1), mesh=MESH, check_vma=False)
    np.testing.assert_array_equal(f(X), X * len(groups[0]))
    assert num_calls(f, X) == 0


MALFORMED = {
    "no_groups": [],
    "missing": [[0, 1, 2], [3, 4]],
    "repeated_in_two": [[0, 1, 2], [2, 3, 4, 5]],
    "repeated_in_one": [[0, 1, 2, 2], [3, 4, 5]],
    "repeated_for_missing": [[0, 1, 1], [3, 4, 5]],
    "too_large": [[0, 1, 2], [3, 4, 6]],
    "too_many": [[0, 1, 2], [3, 4, 5], [6, 7]],
    "negative": [[0, 1, 2], [3, 4, -1]],
    "empty_group": [[0, 1, 2, 3, 4, 5], []],
}


@pytest.mark.one_pair
@pytest.mark.parametrize("groups", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_groups(groups, check_vma):
    message = r"axis_index_groups must hold every rank of \('i',\) exactly once, that is 0 to 5"
    with pytest.raises(ValueError, match=message) as error:
        sharded(psum_in(groups), mesh=MESH, check_vma=check_vma)(X)
    assert str(groups) in str(error.value)


@pytest.mark.one_pair
@pytest.mark.parametrize(
    "kind", ["repeated_in_two", "repeated_in_one", "repeated_for_missing", "too_large", "negative"]
)
def test_malformed_groups_raise_as_in_lax(kind):
    # lax.psum detects only these, and runs with the others.
    for psum in (ring_psum, lax.psum):
        f = sharded(lambda x, psum=psum: psum(x, "i", axis_index_groups=MALFORMED[kind]), mesh=MESH, check_vma=False)
        with pytest.raises(ValueError, match="axis_index_groups must"):
            f(X)


@pytest.mark.one_pair
@pytest.mark.parametrize("groups", [3, [0, 1, 2, 3, 4, 5]], ids=str)
def test_not_a_list_of_lists(groups):
    for psum in (ring_psum, lax.psum):
        f = sharded(lambda x, psum=psum: psum(x, "i", axis_index_groups=groups), mesh=MESH, check_vma=False)
        with pytest.raises(TypeError):
            f(X)


@pytest.mark.one_pair
def test_groups_require_check_vma_false():
    for psum in (ring_psum, lax.psum):
        f = sharded(lambda x, psum=psum: psum(x, "i", axis_index_groups=EVEN["halves"]), mesh=MESH)
        with pytest.raises(NotImplementedError):
            f(X)
    with pytest.raises(NotImplementedError, match=r"check_vma=True.*Use check_vma=False"):
        sharded(psum_in(EVEN["halves"]), mesh=MESH)(X)


@pytest.mark.one_pair
def test_positional_axes_are_refused():
    for psum in (ring_psum, lax.psum):
        f = sharded(
            lambda x, psum=psum: psum(x, ("i", 0), axis_index_groups=EVEN["halves"]), mesh=MESH, check_vma=False
        )
        with pytest.raises(ValueError, match="axis_index_groups"):
            f(X)


@pytest.mark.one_pair
def test_constants_count_the_ranks_of_their_own_group():
    # lax.psum returns the size of the first group on every rank.
    groups = [[0, 1, 2], [3, 4, 5, 6, 7]]

    def sizes(x):
        ones, two = ring_psum((1, jnp.full(2, 2.0)), "i", axis_index_groups=groups)
        return x * 0 + jnp.stack([ones.astype(jnp.float32), two[1]])

    result = sharded(sizes, check_vma=False)(jnp.zeros(16)).reshape(8, 2)
    np.testing.assert_array_equal(result, np.outer([3, 3, 3, 5, 5, 5, 5, 5], [1, 2]))


@pytest.mark.one_pair
def test_groups_of_one_need_no_call():
    f = sharded(lambda x: ring_psum(x, "i", axis_index_groups=[[i] for i in range(8)]), check_vma=False)
    assert num_calls(f, jnp.arange(8.0)) == 0
    np.testing.assert_array_equal(f(jnp.arange(8.0)), np.arange(8.0))


@pytest.mark.one_pair
def test_constants_need_no_communication_with_vma_tracking():
    groups = [[0, 1], [2, 3], [4, 5], [6, 7]]
    for psum in (ring_psum, lax.psum):
        f = sharded(lambda x, psum=psum: x * psum(1, "i", axis_index_groups=groups))
        np.testing.assert_array_equal(f(jnp.arange(8.0)), 2 * np.arange(8.0))
