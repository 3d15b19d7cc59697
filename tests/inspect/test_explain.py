"""jax_ring.explain: the collectives of a function, what serves them, and their predicted and counted bytes."""

import contextlib
import pathlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_mesh, sharded
from jax import lax
from jax._src.lax import parallel  # has the asynchronous collectives that jax.lax does not
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ring
from jax_ring import explain, override_lax, ring_psum
from jax_ring.inspect import compiled
from jax_ring.inspect.compiled import find_collectives, wire_bytes
from jax_ring.inspect.table import relative

RANKS = 8
MESH = make_mesh((RANKS,))
X = np.arange(16, dtype=np.float32)


def explained(body, *args, **options):
    options = {"mesh": MESH, "check_vma": False, **options}
    return explain(sharded(body, **options), *(args or (X,)))


def only(items):
    (item,) = items
    return item


def test_one_call(check_vma):
    found = explained(lambda x: ring_psum(x, "i") * x, check_vma=check_vma)
    call = only(found.collectives)
    assert call.name == "ring_psum"
    assert call.axes == ("i",)
    assert call.groups == (tuple(range(RANKS)),)
    assert call.operands == ("float32[2]",)
    assert call.num_bytes == 8
    assert call.times == 1
    assert call.algorithm == "auto"
    assert (call.served_by, call.why) == ("jax_ring", "")
    assert call.wire_bytes == 2 * 8 * 7 / 8
    assert "test_explain.py" in call.call_site
    instruction = only(found.instructions)
    assert instruction.name == "jax_ring_all_reduce"
    assert instruction.operands == ("f32[2]",)
    assert instruction.group_sizes == (RANKS,)
    assert found.predicted_bytes == found.counted_bytes == 14


def test_unjitted_function_and_abstract_arguments():
    f = jax.shard_map(lambda x, scale: ring_psum(x * scale, "i"), mesh=MESH, in_specs=(P("i"), P()), out_specs=P())
    found = explain(lambda x, *, scale: f(x, scale), jax.ShapeDtypeStruct((16,), jnp.bfloat16), scale=2.0)
    assert found.predicted_bytes == found.counted_bytes == 7


def test_a_tree_is_one_call_for_each_dtype():
    found = explained(lambda x: ring_psum({"a": x, "b": [x, x.astype(jnp.int8)]}, "i")["a"] + x)
    assert sorted(call.num_bytes for call in found.collectives) == [2, 16]


@pytest.mark.parametrize("dtype", [jnp.int4, jnp.uint2, jnp.float4_e2m1fn, jnp.float8_e8m0fnu])
def test_types_that_are_sent_as_wider_ones(dtype):
    found = explained(lambda x: ring_psum(x, "i"), jax.ShapeDtypeStruct((64,), dtype))
    itemsize = 1 if jnp.issubdtype(dtype, jnp.integer) else 4
    assert found.predicted_bytes == found.counted_bytes == 2 * 8 * itemsize * 7 / 8


def test_equal_and_constant_operands_and_unused_results():
    sums, gather = explained(
        lambda x: ring_psum((x, x), "i")[1] + jax_ring.ring_all_gather(np.float32(1), "i")[0]
    ).collectives
    assert sums.wire_bytes == 2 * (8 + 8) * 7 / 8
    assert gather.wire_bytes == 8 * 4 * 7 / 8


def test_groups_and_several_axes():
    mesh = make_mesh((2, 4), ("i", "j"))
    spec = P(("i", "j"))

    def body(x):
        x = ring_psum(x, "j") + ring_psum(x, ("i", "j"))
        return x + ring_psum(x, "j", axis_index_groups=[[0, 3], [1], [2]]) + lax.psum(x, "i")

    found = explained(body, mesh=mesh, in_specs=spec, out_specs=spec)
    rows, both, uneven, columns = found.collectives
    assert rows.groups == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert both.axes == ("i", "j")
    assert both.groups == (tuple(range(8)),)
    assert uneven.groups == ((0, 3), (1,), (2,), (4, 7), (5,), (6,))
    # Half of the ranks are in groups of two, and send 8 bytes each; the others send nothing.
    assert uneven.wire_bytes == 4
    assert columns.groups == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert found.predicted_bytes == found.counted_bytes


