"""Every kind of mesh and of shard_map: calls must use the ranks and groups of the axes they name."""

import logging

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import TARGET, assert_matches_lax, assert_same_trees, make_mesh, num_calls, sharded
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ring import ring_psum

X = np.arange(16, dtype=np.float32) - 5


def fold_of_indices(psum, x, axes):
    """A sum that includes the axis index, so that wrong groups change it."""
    return psum(x * x + lax.axis_index(axes if isinstance(axes, str) else axes[0]), axes) + x


PERMUTATIONS = {"reversed": [7, 6, 5, 4, 3, 2, 1, 0], "shuffled": [5, 2, 7, 0, 1, 6, 3, 4]}


@pytest.mark.parametrize("order", PERMUTATIONS.values(), ids=PERMUTATIONS.keys())
@pytest.mark.parametrize("shape", [(8,), (2, 4), (2, 2, 2)], ids=str)
def test_permuted_devices(order, shape, check_vma):
    names = ("i", "j", "k")[: len(shape)]
    mesh = make_mesh(shape, names, devices=[jax.devices()[d] for d in order])
    for axes in (names[0], names[-1], names):

        def body(psum, x, axes=axes):
            return fold_of_indices(psum, x, axes)

        assert_matches_lax(body, X, mesh=mesh, in_specs=P(names), out_specs=P(names), check_vma=check_vma)


def test_ranks_are_in_mesh_order_not_device_order():
    # 1e8 + 3 rounds to 1e8 in float32, so the sum depends on the order of ranks.
    values = np.array([1e8, 3, -1e8, 3], np.float32)
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        mesh = make_mesh((4,), devices=[jax.devices()[d] for d in order])
        total = sharded(lambda x: ring_psum(x, "i"), mesh=mesh, out_specs=P())(values)
        np.testing.assert_array_equal(total, [3])
    total = sharded(lambda x: ring_psum(x, "i"), mesh=make_mesh((4,)), out_specs=P())(values[[0, 2, 1, 3]])
    np.testing.assert_array_equal(total, [6])


@pytest.mark.parametrize("first", [0, 5, 12])
def test_subset_of_the_devices(first, check_vma):
    mesh = make_mesh((4,), devices=jax.devices()[first:])
    assert_matches_lax(lambda psum, x: fold_of_indices(psum, x, "i"), X, mesh=mesh, check_vma=check_vma)


ALL_AXES = ["i", "j", "k", ("i", "j"), ("j", "i"), ("i", "k"), ("k", "i"), ("k", "j", "i"), ("j", "k", "i")]


@pytest.mark.parametrize("axes", ALL_AXES, ids=str)
def test_axes_of_a_three_dimensional_mesh(axes, check_vma):
    mesh = make_mesh((2, 4, 2), ("i", "j", "k"))
    spec = P(("i", "j", "k"))
    assert_matches_lax(
        lambda psum, x: fold_of_indices(psum, x, axes), X, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma
    )


@pytest.mark.parametrize("axes", [("i", "j"), ("j", "i")], ids=str)
def test_the_order_of_axes_is_the_order_of_ranks(axes, check_vma):
    # Ranks are row-major over the axes in the given order. The fold depends on that order.
    values = np.array([1e8, 3, -1e8, 3], np.float32)
    mesh = make_mesh((2, 2), ("i", "j"))
    f = sharded(lambda x: ring_psum(x, axes), mesh=mesh, in_specs=P(axes), out_specs=P(), check_vma=check_vma)
    np.testing.assert_array_equal(f(values), [3])


def test_sums_over_each_axis_in_turn(check_vma):
    mesh = make_mesh((2, 4), ("i", "j"))

    def body(psum, x):
        rows, columns = psum(x, "i"), psum(x, "j")
        return rows * columns + psum(rows * x, "j") + psum(psum(x * x, "j"), "i") + x

    assert_matches_lax(
        body, X, mesh=mesh, in_specs=P(("i", "j")), out_specs=P(("i", "j")), check_vma=check_vma
    )  # fmt: skip


@pytest.mark.parametrize("axes", ["one", ("one", "i"), ("i", "one")], ids=str)
def test_axes_of_size_one(axes, check_vma):
    mesh = make_mesh((1, 4), ("one", "i"))
    spec = P(("one", "i"))
    assert_matches_lax(
        lambda psum, x: psum({"x": x, "n": 1}, axes)["x"] + x, X,
        mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma,
    )  # fmt: skip


