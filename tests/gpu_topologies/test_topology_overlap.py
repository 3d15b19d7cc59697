"""Calls beside the computation: on which stream XLA's GPU compiler puts them, in which order, in which lane."""

import functools
import importlib.util
import pathlib
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from command_buffers import Recorded, recorded
from compiled_programs import ONE_HOST, calls_in_place, on_stream, optimized
from jax import lax
from jax.sharding import PartitionSpec as P
from timeline import COLLECTIVE, EXCHANGE, MAIN, products_beside, timeline

from jax_ring import assume_hosts, explain, reduce_in_backward, ring_psum, sync_gradients, value_and_grad, zero
from jax_ring.inspect.compiled import find_collectives
from jax_ring.training.wire import reduced_by

EXAMPLES = pathlib.Path(__file__).parent.parent.parent / "examples"
# In XLA of older versions the scheduler does not know that such a call takes time.
KNOWS_CALLS = jax.__version_info__ >= (0, 12)


# Without Triton's matrix products programs are compiled in half the time.
OPTIONS = {"xla_gpu_enable_latency_hiding_scheduler": True, "xla_gpu_enable_triton_gemm": False}


def compiled(mesh, fun, *shapes, options=None, hosts=None) -> str:
    """The optimized HLO of `fun` under shard_map, whose arrays after the first are split over the whole mesh."""
    return lowered(mesh, fun, *shapes, hosts=hosts).compile(compiler_options=OPTIONS | (options or {})).as_text()


def lowered(mesh, fun, *shapes, hosts=None):
    specs = (P(), *[P(mesh.axis_names)] * (len(shapes) - 1))
    mapped = jax.shard_map(fun, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    types = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=jax.NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    ]
    with assume_hosts(hosts or ONE_HOST):
        return jax.jit(mapped).lower(*types)


def lines_of_calls(stablehlo: str) -> list[str]:
    return re.findall(r'\bsite = "([^"]*)"', stablehlo)


def lanes(stablehlo: str) -> list[int]:
    return [int(lane) for lane in re.findall(r"\blane = (\d+) : i64", stablehlo)]


def layers(weights, x, **options):
    """The gradients of three layers, each reduced where it is used."""

    def loss(weights):
        y = x
        for i in range(len(weights)):
            y = jnp.tanh(y @ reduce_in_backward({"w": weights[i], "b": weights[i][0]}, "i", **options)["w"])
        return (y * y).mean()

    return jax.grad(loss)(weights)


LAYERS = (3, 64, 64), (1024, 64)


@pytest.fixture(scope="module")
def gpt():
    """The module of examples/train_gpt.py."""
    spec = importlib.util.spec_from_file_location("train_gpt", EXAMPLES / "train_gpt.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def gpt_compiled(gpt, mesh_of):
    """gpt_compiled(...) is the HLO of a training step of two layers, for the options of make_train_step."""
    mesh = mesh_of("1x1x8", names=("data",))

    def typed(tree, spec):
        sharding = jax.NamedSharding(mesh, spec)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)

    @functools.cache
    def compile(unroll: int, impl="ring", **options) -> str:
        params = jax.eval_shape(lambda: gpt.init_params(jax.random.key(0), width=64, layers=2, context=32))
        optimizer = optax.sgd(0.1)
        step = gpt.make_train_step(mesh, optimizer, jnp.bfloat16, unroll=unroll, wire="bfloat16", **options)
        state = gpt.TrainState(params=params, opt_state=jax.eval_shape(optimizer.init, params))
        tokens = typed(jax.ShapeDtypeStruct((64, 33), jnp.int32), P("data"))
        with reduced_by(impl):
            return step.lower(typed(state, P()), tokens).compile(compiler_options=OPTIONS).as_text()

    return compile


def test_gradients_are_reduced_beside_the_backward_pass(gpt_compiled):
    work = timeline(gpt_compiled(2, first_bucket_bytes=1))
    ours = products_beside(work)
    assert len(ours) == len([each for each in work if each.kind == EXCHANGE]) > 4  # all are on XLA's stream
    beside_product = [name for name, products in ours.items() if products]
    assert len(beside_product) >= (len(ours) / 2 if KNOWS_CALLS else 1)
    # XLA's own all-reduces are combined, and begin when the last gradient is there.
    theirs = products_beside(timeline(gpt_compiled(2, impl="lax")))
    assert sum(theirs.values()) < sum(ours.values())
    assert max(theirs.values(), default=0) <= 1


def test_without_overlap_calls_are_on_the_main_stream(mesh_of):
    hlo = compiled(mesh_of("1x1x8"), functools.partial(layers, overlap=False), *LAYERS)
    calls = [each for each in timeline(hlo) if each.kind == EXCHANGE]
    assert [each.stream for each in calls] == [MAIN] * 3
    assert '_async"' not in hlo