def test_loops_and_branches():
    def body(x):
        def step(carry, _):
            inner, _ = lax.scan(lambda c, _: (ring_psum(c, "i") * 0.1, None), carry, length=3)
            return inner + x, None

        x, _ = lax.scan(step, x, length=5)
        x = lax.while_loop(lambda v: v.sum() < 10, lambda v: v + ring_psum(v, "i"), x)
        x = lax.cond(lax.axis_size("i") > x[0], lambda v: ring_psum(v, "i"), lambda v: v, x)
        return jax.checkpoint(lambda v: ring_psum(jnp.sin(v), "i"))(x)

    found = explained(body)
    assert [call.times for call in found.collectives] == [15, None, None, 1]
    assert sorted(str(i.times) for i in found.instructions) == ["1", "15", "None", "None"]
    assert found.predicted_bytes is None
    assert "at least 224 predicted, at least 224 counted" in str(found)


def test_only_what_runs_is_listed():
    """The solve of a linear solver, and the branch of the platform."""

    def body(x):
        solve = lambda matvec, b: ring_psum(b, "i") / 24  # noqa: E731
        x = lax.custom_linear_solve(lambda v: 3 * ring_psum(v, "i"), x, solve, solve)
        other = {"cuda": lambda v: ring_psum(v * v, "i"), "default": lambda v: v}
        x = lax.platform_dependent(x, cpu=lambda v: lax.pmax(v, "i"), **other)
        return lax.platform_dependent(x, cuda=other["cuda"], default=lambda v: lax.pmin(v, "i"))

    found = explained(body)
    assert [(call.name, call.times) for call in found.collectives] == [("ring_psum", 1), ("pmax", 1), ("pmin", 1)]
    assert found.predicted_bytes == found.counted_bytes


def test_collectives_that_are_a_whole_function_have_the_line_of_its_use():
    psum = partial(ring_psum, axis_name="i")

    def body(x):
        x = lax.cond(lax.axis_index("i") >= 0, psum, lambda v: v, x)
        x = lax.map(psum, x)
        x = jax.jit(jax.checkpoint(psum))(x * x)
        return lax.map(partial(lax.psum, axis_name="i"), x[:, None])[:, 0]

    first = body.__code__.co_firstlineno
    with override_lax():
        found = explained(body)
    assert [int(call.call_site.split(":")[1]) - first for call in found.collectives] == [1, 2, 3, 4]
    assert sorted(int(i.call_sites.split(":")[1].split()[0]) - first for i in found.instructions) == [1, 2, 3, 4]
    whole = jax.shard_map(psum, mesh=MESH, in_specs=P("i"), out_specs=P())
    replicas = explained(lambda x: jax_ring.check_replicas(x, "i"), in_specs=P())  # the second call is in a branch
    calls = [*explain(lambda x: whole(x), X).collectives, *replicas.collectives]
    assert len(calls) == 3
    assert all("test_explain.py" in call.call_site for call in calls)


def test_custom_derivatives_and_nested_functions():
    @jax.custom_vjp
    def f(x):
        return ring_psum(x, "i")

    f.defvjp(lambda x: (f(x), None), lambda _, ct: (ring_psum(ct * 2, "i"),))
    found = explained(jax.grad(lambda x: jax.jit(f)(x).sum()))
    assert [call.name for call in found.collectives][-1] == "ring_psum"
    assert explained(lambda x: jax.jit(f)(x)).predicted_bytes == 14


def test_collectives_of_lax(check_vma):
    def body(x):
        x = lax.pmax(x, "i") + lax.psum(x, "i")
        x = x + lax.all_gather(x, "i").sum(0) + lax.ppermute(x, "i", [(k, (k + 1) % RANKS) for k in range(RANKS)])
        x = jnp.tile(x, RANKS) + lax.all_to_all(jnp.tile(x, RANKS), "i", 0, 0, tiled=True)
        return lax.psum_scatter(x, "i", tiled=True)

    found = explained(body, check_vma=check_vma)
    assert "invariant" not in str(found)
    by_name = {call.name: call for call in found.collectives}
    assert {name: call.wire_bytes for name, call in by_name.items()} == {
        "pmax": 14, "psum": 14, "all_gather": 56, "ppermute": 8, "all_to_all": 56, "psum_scatter": 56
    }  # fmt: skip
    assert found.predicted_bytes == found.counted_bytes
    assert all(call.served_by == "XLA" and "not overridden" in call.why for call in by_name.values())


