"""Invalid arguments of ring_psum: the exception, and a message that says what was wrong and what to do."""

import chex
import jax
import numpy as np
import pytest
from helpers import make_mesh, sharded
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_ring import ring_psum

MESH = make_mesh((4,))
GRID = make_mesh((2, 2), ("i", "j"))
SHARDED = P("i")
X = np.arange(8, dtype=np.float32)


def run(fun, check_vma, *, mesh=MESH, in_specs=SHARDED):
    def body(x):
        # Use the results, so that the call is not dead code.
        return jax.tree.map(lambda leaf: leaf, fun(x))

    return sharded(body, mesh=mesh, in_specs=in_specs, out_specs=P(), check_vma=check_vma)(X)


def rejects(fun, exception, message, check_vma, *, lax_raises=True, **options):
    """Asserts that fun(psum, x) raises with ring_psum, and with lax.psum too if lax_raises."""
    with pytest.raises(exception, match=message):
        run(lambda x: fun(ring_psum, x), check_vma, **options)
    if lax_raises:
        with pytest.raises(exception):
            run(lambda x: fun(lax.psum, x), check_vma, **options)


@pytest.mark.parametrize("name", ["j", None, 2.5, ("a",)], ids=str)
def test_unbound_axis(name, check_vma):
    # A tuple is a sequence of names; ("a",) names the axis 'a'.
    rejects(
        lambda psum, x: psum(x, name), NameError,
        r"ring_psum: unbound axis name .*bound here: 'i'. Call it under jax.shard_map", check_vma,
        lax_raises=not check_vma,
    )  # fmt: skip


def test_unbound_axis_among_bound_ones(check_vma):
    rejects(lambda psum, x: psum(x, ("i", "k")), NameError, "'k'", check_vma, lax_raises=not check_vma)


def test_unbound_axis_for_a_constant(check_vma):
    rejects(lambda psum, x: psum(1, "k") * x, NameError, "'k'", check_vma)


def test_all_bound_axes_are_listed(check_vma):
    rejects(
        lambda psum, x: psum(x, "k"), NameError, "bound here: 'i', 'j'", check_vma,
        lax_raises=not check_vma, mesh=GRID, in_specs=P(("i", "j")),
    )  # fmt: skip


class OutsideOfAnyMap(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    def test_unbound_axis(self):
        for psum in (ring_psum, lax.psum):
            with pytest.raises(NameError):
                self.variant(lambda x, psum=psum: psum(x, "i"))(X)
        with pytest.raises(NameError, match="bound here: none"):
            self.variant(lambda x: ring_psum(x, "i"))(X)


def test_under_a_vmap_without_a_name():
    for psum in (ring_psum, lax.psum):
        with pytest.raises(NameError, match=r"axis name:? '?i'?"):
            jax.vmap(lambda x, psum=psum: psum(x, "i"))(X)


@pytest.mark.parametrize("axes", [("i", "i"), ["i", "i"]], ids=str)
def test_axis_named_twice(axes, check_vma):
    # Not compared with lax.psum, which crashes the process on some versions of JAX.
    rejects(
        lambda psum, x: psum(x, axes), ValueError, r"each axis may be named once, got \('i', 'i'\)", check_vma,
        lax_raises=False,
    )  # fmt: skip


def test_axis_named_twice_among_others(check_vma):
    rejects(
        lambda psum, x: psum(x, ("i", "j", "i")), ValueError, "named once", check_vma,
        lax_raises=False, mesh=GRID, in_specs=P(("i", "j")),
    )  # fmt: skip


@pytest.mark.parametrize("axes", [("i", "j"), ("j", "i")], ids=str)
@pytest.mark.parametrize("varying", ["i", "j"])
def test_operand_that_varies_over_some_of_the_axes(axes, varying):
    other = "j" if varying == "i" else "i"
    rejects(
        lambda psum, x: psum(x, axes), ValueError,
        rf"{{V:{varying}}}, which is the same on all ranks of \('{other}',\)"
        rf".*already.*leave those axes out.*lax.pcast\(x, \('{other}',\), to=\"varying\"\)",
        True, mesh=GRID, in_specs=P(varying),
    )  # fmt: skip


def test_partly_varying_leaf_among_others():
    def body(psum, x):
        return psum({"fine": lax.pcast(x, "j", to="varying"), "not": x}, ("i", "j"))

    rejects(body, ValueError, "the same on all ranks", True, mesh=GRID, in_specs=P("i"))


def test_the_suggested_pcast_works():
    total = run(
        lambda x: ring_psum(lax.pcast(x, ("j",), to="varying"), ("i", "j")), True, mesh=GRID, in_specs=P("i")
    )  # fmt: skip
    np.testing.assert_array_equal(total, 2 * X.reshape(2, 4).sum(0))


@pytest.mark.parametrize("axes", [0, (0,), ("i", 0), (0, "i")], ids=str)
def test_positional_axes_with_vma_tracking(axes):
    # With only positional axes, lax.psum fails with an AssertionError.
    rejects(
        lambda psum, x: psum(x, axes), ValueError, r"positional axes \(0,\).*check_vma=True.*Use jnp.sum", True,
        lax_raises=isinstance(axes, tuple) and "i" in axes,
    )  # fmt: skip


@pytest.mark.parametrize("axis", [1, -1])
def test_positional_axis_out_of_range(axis):
    rejects(lambda psum, x: psum(x, ("i", axis)), ValueError, "out-of-bounds", False)


@pytest.mark.parametrize("leaf", ["text", object(), np.array(["a"]), b"bytes"], ids=["str", "object", "array", "bytes"])
def test_leaf_that_is_not_an_array(leaf, check_vma):
    rejects(lambda psum, x: psum(leaf, "i"), TypeError, "valid JAX", check_vma)
    rejects(lambda psum, x: psum({"a": x, "b": [leaf]}, "i"), TypeError, "valid JAX", check_vma)


def test_random_key(check_vma):
    def body(psum, x):
        return jax.random.key_data(psum(jax.random.key(x[0].astype(int)), "i"))

    outcomes = []
    for psum in (ring_psum, lax.psum):
        with pytest.raises(Exception) as error:  # noqa: PT011
            run(lambda x, psum=psum: body(psum, x), check_vma)
        outcomes.append(type(error.value))
    assert outcomes[0] is outcomes[1]


@pytest.mark.parametrize("axis", [{"i"}, {}, [["i"]]], ids=str)
def test_axis_name_that_cannot_be_hashed(axis, check_vma):
    rejects(lambda psum, x: psum(x, axis), TypeError, "hash", check_vma)


def test_groups_are_keyword_only(check_vma):
    rejects(lambda psum, x: psum(x, "i", [[0, 1, 2, 3]]), TypeError, "positional argument", check_vma)


def test_no_axes_return_the_tree(check_vma):
    for axes in ((), []):
        tree = {"x": X, "text": "left alone"}
        assert ring_psum(tree, axes) is tree
        assert lax.psum(tree, axes) is tree


def test_an_error_leaves_nothing_behind(check_vma):
    for _ in range(3):
        rejects(lambda psum, x: psum(x, "k"), NameError, "'k'", check_vma, lax_raises=False)
        np.testing.assert_array_equal(run(lambda x: ring_psum(x, "i"), check_vma), X.reshape(4, 2).sum(0))
