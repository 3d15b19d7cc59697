"""The option `overlap`, which CPU devices ignore, and the reading of scheduled GPU programs."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import make_mesh
from jax.sharding import PartitionSpec as P
from timeline import COLLECTIVE, COPIES, EXCHANGE, MAIN, OTHER, PRODUCT, products_beside, timeline

from jax_ring import (
    allreduce_gradients,
    reduce_in_backward,
    ring_psum,
    sync_gradients,
    sync_with_feedback,
    value_and_grad,
    zero,
)
from jax_ring.inspect.compiled import find_collectives
from jax_ring.training.wire import reduced_by

W, X = jnp.ones((8, 4)), jnp.ones((16, 8))


def loss(w, x):
    return jnp.tanh(x @ w).mean()


def backward_loss(w, x, **options):
    return loss(reduce_in_backward(w, "i", **options), x)


def zero_update(w, x, stage=2, **options):
    # Of this layout no operations have to be checked.
    optimizer = zero.sharded_optimizer(optax.sgd(0.1), "i", stage=stage, layout="parameter", **options)
    return optimizer.update(jax.grad(loss)(w, x), optimizer.init(w), w)[0]


STEPS = {
    "value_and_grad": lambda w, x, **options: value_and_grad(loss, "i", **options)(w, x),
    "reduce_in_backward": lambda w, x, **options: value_and_grad(
        functools.partial(backward_loss, **options), "i", reduced_in_backward=True, **options
    )(w, x),
    "sync_gradients": lambda w, x, **options: sync_gradients(jax.grad(loss)(w, x), "i", **options),
    "sync_with_feedback": lambda w, x, **options: sync_with_feedback(
        jax.grad(loss)(w, x), jnp.zeros_like(w), "i", **options
    )[0],
    "allreduce_gradients": lambda w, x, **options: allreduce_gradients("i", **options).update(
        jax.grad(loss)(w, x), optax.EmptyState()
    )[0],
    "sharded_optimizer": zero_update,
    "sharded_optimizer of stage 1": functools.partial(zero_update, stage=1),
}


def mapped(fun):
    return jax.jit(jax.shard_map(fun, mesh=make_mesh(4), in_specs=(P(), P("i")), out_specs=P(), check_vma=False))


def options_of_calls(fun) -> list[bool]:
    """The option of each call of jax_ring in a function."""
    text = str(jax.make_jaxpr(mapped(fun))(W, X))
    return [piece.startswith("True") for piece in text.split("overlap=")[1:]]


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_gradients_overlap_unless_switched_off(step):
    assert set(options_of_calls(step)) == {True}
    assert set(options_of_calls(functools.partial(step, overlap=False))) == {False}


@pytest.mark.parametrize("name", ["reduce_in_backward", "sharded_optimizer"])
def test_programs_for_cpus_do_not_change(name):
    texts = [mapped(functools.partial(STEPS[name], overlap=overlap)).lower(W, X).as_text() for overlap in (True, False)]
    assert texts[0] == texts[1]
    assert "custom_call" in texts[0]


def test_it_is_true_or_false():
    with pytest.raises(TypeError, match=r"^value_and_grad: overlap must be True or False, got 'yes'"):
        value_and_grad(loss, "i", overlap="yes")
    with pytest.raises(TypeError, match=r"^sharded_optimizer: overlap must be True or False, got 1"):
        zero.sharded_optimizer(optax.sgd(0.1), "i", overlap=1)


def test_calls_of_the_loss_are_not_concerned():
    def step(w, x):
        return value_and_grad(lambda w, x: ring_psum(loss(w, x), "i"), "i")(w, x)

    calls = options_of_calls(step)
    assert False in calls
    assert True in calls


def test_with_the_collectives_of_lax():
    step = reduced_by("lax")(functools.partial(STEPS["value_and_grad"], overlap=True))
    assert options_of_calls(step) == []


SCHEDULED = """HloModule jit_f, is_scheduled=true, num_partitions=8

%fused (p: f32[8,8]) -> f32[8,8] {
  ROOT %dot.1 = f32[8,8] dot(%p, %p)
}

%on_stream (p.1: f32[8,8]) -> f32[8,8] {
  ROOT %call.1 = f32[8,8] custom-call(%p.1), custom_call_target="jax_ring_all_reduce_async", backend_config={group_sizes = dense<8> : tensor<1xi64>}
}

%body (t: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %gte = f32[8,8] get-tuple-element(%t), index=1
  %call-start = ((f32[8,8]), f32[8,8]) call-start(%gte), to_apply=%on_stream
  %product.1 = f32[8,8] fusion(%gte), kind=kOutput, calls=%fused
  %copy-start.1 = (f32[8,8], f32[8,8], u32[]) copy-start(%product.1)
  %product.2 = f32[8,8] custom-call(%gte), custom_call_target="__cublas$gemm"
  %copy-done.1 = f32[8,8] copy-done(%copy-start.1)
  %call-done = f32[8,8] call-done(%call-start)
  ROOT %tuple = (s32[], f32[8,8]) tuple(%one, %call-done)
}

%cond (t.1: (s32[], f32[8,8])) -> pred[] {
  ROOT %less = pred[] compare(%a, %b), direction=LT
}

%branch.1 (p.2: f32[8,8]) -> f32[8,8] {
  ROOT %product.3 = f32[8,8] dot(%p.2, %p.2)
}

%branch.2 (p.3: f32[8,8]) -> f32[8,8] {
  ROOT %call.2 = f32[8,8] custom-call(%p.3), custom_call_target="jax_ring_all_reduce", backend_config={group_sizes = dense<8> : tensor<1xi64>}
}

ENTRY %main (x: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8] parameter(0)
  %loop = (s32[], f32[8,8]) while(%init), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %all-reduce-start = f32[8,8] all-reduce-start(%x), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
  %sine = f32[8,8] sine(%x)
  %all-reduce-done = f32[8,8] all-reduce-done(%all-reduce-start)
  %plain = f32[8,8] custom-call(%x), custom_call_target="jax_ring_all_reduce", backend_config={group_sizes = dense<8> : tensor<1xi64>}
  %chosen = f32[8,8] conditional(%i, %x, %x), branch_computations={%branch.1, %branch.2}
  ROOT %last = f32[8,8] fusion(%plain), kind=kOutput, calls=%fused
}
"""  # noqa: E501


def test_timeline():
    work = timeline(SCHEDULED)
    assert [(each.name, each.kind, each.stream, each.loop) for each in work] == [
        ("call-start", EXCHANGE, COLLECTIVE, "body"),
        ("product.1", PRODUCT, MAIN, "body"),
        ("copy-start.1", OTHER, COPIES, "body"),
        ("product.2", PRODUCT, MAIN, "body"),
        ("all-reduce-start", EXCHANGE, COLLECTIVE, ""),
        ("sine", OTHER, MAIN, ""),
        ("plain", EXCHANGE, MAIN, ""),
        ("product.3", PRODUCT, MAIN, "branch.1"),
        ("call.2", EXCHANGE, MAIN, "branch.2"),
        ("last", PRODUCT, MAIN, ""),
    ]
    assert products_beside(work) == {"call-start": 2, "all-reduce-start": 0}


def test_asynchronous_calls_are_counted_once():
    assert [(each.name, each.times) for each in find_collectives(SCHEDULED)] == [
        ("jax_ring_all_reduce_async", 5),
        ("all-reduce-start", 1),
        ("jax_ring_all_reduce", 1),
        ("jax_ring_all_reduce", None),
    ]