# Collectives of lax whose primitives have other names than the functions, and those that ring_ functions leave to lax.
OTHER_NAMES = {
    "psum of unreduced": ("psum", P(), lambda x: lax.psum(lax.pcast(x, "i", to="unreduced"), "i")),
    "ring_psum of unreduced": ("psum", P(), lambda x: ring_psum(lax.pcast(x, "i", to="unreduced"), "i")),
    "psum_scatter of unreduced": ("psum_scatter", P("i"),
                                  lambda x: lax.psum_scatter(lax.pcast(x, "i", to="unreduced"), "i", tiled=True)),
    "all_gather to invarying": ("all_gather", P(), lambda x: lax.all_gather(x, "i", tiled=True, to="invarying")),
    "all_gather to reduced": ("all_gather", P(reduced={"i"}),
                              lambda x: jax_ring.ring_all_gather(x, "i", tiled=True, to="reduced")),
    "all_gather_start to reduced": ("all_gather_start", P(reduced={"i"}),
                                    lambda x: parallel.all_gather_start(x, "i", tiled=True, to="reduced").done()),
}  # fmt: skip


@pytest.mark.parametrize("case", OTHER_NAMES)
def test_collectives_are_named_after_functions(case):
    function, out_specs, body = OTHER_NAMES[case]
    mesh = jax.make_mesh((RANKS,), ("i",), axis_types=(AxisType.Explicit,))
    x = jax.device_put(np.arange(64, dtype=np.float32), NamedSharding(mesh, P("i")))
    with jax.set_mesh(mesh):
        found = explained(body, x, mesh=mesh, out_specs=out_specs, check_vma=True)
    assert only(found.collectives).name == function
    assert found.predicted_bytes == found.counted_bytes > 0


def test_a_local_reduction_is_no_collective():
    def body(x):
        return lax.reduce(x, np.float32(0), lambda a, b: 2 * a + b, (0,))[None]  # its primitive is "reduce"

    assert explained(body).collectives == ()


RING_COLLECTIVES = {
    "psum": lambda x: jax_ring.ring_psum(x, "i"),
    "pmax": lambda x: jax_ring.ring_pmax(x, "i"),
    "pmin": lambda x: jax_ring.ring_pmin(x, "i"),
    "psum_scatter": lambda x: jax_ring.ring_psum_scatter(jnp.tile(x, RANKS), "i", tiled=True),
    "all_gather": lambda x: jax_ring.ring_all_gather(x, "i"),
    "reduce": lambda x: jax_ring.ring_reduce(x, "i", root=3),
    "broadcast": lambda x: jax_ring.ring_broadcast(x, "i", root=3),
}


@pytest.mark.parametrize("name", RING_COLLECTIVES)
def test_the_family(name, check_vma):
    found = explained(RING_COLLECTIVES[name], check_vma=check_vma)
    call = only(found.collectives)
    assert call.name == f"ring_{name}"
    assert call.served_by == "jax_ring"
    assert found.predicted_bytes == found.counted_bytes == call.wire_bytes
    # A gather or scatter has 8 times the 8 bytes of each rank.
    volume = 64 if name in ("psum_scatter", "all_gather") else 8
    assert call.num_bytes == volume
    assert call.wire_bytes == volume * 7 / 8 * (2 if name in ("psum", "pmax", "pmin") else 1)


def test_only_pairs_of_a_permutation_send():
    def body(x):
        x = jax_ring.ring_ppermute(x, "j", [(0, 1), (2, 2)])
        x = jax_ring.ring_ppermute(x, "j", [(k, k) for k in range(4)]) * 2
        return lax.ppermute(x, ("i", "j"), [(0, 1), (2, 2), (7, 0)])

    spec = P(("i", "j"))
    found = explained(body, mesh=make_mesh((2, 4), ("i", "j")), in_specs=spec, out_specs=spec)
    # One rank of four sends its 8 bytes, then none, then two of eight.
    assert [call.wire_bytes for call in found.collectives] == [2, 0, 2]
    assert found.predicted_bytes == found.counted_bytes == 4


def test_mesh_of_the_context():
    mapped = jax.shard_map(lambda x: ring_psum(x, "i"), in_specs=P("i"), out_specs=P())
    with jax.set_mesh(MESH):
        found = explain(jax.jit(mapped), X)
    assert only(found.collectives).served_by == "jax_ring"
    assert found.predicted_bytes == found.counted_bytes == 14