def test_in_a_scan_over_layers(gpt_compiled):
    hlo = gpt_compiled(1, first_bucket_bytes=1)
    work = timeline(hlo)
    in_loop = [each for each in work if each.kind == EXCHANGE and each.loop]
    assert {each.stream for each in in_loop} == {COLLECTIVE}
    assert len(in_loop) == 2
    assert sorted(each.times for each in find_collectives(hlo)) == [1, 1, 1, 2, 2]
    if KNOWS_CALLS:
        assert any(products_beside(work)[each.name] for each in in_loop)


def test_only_the_call_is_on_the_stream(mesh_of):
    """XLA of JAX 0.12 would also run what takes the results of a call apart."""
    hlo = compiled(mesh_of("1x1x8"), lambda tree: sync_gradients([tree, tree[0]], "i"), (16, 8))
    assert len(re.findall(r" (?:call|async)-start\(", hlo)) == 1
    (call,) = find_collectives(hlo)
    assert (call.name, call.operands, call.times) == ("jax_ring_all_reduce_async", ("f32[8]", "f32[16,8]"), 1)


def test_explain_counts_each_call_once(mesh_of):
    mesh = mesh_of("1x1x8")
    typed = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=jax.NamedSharding(mesh, spec))
        for shape, spec in zip(LAYERS, (P(), P("i")), strict=True)
    ]

    def explained(**options):
        step = functools.partial(layers, **options)
        return explain(jax.shard_map(step, mesh=mesh, in_specs=(P(), P("i")), out_specs=P(), check_vma=False), *typed)

    with_overlap, without = explained(), explained(overlap=False)
    assert with_overlap.collectives == without.collectives
    assert with_overlap.counted_bytes == without.counted_bytes == with_overlap.predicted_bytes
    assert {i.name for i in with_overlap.instructions} == {"jax_ring_all_reduce_async"}
    assert {i.name for i in without.instructions} == {"jax_ring_all_reduce"}


def test_each_call_names_its_own_line(mesh_of):
    """Calls of equal types in different lines are told apart by their operands, on either stream."""

    def two_lines(x, y, **options):
        first = sync_gradients(x * y[0], "i", **options)
        second = sync_gradients(x + y[0], "i", **options)
        return first, second

    def equal_calls(x, y, **options):
        first = sync_gradients(x * y[0], "i", **options)
        second = sync_gradients(x * y[0], "i", **options)
        return first, second

    mesh = mesh_of("1x1x8")
    for fun in (two_lines, equal_calls):
        texts = [lowered(mesh, functools.partial(fun, overlap=on), (8,), (16, 8)).as_text() for on in (True, False)]
        with_overlap, without = map(sorted, map(lines_of_calls, texts))
        assert with_overlap == without
        assert len(with_overlap) == 2
    assert with_overlap[0].startswith("one of 2 places")
    assert with_overlap[0] == with_overlap[1]


def test_across_hosts(mesh_of):
    mesh = mesh_of("1x2x8")
    hlo = compiled(mesh, layers, *LAYERS, hosts={0: 0, 1: 1})
    found = find_collectives(hlo)
    ours = [each.name for each in found if each.name.startswith("jax_ring")]
    assert sorted(set(ours)) == ["jax_ring_all_gather_async", "jax_ring_reduce_scatter_async"]
    assert all(each.stream == COLLECTIVE for each in timeline(hlo) if "on_stream" in each.name)
    assert any(each.name.startswith("all-reduce") for each in found)


def test_over_one_axis_of_a_mesh(mesh_of):
    mesh = mesh_of("1x1x8", (2, 4), ("host", "i"))
    (call,) = find_collectives(compiled(mesh, lambda x: sync_gradients(x, "i"), (16, 8)))
    assert (call.name, call.group_sizes) == ("jax_ring_all_reduce_async", (4, 4))


@pytest.mark.parametrize("overlap", [True, False])
def test_zero(mesh_of, overlap):
    optimizer = zero.sharded_optimizer(optax.adam(1e-3), "i", overlap=overlap)

    def step(params, x):
        grads = jax.grad(lambda p: jnp.tanh(x @ p).sum())(params)
        return optimizer.update(grads, optimizer.init(params), params)[0]

    names = [call.name for call in find_collectives(compiled(mesh_of("1x1x8"), step, (16, 8), (64, 16)))]
    ending = "_async" if overlap else ""
    assert sorted(names) == [f"jax_ring_all_gather{ending}", f"jax_ring_reduce_scatter{ending}"]


