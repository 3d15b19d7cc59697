"""What calls lower to that no engine serves: JAX's lowering, or XLA's all-reduce where that is missing or wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits, make_mesh, num_calls, sharded
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_ring import (
    _compat,
    explain,
    override_lax,
    ring_all_gather,
    ring_broadcast,
    ring_pmax,
    ring_pmin,
    ring_psum,
    ring_psum_scatter,
    ring_reduce,
)
from jax_ring.lowering import plan
from jax_ring.lowering.call import ALL_REDUCE

pytestmark = pytest.mark.usefixtures("left_to_xla")

# A shard_map that is manual over "i" and "j" only, so that XLA serves its calls.
MESH = make_mesh((4, 2, 2), ("i", "j", "auto"))
X = np.arange(8 * 16 * 3, dtype=np.float32).reshape(8, 16, 3)  # by rank

GROUPS = [[3, 0], [1, 2]]
SCATTERS = {
    "tiled": ("i", {"tiled": True}),
    "tiled, second dimension": ("j", {"tiled": True, "scatter_dimension": 1}),
    "second dimension": ("i", {"scatter_dimension": 1}),
    "two axes": (("j", "i"), {"tiled": True}),
    "groups": ("i", {"tiled": True, "axis_index_groups": GROUPS}),
}


def partly_manual(body, check_vma=True):
    spec = P(("i", "j"))
    return jax.jit(
        jax.shard_map(body, mesh=MESH, in_specs=spec, out_specs=spec, axis_names={"i", "j"}, check_vma=check_vma)
    )


def scatter(psum_scatter, axes, options):
    """The scattered sum of a rank's x: of shape (16, 4) for two ranks along the second dimension, else of (16, 3)."""

    def body(x):
        operand = x[0]
        if options.get("scatter_dimension") == 1:
            operand = jnp.stack([operand] * 4, axis=1) if not options.get("tiled") else jnp.tile(operand, (1, 2))
        return psum_scatter(operand, axes, **options)[None]

    return body


# JAX refuses groups with check_vma=True.
@pytest.mark.filterwarnings("ignore:override_lax")
@pytest.mark.parametrize(
    ("form", "check_vma"), [(form, vma) for form in SCATTERS for vma in (True, False) if form != "groups" or not vma]
)
def test_a_wrong_reduce_scatter_is_avoided(form, check_vma, monkeypatch):
    axes, options = SCATTERS[form]
    expected = partly_manual(scatter(lax.psum_scatter, axes, options), check_vma)(X)
    monkeypatch.setattr(_compat, "WRONG_REDUCE_SCATTER_ON_CPU", True)
    ours = partly_manual(scatter(ring_psum_scatter, axes, options), check_vma)
    text = ours.lower(X).compile().as_text()
    assert "reduce-scatter(" not in text
    assert "all-reduce(" in text
    np.testing.assert_array_equal(ours(X), expected)
    with override_lax():
        theirs = partly_manual(scatter(lax.psum_scatter, axes, options), check_vma)
        assert "reduce-scatter(" not in theirs.lower(X).compile().as_text()
        np.testing.assert_array_equal(theirs(X), expected)


def test_a_right_reduce_scatter_is_used(monkeypatch, caplog):
    monkeypatch.setattr(_compat, "WRONG_REDUCE_SCATTER_ON_CPU", False)
    ours = partly_manual(scatter(ring_psum_scatter, "i", {"tiled": True}))
    with caplog.at_level("INFO", logger="jax_ring"):
        assert "reduce-scatter(" in ours.lower(X).compile().as_text()
    assert "XLA's reduce_scatter" in caplog.text
    monkeypatch.setattr(_compat, "WRONG_REDUCE_SCATTER_ON_CPU", True)
    ours = partly_manual(scatter(ring_psum_scatter, "i", {"tiled": True}))
    with caplog.at_level("INFO", logger="jax_ring"):
        ours.lower(X)
    assert "XLA's all_reduce" in caplog.records[-1].getMessage()


SPECIAL = np.stack([[1, 0.0, -0.0, np.inf, -3], *[[0.5, -0.0, -0.0, 1, -3]] * 2, [np.nan, -0.0, -0.0, -np.inf, -2]])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e5m2"])
def test_maxima_and_minima_keep_nans_and_signs_of_zeros(dtype):
    x = SPECIAL.astype(dtype)
    mesh = make_mesh((4, 2), ("i", "auto"))

    def body(x):
        return ring_pmax(x, "i"), ring_pmin(x, "i")

    f = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P(), axis_names={"i"}))
    assert_same_bits(
        f(x),
        tuple(
            np.array([row]).astype(dtype)
            for row in ([np.nan, 0.0, -0.0, np.inf, -2], [np.nan, -0.0, -0.0, -np.inf, -3])
        ),
    )
    integers = np.arange(8, dtype=np.int32).reshape(4, 2)
    assert_same_bits(f(integers), (integers[3:], integers[:1]))


COLLECTIVES = {
    "psum": lambda x: ring_psum(x, "i"),
    "pmax": lambda x: ring_pmax(x, "i"),
    "psum_scatter": lambda x: ring_psum_scatter(x[0], "i", tiled=True),
    "all_gather": lambda x: ring_all_gather(x, "i"),
    "reduce": lambda x: ring_reduce(x, "i", root=3),
    "broadcast": lambda x: ring_broadcast(x, "i", root=3),
    "broadcast of complex": lambda x: ring_broadcast(x * 1j, "i", root=3),
}


@pytest.mark.parametrize("wrong", [True, False], ids=["wrong_reduce_scatter", "right_reduce_scatter"])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_predicted_bytes(name, wrong, monkeypatch):
    monkeypatch.setattr(_compat, "WRONG_REDUCE_SCATTER_ON_CPU", wrong)
    mesh = make_mesh((8, 2), ("i", "auto"))
    f = jax.shard_map(
        COLLECTIVES[name], mesh=mesh, in_specs=P("i"), out_specs=P("i"), axis_names={"i"}, check_vma=False
    )
    found = explain(f, X)
    assert [call.served_by for call in found.collectives] == ["XLA"]
    assert found.predicted_bytes == found.counted_bytes > 0


@pytest.mark.parametrize("name", ["reduce", "broadcast", "broadcast of complex"])
def test_the_override_does_not_reach_into_a_fallback(name, monkeypatch):
    # XLA serves this call. Its all-reduce must not become a call of jax_ring again.
    body = COLLECTIVES[name]
    f = sharded(body, check_vma=False)
    expected = f(X)
    service_of = plan.service_of

    def as_between_hosts(ctx, call):
        found = service_of(ctx, call)
        return found if call.kind is ALL_REDUCE else found._replace(levels=None)

    monkeypatch.setattr(plan, "service_of", as_between_hosts)
    with override_lax(partitioner=False):  # else XLA's collectives are replaced as the program is compiled
        f = sharded(body, check_vma=False)
        assert num_calls(f, X) == 0
        np.testing.assert_array_equal(f(X), expected)