def test_a_single_device(check_vma):
    assert_matches_lax(lambda psum, x: psum(x, "i"), X, mesh=make_mesh((1,)), out_specs=P(), check_vma=check_vma)


def test_more_devices_than_cores(check_vma):
    def body(psum, x):
        step = lambda k, v: jnp.mod(psum(v, "i"), 13) + x  # noqa: E731
        return lax.fori_loop(0, 20, step, x)

    assert_matches_lax(body, X, mesh=make_mesh((16,)), check_vma=check_vma)


# Ways to name the mesh.


def test_abstract_mesh_argument(check_vma):
    mesh = make_mesh((4,))
    abstract = AbstractMesh((4,), ("i",), axis_types=(AxisType.Auto,))
    x = jax.device_put(X, NamedSharding(mesh, P("i")))

    def make(psum):
        return jax.jit(
            jax.shard_map(
                lambda x: fold_of_indices(psum, x, "i"), mesh=abstract,
                in_specs=P("i"), out_specs=P("i"), check_vma=check_vma,
            )
        )  # fmt: skip

    assert num_calls(make(ring_psum), x) == 1
    assert_same_trees(make(ring_psum)(x), make(lax.psum)(x))


@pytest.mark.parametrize("order", PERMUTATIONS.values(), ids=PERMUTATIONS.keys())
def test_set_mesh(order, check_vma):
    mesh = make_mesh((8,), devices=[jax.devices()[d] for d in order])

    def make(psum):
        f = jax.shard_map(
            lambda x: fold_of_indices(psum, x, "i"), in_specs=P("i"), out_specs=P("i"), check_vma=check_vma
        )  # fmt: skip
        return jax.jit(f)

    with jax.set_mesh(mesh):
        x = jax.device_put(X, P("i"))
        assert num_calls(make(ring_psum), x) == 1
        assert_same_trees(make(ring_psum)(x), make(lax.psum)(x))


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto, AxisType.Manual], ids=str)
def test_axis_types(kind, check_vma):
    # The default of jax.make_mesh is Explicit. shard_map turns those axes into Manual ones.
    if kind is AxisType.Manual:
        mesh = jax.make_mesh((4,), ("i",))
        assert mesh.axis_types == (AxisType.Explicit,)
    else:
        mesh = jax.make_mesh((4,), ("i",), axis_types=(kind,))
    x = jax.device_put(X, NamedSharding(mesh, P("i")))
    assert_matches_lax(lambda psum, x: fold_of_indices(psum, x, "i"), x, mesh=mesh, check_vma=check_vma)
    assert num_calls(sharded(lambda x: ring_psum(x, "i"), mesh=mesh, out_specs=P(), check_vma=check_vma), x) == 1


def test_gradient_on_an_explicit_mesh(check_vma):
    mesh = jax.make_mesh((2, 4), ("i", "j"))
    spec = P(("i", "j"))
    assert_matches_lax(
        lambda psum, x: jax.grad(lambda x: jnp.sum(psum(x * x, "j") * x))(x),
        jax.device_put(X, NamedSharding(mesh, spec)), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma,
    )  # fmt: skip


def test_within_a_larger_automatically_partitioned_program(check_vma):
    mesh = make_mesh((8,))
    x = jax.device_put(X, NamedSharding(mesh, P("i")))

    def make(psum):
        inner = sharded(lambda x: psum(x * x, "i") + x, mesh=mesh, check_vma=check_vma)
        return jax.jit(lambda x: inner(inner(x * 2) - x).sum() + x)(x)

    assert_same_trees(make(ring_psum), make(lax.psum))


# Nested, partly manual, eager and ahead-of-time programs.


def nested(psum, mesh, check_vma):
    def inner(x):
        return psum(x * x, "j") + x

    def outer(x):
        y = jax.shard_map(inner, in_specs=P("j"), out_specs=P("j"), axis_names={"j"}, check_vma=check_vma)(x)
        return psum(y, "i") + x

    return jax.jit(
        jax.shard_map(outer, mesh=mesh, in_specs=P("i"), out_specs=P("i"), axis_names={"i"}, check_vma=check_vma)
    )


