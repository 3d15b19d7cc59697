"""Programs of `jit` alone, compiled for GPUs: the hook replaces the collectives that XLA's partitioner inserts."""

import collections

import jax
import numpy as np
import pytest
from compiled_programs import ONE_HOST, TWO_HOSTS, calls_in, calls_in_place, collectives_of_xla, on_stream, optimized
from partitioned_programs import (
    PROGRAMS,
    divided,
    divided_columns,
    exchanged,
    parameters_of,
    replicated,
    run_on_cpu,
    scanned,
    tensor_parallel,
)
from timeline import products_beside, timeline

from jax_ring import _compat, assume_hosts, override_lax, runtime
from jax_ring.lowering.hlo import for_gpus, hook
from jax_ring.lowering.hlo.program import PLATFORMS, Platform
from jax_ring.lowering.hlo.shapes import Shape

AXES = ("a", "b")
IS_SERVED = "cuda" in _compat.PLATFORMS_WITH_HOOK
served = pytest.mark.skipif(not IS_SERVED, reason="JAX before 0.11 hands over no programs for GPUs")


def lowered(program, mesh):
    function, arguments = program(mesh)
    return function.lower(*arguments)


def compiled(program, mesh) -> str:
    with override_lax():
        return optimized(lowered(program, mesh))


@served
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_no_collective_is_left_to_xla(mesh_of, program):
    hlo = compiled(program, mesh_of("1x1x8", (4, 2), AXES))
    assert calls_in(hlo)
    assert not collectives_of_xla(hlo)
    if program is not exchanged:
        assert "input_output_alias" in hlo  # what is donated stays donated


@pytest.mark.skipif(IS_SERVED, reason="for JAX before 0.11")
def test_older_versions_leave_all_to_xla(mesh_of):
    hlo = compiled(replicated, mesh_of("1x1x8", (8, 1), AXES))
    assert not calls_in(hlo)
    assert collectives_of_xla(hlo)


@served
def test_kinds(mesh_of):
    """As XLA has it after the hook: sums whose blocks alone are read are scattered, and others are joined."""
    mesh = mesh_of("1x1x8", (8, 1), AXES)
    counts = {each: collections.Counter(calls_in(compiled(each, mesh))) for each in (replicated, scanned)}
    assert counts[replicated] == {"all_reduce": 2}  # one of them is of a loss that is read before
    assert counts[scanned] == {"all_gather": 4, "reduce_scatter": 2, "all_reduce": 1}
    by_xla = collectives_of_xla(optimized(lowered(scanned, mesh)))
    assert sum(opcode == "reduce-scatter" for opcode, _ in by_xla) > 0


@served
def test_sums_run_beside_the_backward_pass(mesh_of, monkeypatch):
    monkeypatch.setattr(for_gpus, "COMBINE_THRESHOLD_BYTES", 1)
    mesh = mesh_of("1x1x8", (8, 1), AXES)
    hlo = compiled(replicated, mesh)
    assert set(calls_in_place(hlo)) <= {"jax_ring_all_reduce"}  # as in test_topology_overlap.py
    ours = products_beside(timeline(hlo))
    theirs = products_beside(timeline(optimized(lowered(replicated, mesh))))
    assert sum(products > 0 for products in ours.values()) > 1
    assert sum(ours.values()) > sum(theirs.values())


@served
@pytest.mark.parametrize("program", [divided, scanned], ids=lambda program: program.__name__)
def test_parameters_are_gathered_beside_products(mesh_of, program):
    hlo = compiled(program, mesh_of("1x1x8", (8, 1), AXES))
    assert sum(products_beside(timeline(hlo)).values()) > 0


@served
@pytest.mark.parametrize("program", [replicated, divided, divided_columns, exchanged], ids=lambda each: each.__name__)
def test_two_hosts(mesh_of, program):
    """Between hosts the steps are XLA's. The program is compiled where nothing is assumed any more."""
    with override_lax():
        with assume_hosts(TWO_HOSTS):
            of_two = lowered(program, mesh_of("1x16x1", (16, 1), AXES))
        with assume_hosts(ONE_HOST):
            of_one = lowered(program, mesh_of("1x8x1", (8, 1), AXES))
        of_two, of_one = optimized(of_two), optimized(of_one)
    assert calls_in(of_two)
    assert collectives_of_xla(of_two)
    assert calls_in(of_one)
    assert not collectives_of_xla(of_one)


@served
def test_the_override_can_leave_them_to_xla(mesh_of):
    with override_lax(partitioner=False):
        hlo = optimized(lowered(replicated, mesh_of("1x1x8", (8, 1), AXES)))
    assert not calls_in(hlo)
    assert not calls_in(optimized(lowered(replicated, mesh_of("1x1x8", (8, 1), AXES))))


@served
def test_collectives_on_a_stream_of_the_user_are_refused(mesh_of, monkeypatch):
    """They would share a lane with those of another stream. XLA of JAX 0.12 cannot compile them itself."""
    mesh = mesh_of("1x1x8", (8,), ("a",))
    put = lambda shape, spec: jax.ShapeDtypeStruct(shape, np.float32, sharding=jax.NamedSharding(mesh, spec))  # noqa: E731

    def program(x, w):
        total = lambda x, w: jax.lax.with_sharding_constraint(x @ w, jax.NamedSharding(mesh, jax.P()))  # noqa: E731
        return on_stream(total, "1")(x, w), total(x * 2, w)

    monkeypatch.setattr(runtime, "STRICT", True)
    with override_lax(), pytest.raises(jax.errors.JaxRuntimeError, match="it is on a GPU stream of compute_on"):
        jax.jit(program).lower(put((64, 64), jax.P(None, "a")), put((64, 64), jax.P("a"))).compile()


@pytest.fixture
def handed_over(monkeypatch, mesh_of):
    """handed_over(program, shape of the mesh) is what XLA hands over for eight GPUs."""

    def of(program, shape) -> bytes:
        found = []

        def keep(platform, serialized):
            if hook._mark_of(hook.Message.parse(serialized)):
                found.append(serialized)

        with monkeypatch.context() as patched:
            patched.setattr(hook, "transform", keep)
            compiled(program, mesh_of("1x1x8", shape, AXES))
        (program,) = found
        return program

    return of


@served
@pytest.mark.parametrize(
    ("program", "shape"),
    [(replicated, (8, 1)), (divided, (8, 1)), (divided, (4, 2)), (divided_columns, (8, 1)), (tensor_parallel, (2, 4)),
     (exchanged, (8, 1))],
    ids=lambda each: getattr(each, "__name__", None),
)  # fmt: skip
def test_the_bits_of_xla(handed_over, monkeypatch, program, shape):
    """What the hook makes of a program for GPUs, run by the CPU engine."""
    original = handed_over(program, shape)
    monkeypatch.setitem(PLATFORMS, "cpu", Platform(True, has_layouts=False))
    monkeypatch.setattr(runtime, "ASYNC_TARGETS", runtime.TARGETS)
    changed = hook.transform("cpu", original)
    assert changed is not None
    rng = np.random.default_rng(0)
    sharding = jax.NamedSharding(jax.make_mesh((8,), ("i",)), jax.P("i"))
    arguments = []
    for own in map(Shape, parameters_of(original)):
        values = rng.standard_normal((8 * own.dimensions[0], *own.dimensions[1:])).astype(own.dtype) / 8
        arguments.append(jax.device_put(values, sharding))
    expected, results = run_on_cpu(original, arguments), run_on_cpu(changed, arguments)
    for one, other in zip(expected, results, strict=True):
        assert one.any()
        np.testing.assert_array_equal(one, other)