def test_nested_shard_maps(check_vma):
    # The inner shard_map leaves no axis to the compiler, because the outer axis is already manual.
    def outer(x):
        options = {"in_specs": P("j"), "out_specs": P("j"), "axis_names": {"j"}, "check_vma": check_vma}
        return ring_psum(jax.shard_map(lambda x: ring_psum(x, "j") + x, **options)(x), "i")

    mesh = make_mesh((2, 4), ("i", "j"))
    options = {"in_specs": P("i"), "out_specs": P(), "axis_names": {"i"}, "check_vma": check_vma}
    with jax.set_mesh(mesh):
        inner, outer = explain(jax.jit(jax.shard_map(outer, mesh=mesh, **options)), X).collectives
    assert (inner.axes, inner.served_by) == (("j",), "jax_ring")
    assert (outer.axes, outer.served_by) == (("i",), "jax_ring")


def test_served_by_under_the_override():
    body = lambda x: lax.psum(x, "i")  # noqa: E731
    with override_lax():
        found = explained(body)
    assert only(found.collectives).served_by == "jax_ring"
    assert only(found.instructions).name == "jax_ring_all_reduce"
    assert only(explained(body).collectives).served_by == "XLA"


def test_random_keys_stay_with_jax_under_the_override():
    keys = jax.random.split(jax.random.key(0), RANKS)
    for override in (contextlib.nullcontext, partial(override_lax, partitioner=False)):
        with override():
            found = explained(lambda x: lax.all_gather(x, "i", tiled=True), keys)
        call = only(found.collectives)
        assert (call.served_by, call.num_bytes) == ("XLA", 8 * RANKS)
        assert found.predicted_bytes == found.counted_bytes == call.wire_bytes


def test_sums_that_differentiation_inserts():
    def body(w, x):
        return jax.grad(lambda w: (w * x).sum())(w)

    found = explained(body, 1.0, X, in_specs=(P(), P("i")), out_specs=P(), check_vma=True)
    assert only(found.collectives).name == "psum"


@pytest.mark.usefixtures("left_to_xla")
def test_reason_for_the_fallback():
    mesh = make_mesh((4, 2), ("i", "auto"))
    f = jax.jit(jax.shard_map(lambda x: ring_psum(x, "i"), mesh=mesh, in_specs=P("i"), out_specs=P(), axis_names={"i"}))
    call = only(explain(f, X).collectives)
    assert (call.served_by, call.algorithm) == ("XLA", "")
    assert "leaves the axes ['auto'] to the compiler" in call.why


def test_groups_of_one_need_no_communication():
    found = explained(lambda x: ring_psum(x, "i", axis_index_groups=[[k] for k in range(RANKS)]))
    assert only(found.collectives).served_by == "none"
    assert found.predicted_bytes == found.counted_bytes == 0


def test_collectives_of_the_partitioner_are_instructions_only():
    x = jax.ShapeDtypeStruct((16,), jnp.float32, sharding=NamedSharding(MESH, P("i")))
    found = explain(jax.jit(jnp.sum), x)
    assert found.collectives == ()
    assert only(found.instructions).name == "all-reduce"


def test_equal_calls_are_written_twice_and_compiled_once():
    found = explained(lambda x: ring_psum(x, "i") * ring_psum(x, "i"))
    assert found.predicted_bytes == 2 * found.counted_bytes


def test_calls_that_are_joined():
    found = explained(lambda x: [ring_psum(x + k, "i") for k in range(3)])
    assert len(found.collectives) == 3
    instruction = only(found.instructions)
    assert instruction.operands == ("f32[2]",) * 3
    assert "test_explain.py" in instruction.call_sites
    assert found.predicted_bytes == found.counted_bytes == 42


def test_the_working_directory_is_left_out_of_paths_alone(monkeypatch):
    texts = "/home/a.py:3 (f), called at /home/data/home/b.py:4 (g)"
    for directory, expected in {
        "/home": "a.py:3 (f), called at data/home/b.py:4 (g)",
        "/": "home/a.py:3 (f), called at home/data/home/b.py:4 (g)",
        "/elsewhere": texts,
    }.items():
        monkeypatch.setattr("os.getcwd", lambda directory=directory: directory)
        assert relative(texts) == expected


def test_names_of_a_program_from_elsewhere_are_escaped():
    """MLIR prints bytes that are no text, and escape codes, in hexadecimal."""
    assert compiled._unescaped(r"\1B[31mtrain\C3\A9.py:7\0A\FF\22\\") == '\\x1b[31mtrain\u00e9.py:7\\n\ufffd"\\'