def test_nested_shard_map(check_vma):
    mesh = jax.make_mesh((2, 4), ("i", "j"), axis_types=(AxisType.Auto,) * 2)
    x = jax.device_put(X, NamedSharding(mesh, P(("i", "j"))))
    with jax.set_mesh(mesh):
        ours, theirs = nested(ring_psum, mesh, check_vma), nested(lax.psum, mesh, check_vma)
        assert_same_trees(ours(x), theirs(x))
        # For the inner call all axes are manual. The outer call has an automatic axis.
        assert num_calls(ours, x) == 2


@pytest.mark.usefixtures("left_to_xla")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_partly_manual_falls_back_and_logs(kind, check_vma, caplog):
    mesh = jax.make_mesh((2, 4), ("i", "j"), axis_types=(kind, kind))
    x = jax.device_put(X.reshape(2, 8), NamedSharding(mesh, P("i", "j")))

    def make(psum):
        f = jax.shard_map(
            lambda x: psum(x * x, "i") + x, mesh=mesh, in_specs=P("i"), out_specs=P("i"), axis_names={"i"},
            check_vma=check_vma,
        )  # fmt: skip
        return jax.jit(f)

    with caplog.at_level(logging.INFO, logger="jax_ring"), jax.set_mesh(mesh):
        ours = make(ring_psum)(x)
    (record,) = [record for record in caplog.records if record.name == "jax_ring"]
    assert record.levelno == logging.INFO
    assert "('i',)" in record.getMessage()
    assert "['j']" in record.getMessage()
    assert "XLA's all_reduce" in record.getMessage()
    with jax.set_mesh(mesh):
        assert_same_trees(ours, make(lax.psum)(x))
        assert num_calls(make(ring_psum), x) == 0


def test_fully_manual_does_not_log(check_vma, caplog):
    with caplog.at_level(logging.DEBUG, logger="jax_ring"):
        sharded(lambda x: ring_psum(x - 1.5, "i"), out_specs=P(), check_vma=check_vma)(X)
    assert not [record for record in caplog.records if record.name == "jax_ring"]


def test_gradient_of_a_partly_manual_program(check_vma):
    mesh = jax.make_mesh((2, 4), ("i", "j"), axis_types=(AxisType.Auto,) * 2)

    def make(psum):
        f = jax.shard_map(
            lambda x: psum(x * x, "i") * x, mesh=mesh, in_specs=P("i"), out_specs=P("i"), axis_names={"i"},
            check_vma=check_vma,
        )  # fmt: skip
        return jax.jit(jax.grad(lambda x: f(x).sum()))(X)

    assert_same_trees(make(ring_psum), make(lax.psum))


def test_eager_shard_map(check_vma):
    assert_matches_lax(
        lambda psum, x: psum({"a": x, "b": (x * x, 1)}, "i")["b"][0] + x, X,
        mesh=make_mesh((4,)), check_vma=check_vma, jit=False,
    )  # fmt: skip


def test_eager_gradient(check_vma):
    assert_matches_lax(
        lambda psum, x: jax.grad(lambda x: jnp.sum(psum(x * x, "i") * x))(x), X,
        mesh=make_mesh((4,)), check_vma=check_vma, jit=False,
    )  # fmt: skip


def test_lowering_from_shapes_alone(check_vma):
    mesh = make_mesh((4,))
    shape = jax.ShapeDtypeStruct((16,), jnp.float32, sharding=NamedSharding(mesh, P("i")))
    f = sharded(lambda x: ring_psum(x, "i"), mesh=mesh, out_specs=P(), check_vma=check_vma)
    lowered = f.lower(shape)
    assert f"@{TARGET}" in lowered.as_text()
    total = lowered.compile()(jax.device_put(X, shape.sharding))
    chex.assert_trees_all_equal(total, X.reshape(4, 4).sum(0), strict=True)
    chex.assert_trees_all_equal_shapes_and_dtypes(f.eval_shape(shape), total)


def test_one_function_on_several_meshes(check_vma):
    # Each mesh has its own executable of the same function.
    body = lambda x: ring_psum(x, "i")  # noqa: E731
    devices = jax.devices()
    for mesh in (
        make_mesh((4,)),
        make_mesh((8,)),
        make_mesh((4,), devices=devices[4:]),
        make_mesh((4,), devices=devices[::-1]),
    ):
        size = mesh.shape["i"]
        total = sharded(body, mesh=mesh, out_specs=P(), check_vma=check_vma)(X)
        np.testing.assert_array_equal(total, X.reshape(size, -1).sum(0))
        assert isinstance(total.sharding.mesh, Mesh | AbstractMesh)
