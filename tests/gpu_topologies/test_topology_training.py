"""Training steps compiled for GPUs that are not there: gradients, ZeRO, and the GPT of the examples."""

import importlib.util
import math
import pathlib
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from compiled_programs import ONE_HOST, TWO_HOSTS, calls_in, collectives_of_xla, optimized
from jax.sharding import PartitionSpec as P
from tiers import full_but

from jax_ring import assume_hosts, feedback_specs, value_and_grad, zero

pytestmark = pytest.mark.one_pair  # other modules cover what XLA's passes do with calls

PARAMS = {
    "w": jax.ShapeDtypeStruct((24, 16), jnp.float32),
    "b": jax.ShapeDtypeStruct((16,), jnp.float32),
    "half": jax.ShapeDtypeStruct((16, 8), jnp.bfloat16),
}
PLACES = pytest.mark.parametrize(
    ("shape", "hosts"),
    [("1x1x8", {0: 0}), ("1x8x1", ONE_HOST), ("1x2x8", {0: 0, 1: 1}), ("1x16x1", TWO_HOSTS)],
    ids=["process", "processes", "hosts", "hosts of processes"],
)


def loss(params, x):
    hidden = jnp.tanh(x @ params["w"] + params["b"]).astype(jnp.bfloat16)
    return (hidden @ params["half"]).astype(jnp.float32).var()


def placed(tree, mesh, specs):
    """A tree of types on the devices of a mesh."""
    if isinstance(specs, P):
        specs = jax.tree.map(lambda _: specs, tree)
    put = lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.NamedSharding(mesh, spec))  # noqa: E731
    return jax.tree.map(put, tree, specs)


def batch(mesh):
    return placed(jax.ShapeDtypeStruct((4 * mesh.size, 24), jnp.float32), mesh, P("i"))


def expect_sums_of(hlo: str, shape: str, *sizes: int) -> None:
    """All sums within hosts are ours. Between hosts XLA adds one element of eight, in float32."""
    across = collectives_of_xla(hlo)
    if shape in ("1x1x8", "1x8x1"):
        assert across == []
        assert set(calls_in(hlo)) == {"all_reduce"}
        return
    assert set(calls_in(hlo)) == {"reduce_scatter", "all_gather"}
    assert {opcode for opcode, _ in across} == {"all-reduce"}
    elements = [re.fullmatch(r"f32\[(\d+)\]", kind)[1] for _, kinds in across for kind in kinds]
    assert sum(map(int, elements)) == sum(math.ceil(size / 8) for size in sizes)  # XLA may have concatenated them


@PLACES
@pytest.mark.parametrize("check_vma", full_but([True, False], [True]), ids=["vma", "no_vma"])
def test_gradients(mesh_of, shape, hosts, check_vma):
    mesh = mesh_of(shape)
    step = value_and_grad(loss, "i")
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("i")), out_specs=P(), check_vma=check_vma)
    with assume_hosts(hosts):
        hlo = optimized(jax.jit(mapped).lower(placed(PARAMS, mesh, P()), batch(mesh)))
    expect_sums_of(hlo, shape, 24 * 16, 16, 16 * 8, 1)


@PLACES
@pytest.mark.parametrize("layout", ["flat", "parameter"])
def test_zero(mesh_of, shape, hosts, layout):
    mesh = mesh_of(shape)
    optimizer = zero.sharded_optimizer(optax.adam(1e-3), "i", layout=layout)
    specs = optimizer.specs(PARAMS)

    def step(params, state, x):
        local = jax.tree.map(lambda p: jax.lax.pcast(p, "i", to="varying"), params)
        updates, state = optimizer.update(jax.grad(loss)(local, x), state, params)
        return optax.apply_updates(params, updates), state

    init = jax.jit(jax.shard_map(optimizer.init, mesh=mesh, in_specs=P(), out_specs=specs))
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), specs, P("i")), out_specs=(P(), specs))
    params = placed(PARAMS, mesh, P())
    with assume_hosts(hosts):
        state = placed(jax.eval_shape(init, params), mesh, specs)
        hlo = optimized(jax.jit(mapped).lower(params, state, batch(mesh)))
    if shape in ("1x1x8", "1x8x1"):
        assert set(calls_in(hlo)) == {"reduce_scatter", "all_gather"}
        assert collectives_of_xla(hlo) == []
    else:  # sums of each host are exchanged, and added
        assert set(calls_in(hlo)) == {"reduce_scatter", "all_gather"}
        assert {opcode for opcode, _ in collectives_of_xla(hlo)} == {"all-to-all", "all-gather"}


@pytest.fixture(scope="module")
def gpt():
    """The module of examples/train_gpt.py."""
    path = pathlib.Path(__file__).parent.parent.parent / "examples" / "train_gpt.py"
    spec = importlib.util.spec_from_file_location("train_gpt", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def types_of_gpt(gpt, mesh):
    params = jax.eval_shape(lambda: gpt.init_params(jax.random.key(0), width=32, layers=2, context=16))
    tokens = jax.ShapeDtypeStruct((mesh.size, 17), jnp.int32)
    return placed(params, mesh, P()), placed(tokens, mesh, P("data"))


@PLACES
def test_gpt(mesh_of, shape, hosts, gpt):
    """The gradients are reduced in the backward pass."""
    mesh = mesh_of(shape, names=("data",))
    params, tokens = types_of_gpt(gpt, mesh)
    optimizer = optax.adam(1e-3)
    step = gpt.make_train_step(mesh, optimizer)
    state = gpt.TrainState(params=params, opt_state=placed(jax.eval_shape(optimizer.init, params), mesh, P()))
    with assume_hosts(hosts):
        hlo = optimized(step.lower(state, tokens))
    outer = [params[name].size for name in ("tokens", "positions", "norm")]
    layer = [leaf.size // 2 for leaf in jax.tree.leaves(params["layers"])]  # reduced in a scan over two
    expect_sums_of(hlo, shape, *outer, *layer, 1)


def test_gpt_in_blocks_of_8_bits(mesh_of, gpt):
    mesh = mesh_of("1x16x1", names=("data",))
    params, tokens = types_of_gpt(gpt, mesh)
    optimizer = optax.chain(gpt.allreduce_gradients("data", wire="int8", error_feedback=True), optax.adam(1e-3))
    specs = feedback_specs(jax.eval_shape(optimizer.init, params), "data")
    init = jax.jit(jax.shard_map(optimizer.init, mesh=mesh, in_specs=P(), out_specs=specs))
    state = gpt.TrainState(params=params, opt_state=placed(jax.eval_shape(init, params), mesh, specs))
    step = gpt.make_feedback_step(mesh, optimizer, specs)
    with assume_hosts(TWO_HOSTS):
        hlo = optimized(step.lower(state, tokens))
    assert {"reduce_scatter", "all_gather"} == set(calls_in(hlo))
    # What is exchanged between hosts are bytes, but for the mean of the losses.
    across = collectives_of_xla(hlo)
    assert {opcode for opcode, _ in across} == {"all-to-all", "all-gather", "all-reduce"}
    for opcode, kinds in across:
        assert all(kind == "f32[1]" if opcode == "all-reduce" else kind.startswith("s8[") for kind in kinds), across