def test_names_that_are_not_ascii():
    def größe(x):
        return ring_psum(x, "i")

    assert "größe)" in only(explained(größe).instructions).call_sites


def test_pmap():
    f = jax.pmap(lambda x: ring_psum(x, "i"), axis_name="i", devices=jax.devices()[:RANKS])
    found = explain(f, X.reshape(RANKS, 2))
    assert found.predicted_bytes == found.counted_bytes == 14


def test_text_fits_a_terminal(monkeypatch):
    # From elsewhere paths are longer, and one that does not fit a line is not broken.
    monkeypatch.chdir(pathlib.Path(__file__).parents[2])

    def fun(x):
        many = [ring_psum(x[:1].astype(dtype), "i") for dtype in ("int8", "bfloat16", "float16", "int32")]
        return ring_psum(x, "i") + lax.psum(x, "i"), many

    text = str(explained(fun))
    assert max(map(len, text.splitlines())) <= 80
    assert "ring_psum" in text
    assert "jax_ring (auto)" in text
    assert "float32[2]" in text
    assert "44 predicted, 44 counted" in text  # 2 x 14, and 1.75 + 3.5 + 3.5 + 7


def test_text_has_ten_rows_of_each_table():
    text = str(explained(lambda x: [ring_psum(jnp.tile(x, k), "i") for k in range(1, 13)]))
    assert text.count("  ring_psum ") == 10
    assert "... 2 more in .collectives" in text


def test_no_collectives():
    found = explain(lambda x: x + 1, X)
    assert found.collectives == found.instructions == ()
    assert "0 predicted, 0 counted" in str(found)


# Forms of HLO, and formulas.


def test_forms_of_hlo():
    text = """HloModule jit_f, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %c = f32[] add(%a, %b)
}

ENTRY %main.1_spmd (p: f32[4]) -> f32[4] {
  %iota = bf16[4,2]{1,0} all-reduce(%p), channel_id=1, replica_groups=[4,2]<=[8], to_apply=%add
  %all = pred[3]{0} all-reduce(%p), replica_groups={}, to_apply=%add
  %tuple = (f32[4]{0}, /*index=1*/s4[5]{0}) all-reduce(%p, %q), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  %mesh = f32[2]{0} all-reduce(%p), replica_groups=mesh['i'=2,'j'=4] {'j'}, to_apply=%add
  %part = f32[2]{0} all-reduce(%p), replica_groups=mesh['i'=2,'j'=4] {'i','j':(1)2}, to_apply=%add
  %start = (f32[1]{0}, f32[8]{0}) all-gather-start(%p), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}
  %done = f32[8]{0} all-gather-done(%start)
  %ragged = ((f32[16]{0}, f32[8]{0}, s64[4]{0}), f32[8]{0}) ragged-all-to-all-start(%p), replica_groups={{0,1,2,3}}
  ROOT %scatter = f32[1]{0} reduce-scatter(%p), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, to_apply=%add
}
"""
    found = find_collectives(text)
    assert [i.name for i in found] == ["all-reduce"] * 5 + [
        "all-gather-start",
        "ragged-all-to-all-start",
        "reduce-scatter",
    ]
    assert [i.num_bytes for i in found] == [16, 3, 19, 8, 8, 32, 32, 32]
    assert [i.group_sizes for i in found] == [(2,) * 4, (8,), (4, 4), (4, 4), (4, 4), (8,), (4,), (8,)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_formulas(ranks):
    volume = 840
    scatter = wire_bytes("reduce_scatter", volume, [ranks])
    assert scatter == pytest.approx(volume * (ranks - 1) / ranks)
    # A ring all-reduce is a reduce-scatter followed by an all-gather.
    assert wire_bytes("all_reduce", volume, [ranks]) == scatter + wire_bytes("all_gather", volume, [ranks])
    assert wire_bytes("all_reduce", volume, [ranks], "one_shot") == volume * (ranks - 1)
    assert wire_bytes("all_reduce", volume, [ranks] * 5) == wire_bytes("all_reduce", volume, [ranks])


def test_a_result_in_the_place_of_the_function_is_refused():
    with pytest.raises(TypeError, match=r"explain: pass a function and its arguments, as in explain\(f, x\)"):
        explain(jnp.ones(3))
