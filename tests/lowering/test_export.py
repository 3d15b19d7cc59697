"""jax.export: an engine serves calls of static shapes; XLA those of symbolic ones, and all for several platforms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_mesh, sharded
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tiers import full_but

from jax_ring import (
    _compat,
    override_lax,
    ring_all_gather,
    ring_broadcast,
    ring_pmax,
    ring_pmin,
    ring_psum,
    ring_psum_scatter,
    ring_reduce,
    runtime,
)

RANKS = 8
MESH = make_mesh((4, 2), ("i", "j"))
SPEC = P(None, ("i", "j"))
CALL = "@jax_ring_"  # without the sign, also the name of a folder in locations
TARGETS = [jax.export.DisabledSafetyCheck.custom_call(target) for target in runtime.TARGETS.values()]


def both(x):
    """Two complex numbers."""
    return lax.complex(x, -x)


# Each takes x of shape (b, 2) on a rank; the size b is symbolic.
BODIES = {
    "psum": lambda x: ring_psum(x, "i"),
    "psum of a tree": lambda x: sum(ring_psum([x, lax.floor(x), x.astype(jnp.int32)], ("i", "j")), start=x),
    "psum in groups": lambda x: ring_psum(x, "i", axis_index_groups=[[0, 1, 3], [2]]),
    "pmax": lambda x: ring_pmax(x, ("i", "j")),
    "pmin of bfloat16": lambda x: ring_pmin(x.astype(jnp.bfloat16), "i"),
    "psum_scatter": lambda x: ring_psum_scatter(lax.concatenate([x] * 4, 0), "i", tiled=True),
    "psum_scatter, two axes": lambda x: ring_psum_scatter(lax.concatenate([x] * 8, 1), ("j", "i"), scatter_dimension=1,
                                                          tiled=True),
    "all_gather": lambda x: ring_all_gather(x, "j", tiled=True),
    "all_gather, two axes": lambda x: ring_all_gather(x, ("i", "j"), axis=1, tiled=True),
    "reduce": lambda x: ring_reduce(x, "i", root=3),
    "reduce of complex": lambda x: ring_reduce(both(x), ("i", "j"), root=5),
    "broadcast": lambda x: ring_broadcast(x, "j", root=1),
    "broadcast of bfloat16": lambda x: ring_broadcast(x.astype(jnp.bfloat16), "i", root=2),
    "broadcast of bool, two axes": lambda x: ring_broadcast(lax.eq(x, lax.floor(x)), ("j", "i"), root=6),
    "broadcast of complex": lambda x: ring_broadcast(both(x), "i", root=2),
}  # fmt: skip


def mapped(body, check_vma):
    def varying(x):
        out = body(x)
        invariant = tuple({"i", "j"} - _compat.varying_axes(out)) if check_vma else ()
        return lax.pcast(out, invariant, to="varying") if invariant else out

    return sharded(varying, mesh=MESH, in_specs=SPEC, out_specs=SPEC, check_vma=check_vma)


def exported(f, *shape, **options):
    """The exported program after a round trip through its serialized form."""
    x = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(MESH, SPEC))
    program = jax.export.export(f, disabled_checks=TARGETS, **options)(x)
    return jax.export.deserialize(program.serialize())


def values(size):
    x = np.arange(size * 2 * RANKS, dtype=np.float32).reshape(size, 2 * RANKS)
    return jax.device_put(np.where(x % 3 == 1, -0.0, x), NamedSharding(MESH, SPEC))


def assert_same_values(program, f, sizes=(1, 5)):
    for size in sizes:
        np.testing.assert_array_equal(np.asarray(jax.jit(program.call)(values(size))), np.asarray(f(values(size))))


# JAX refuses groups with check_vma=True.
@pytest.mark.parametrize(
    ("name", "check_vma"),
    full_but(
        [(name, vma) for name in BODIES for vma in (True, False) if "groups" not in name or not vma],
        [("psum", True), ("psum_scatter", False), ("all_gather, two axes", True), ("all_gather, two axes", False)],
    ),
)
def test_symbolic_shapes(name, check_vma, monkeypatch, caplog):
    # The calls here do not use Gloo, whose reduce-scatter is wrong.
    monkeypatch.setattr(_compat, "WRONG_REDUCE_SCATTER_ON_CPU", False)
    f = mapped(BODIES[name], check_vma)
    (b,) = jax.export.symbolic_shape("b")
    with caplog.at_level("INFO", logger="jax_ring"):
        program = exported(f, b, 2 * RANKS)
    assert "uses XLA's" in caplog.text
    assert "JAX does not refine custom calls of a symbolic shape, here (" in caplog.text
    assert CALL not in program.mlir_module()
    assert_same_values(program, f)


def test_a_static_operand_among_symbolic_shapes(check_vma):
    def body(x):
        return lax.concatenate([x, ring_psum(lax.reduce_max(x, (0,)), "i")[None]], 0)

    f = mapped(body, check_vma)
    (b,) = jax.export.symbolic_shape("b")
    program = exported(f, b, 2 * RANKS)
    assert f"{CALL}all_reduce" in program.mlir_module()
    assert_same_values(program, f)


def test_symbolic_shapes_under_the_override(check_vma):
    f = mapped(lambda x: lax.psum(x, "i") + lax.pmax(x, "j"), check_vma)
    (b,) = jax.export.symbolic_shape("b")
    with override_lax():
        program = exported(f, b, 2 * RANKS)
        assert CALL not in program.mlir_module()
        assert_same_values(program, f)


def test_strict_refuses_symbolic_shapes(monkeypatch):
    monkeypatch.setattr(runtime, "STRICT", True)
    (b,) = jax.export.symbolic_shape("b")
    with pytest.raises(
        NotImplementedError, match=r"ring_psum over \('i',\) .*symbolic shape.*\(b, 2\).*JAX_RING_STRICT"
    ):
        exported(mapped(BODIES["psum"], check_vma=True), b, 2 * RANKS)


def test_a_wrong_reduce_scatter_is_refused(monkeypatch):
    monkeypatch.setattr(_compat, "WRONG_REDUCE_SCATTER_ON_CPU", True)
    (b,) = jax.export.symbolic_shape("b")
    f = mapped(BODIES["psum_scatter"], check_vma=False)
    with pytest.raises(NotImplementedError, match=r"ring_psum_scatter over \('i',\).*\(4\*b, 2\).*jaxlib 0.12"):
        exported(f, b, 2 * RANKS)
    with (
        override_lax(),
        pytest.raises(NotImplementedError, match=r"lax.psum_scatter over \('i',\).*\(4\*b, 2\)"),
    ):
        exported(mapped(lambda x: lax.psum_scatter(x, "i", tiled=True), check_vma=False), 4 * b, 2 * RANKS)


@pytest.mark.parametrize("name", ["psum", "psum_scatter", "all_gather", "reduce", "broadcast"])
def test_static_shapes(name):
    f = mapped(BODIES[name], check_vma=True)
    program = exported(f, 5, 2 * RANKS)
    assert CALL in program.mlir_module()
    assert_same_values(program, f, sizes=[5])


@pytest.mark.parametrize("name", ["psum", "psum_scatter", "all_gather", "reduce", "broadcast"])
def test_several_platforms(name):
    f = mapped(BODIES[name], check_vma=True)
    program = exported(f, 5, 2 * RANKS, platforms=("cpu", "cuda"))
    assert CALL not in program.mlir_module()
    assert_same_values(program, f, sizes=[5])


def test_several_platforms_and_symbolic_shapes():
    f = mapped(BODIES["psum"], check_vma=True)
    (b,) = jax.export.symbolic_shape("b")
    program = exported(f, b, 2 * RANKS, platforms=("cpu", "cuda"))
    assert_same_values(program, f)


# As they were before both engines had the same ones.
OLD_ATTRIBUTES = {
    "call": "ring_psum of float32[5,2] over axis 'i'", "site": "train.py:7", "program": "",
    "collective": "all_reduce", "op": "sum", "root": np.int64(0), "algorithm": "auto", "order": "rank", "rounds_to": "",
    "blocks_apart": np.int64(0),
    "partitions": np.arange(RANKS), "processes": np.zeros(RANKS, np.int64), "group_sizes": np.array([RANKS]),
    **{
        name: np.zeros(0, np.int64)
        for name in ("sources", "one_shot_bytes", "two_shot_bytes", "tree_shards", "tree_sizes", "tree_ranks", "part")
    },
}  # fmt: skip


def test_a_program_that_another_version_has_exported_is_refused():
    def body(x):
        position = lax.axis_index(("i", "j")).astype(jnp.uint32)
        return jax.ffi.ffi_call("jax_ring_all_reduce", jax.ShapeDtypeStruct(x.shape, x.dtype))(
            position, x, **OLD_ATTRIBUTES
        )

    program = exported(mapped(body, check_vma=False), 5, 2 * RANKS)
    error = (
        r"ring_psum of float32\[5,2\] over axis 'i', called at train.py:7: the attribute 'members' is missing .*"
        "exported or compiled with another version of jax_ring. Export or compile it again"
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match=error):
        jax.jit(program.call)(values(5))