def test_the_next_layer_is_gathered_beside_the_products_of_this_one(mesh_of):
    """In both passes, which gather in a loop over stacked layers and compute each for a rank's three shards."""
    mesh, num_shards = mesh_of("1x1x8"), 24
    optimizer = zero.sharded_optimizer(optax.sgd(0.1), "i", stage=3, order="tree", num_shards=num_shards)
    layer = zero.sharded_layer(lambda w, h: jnp.tanh(h @ w["up"] @ w["down"]), "i", num_shards=num_shards)

    def gradients(params, x):
        return jax.grad(lambda shards: (layer(shards, x) ** 2).sum())(jax.vmap(optimizer.shard)(params))

    def step(up, x):
        return gradients({"up": up, "down": up.mT}, x).vectors

    work = timeline(compiled(mesh, step, (4, 64, 256), (num_shards, 16, 64)))
    gathers = [each for each in work if each.kind == EXCHANGE and each.loop]
    assert {each.stream for each in gathers} == {COLLECTIVE}
    beside = products_beside(work)
    # Two products of a layer in the forward pass, and six in the backward pass, which then scatters.
    assert [beside[each.name] for each in gathers] == ([2, 6, 0] if KNOWS_CALLS else [0, 0, 0])


# ---- Lanes ----------------------------------------------------------------------------------------------------------


def test_calls_of_one_stream_share_a_lane(mesh_of):
    def fun(x):
        x = ring_psum(x, "i")
        x = sync_gradients(x, "i")
        x = on_stream(lambda x: ring_psum(x * 2, "i"), "7")(x)
        x = on_stream(lambda x: ring_psum(x * 3, "i"), "collective")(x)
        x = on_stream(lambda x: sync_gradients(x * 4, "i"), "7")(x)
        return ring_psum(x, "i")

    text = lowered(mesh_of("1x1x8"), fun, (16, 8)).as_text()
    assert sorted(lanes(text)) == [0, 0, 1, 1, 2, 2]
    # XLA records calls of the main stream alone.
    assert len(re.findall(r"@jax_ring_all_reduce_async\(", text)) == 4
    assert len(re.findall(r"@jax_ring_all_reduce\(", text)) == 2


@pytest.mark.parametrize("automatic", [False, True], ids=["manual axes", "automatic axis"])
def test_calls_beside_the_computation_have_buffers_of_their_own(mesh_of, automatic):
    """XLA of JAX 0.12 lets a call on another stream overwrite an operand that is read beside it or afterwards."""
    mesh = mesh_of("1x1x8", (2, 4), ("a", "i"))

    def fun(x):
        x = jnp.tanh(x)
        sums = sync_gradients(x * 2, "i"), on_stream(lambda x: ring_psum(x * 3, "i"), "7")(x), ring_psum(x * 4, "i")
        return jax.tree.map(lambda total: total - x, sums)

    axes = {"i"} if automatic else {"a", "i"}
    mapped = jax.shard_map(fun, mesh=mesh, in_specs=P(), out_specs=P(), axis_names=axes, check_vma=False)
    hlo = optimized(
        jax.jit(mapped).lower(jax.ShapeDtypeStruct((16, 8), jnp.float32, sharding=jax.NamedSharding(mesh, P())))
    )
    assert len(re.findall('"jax_ring_all_reduce_async"', hlo)) == 2
    assert calls_in_place(hlo) == ["jax_ring_all_reduce"]


def test_too_many_streams(mesh_of):
    def fun(x):
        for stream in "123":
            x = on_stream(lambda x: ring_psum(x * 2, "i"), stream)(x)
        return x

    with pytest.raises(NotImplementedError, match="GPU streams 1, 2, 3 of compute_on, and one program can have them"):
        lowered(mesh_of("1x1x8"), fun, (16, 8))


# ---- CUDA graphs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False])
def test_only_calls_of_the_main_stream_are_recorded(mesh_of, tmp_path, overlap):
    """In a CUDA graph there are no streams: two calls of one lane could run at the same time."""

    def gradients(x, y):
        for i in range(6):
            x = jnp.sin(sync_gradients(x * y[i], "i", overlap=overlap))
        return x

    options = {"xla_dump_to": str(tmp_path), "xla_dump_hlo_as_text": True, "xla_gpu_graph_min_graph_size": 1}
    compiled(mesh_of("1x1x8"), gradients, (8,), (64, 8), options=options)
    inside, outside = (0, 6) if overlap else (6, 0)
    assert recorded(tmp_path, "jit_gradients") == Recorded(inside, outside, loops=0)


def test_value_and_grad_of_plain_functions(mesh_of):
    def step(w, x):
        return value_and_grad(lambda w: jnp.tanh(x @ w).mean(), "i")(w)[1]

    names = [call.name for call in find_collectives(compiled(mesh_of("1x1x8"), step, (16, 8), (64, 16)))]
    assert set(names) == {"jax_ring_all_reduce_async"}
    plain = compiled(mesh_of("1x1x8"), lambda x: lax.sin(ring_psum(x, "i")), (16, 8))
    assert [call.name for call in find_collectives(plain)] == ["jax_ring_all_reduce"]
