"""Ordinary `jit` programs across hosts: the bits of jax_ring's own collectives in the same groups."""

import itertools
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

pytestmark = pytest.mark.full  # jobs of several processes

RNG = np.random.default_rng(0)  # the same numbers in all processes
HOSTS = [{"JAX_RING_HOST_ID": host} for host in "ab"]
STEPS = re.compile(r'call = "([\w-]+) of [^"]* \(([\w-]+) within a host\)"')
EVERYWHERE = ("host", "i", "j")


def mesh_of_hosts() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(2, 2, 2), EVERYWHERE)


def put(values, mesh, *spec):
    sharding = NamedSharding(mesh, P(*spec))
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


def floats(*shape):
    return RNG.normal(size=shape).astype(np.float32) * 9


def replaced(fun, *operands, **options):
    """The results, the text of the program, and which of its collectives have which steps within a host."""
    program = jax.jit(fun, **options).lower(*operands).compile()
    return program(*operands), program.as_text(), set(STEPS.findall(program.as_text()))


def assert_shards(actual, expected) -> None:
    for one, other in zip(actual.addressable_shards, expected.addressable_shards, strict=True):
        assert_same_bits(np.asarray(one.data), np.asarray(other.data))


def reductions(order):
    """(a function of `jit`, the collective, the dtype, the shape of a rank's operand)."""
    from functools import partial

    from jax_ring import ring_pmax, ring_pmin, ring_psum

    sums = lambda x: x.sum(0, dtype=x.dtype), partial(ring_psum, order=order)
    if order == "tree":
        return [(*sums, dtype, (5, 7)) for dtype in (np.float32, jnp.bfloat16)]
    return [
        *((*sums, dtype, (5, 7)) for dtype in (np.float32, jnp.bfloat16, np.float16, np.int32, np.int8, np.complex64)),
        *((lambda x: x.max(0), ring_pmax, dtype, (7,)) for dtype in (np.float32, jnp.bfloat16, np.int8, np.bool_)),
        *((lambda x: x.min(0), ring_pmin, dtype, (2, 3)) for dtype in (np.float32, np.uint32)),
        *((*sums, dtype, (1 << 14, 3)) for dtype in (np.float32, jnp.bfloat16)),  # cross in parts
    ]


def bits_of_ring_psum():
    """Each in the same program as the others of its order and axes."""
    from jax_ring import override_lax

    mesh = mesh_of_hosts()
    for order, (axes, others) in itertools.product(("tree", "rank"), ((EVERYWHERE, ()), (("host", "i"), ("j",)))):
        cases, divided, operands = reductions(order), others or (None,), []
        for _, _, dtype, shape in cases:
            values = floats(8, *shape)
            values = values > 0 if dtype == np.bool_ else values.astype(dtype)
            values.flat[5] = np.nan if jnp.issubdtype(dtype, jnp.floating) else values.flat[5]
            operands.append(put(values.reshape(-1, 2, *shape) if others else values[:, None], mesh, axes, *divided))

        def reduced(operands, cases=cases):
            return [reduce(x) for (reduce, *_), x in zip(cases, operands, strict=True)]

        def by_hand(operands, cases=cases, axes=axes):
            return [ring(x[0], axes) for (_, ring, *_), x in zip(cases, operands, strict=True)]

        with override_lax(order=order):
            actual, _, steps = replaced(reduced, operands, out_shardings=NamedSharding(mesh, P(*divided)))
        expected = jax.jit(
            jax.shard_map(by_hand, mesh=mesh, in_specs=P(axes, *divided), out_specs=P(*divided), check_vma=False)
        )(operands)
        assert steps == {("all-reduce", "reduce-scatter"), ("all-reduce", "all-gather")}
        for case, one, other in zip(cases, actual, expected, strict=True):
            print(order, axes, *case)  # the last is the one that fails
            assert_shards(one, other)


def all_forms_as_by_the_lowering():
    """Groups that lie on hosts one after the other, by turns, and in no order, in which what is moved stays XLA's."""
    from hook import FORMS, by_hook_alone

    from jax_ring import override_lax

    devices = np.array(jax.devices())
    everything = {"reduce-scatter", "all-gather", "all-to-all", "permute"}
    for order, kinds, dtypes in (
        ([0, 1, 4, 5, 2, 3, 6, 7], everything, (np.int32,)),  # both axes together have no order
        ([0, 4, 1, 5, 2, 6, 3, 7], everything, (np.float32, jnp.bfloat16)),
        ([4, 0, 1, 5, 6, 3, 2, 7], everything - {"all-to-all"}, (np.int32,)),
    ):
        mesh = Mesh(devices[order].reshape(2, 4), ("a", "b"))
        for dtype in dtypes:
            x = put(floats(8, 16, 8).astype(dtype), mesh, "a", "b")

            def results(x, mesh=mesh):
                def f(x):
                    return jax.tree.map(lambda y: y[None], {name: form(x) for name, form in FORMS.items()})

                out_specs = P(mesh.axis_names)
                return jax.shard_map(f, mesh=mesh, in_specs=P("a", "b"), out_specs=out_specs, check_vma=False)(x)

            with override_lax(partitioner=False):
                expected = jax.jit(results)(x)
            with by_hook_alone():
                actual, text, steps = replaced(results, x)
            assert {step for _, step in steps} == kinds
            assert "jax_ring.between_hosts" in text
            jax.tree.map(assert_shards, actual, expected)


def training_steps(mesh):
    """(a function of parameters and a batch, its operands), tensor parallel and divided by examples, in a loop."""

    def loss(params, x):
        hidden = jnp.tanh(x @ params["up"])
        return jnp.mean((hidden @ params["down"] - x) ** 2), hidden.max()

    def steps(params, x):
        def step(params, _):
            (value, largest), grads = jax.value_and_grad(loss, has_aux=True)(params, x)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), (value, largest)

        return lax.scan(step, params, length=4)

    params = {"up": put(floats(16, 32) / 50, mesh, None, "j"), "down": put(floats(32, 16) / 50, mesh, "j", None)}
    return steps, (params, put(floats(24, 16) / 9, mesh, ("host", "i"), None))


@pytest.mark.jax_processes(2, devices=4, environment=[{**host, "JAX_RING_STRICT": "1"} for host in HOSTS])
def test_training_steps():
    from jax_ring import explain, override_lax

    mesh = mesh_of_hosts()
    fun, operands = training_steps(mesh)
    expected = jax.jit(fun)(*operands)
    with override_lax():
        actual, text, steps = replaced(fun, *operands)
        instructions = explain(jax.jit(fun), *operands).instructions
        again = [jax.jit(fun)(*operands) for _ in range(10)]
    assert {("all-reduce", "reduce-scatter"), ("all-reduce", "all-gather")} <= steps
    assert re.search(r'site = "[^"]*test_partitioner_hosts.py:\d+ \(training_steps.<locals>.loss\)', text)
    assert {"jax_ring_reduce_scatter", "jax_ring_all_reduce"} <= {each.name for each in instructions}
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        for shard, of_other in zip(one.addressable_shards, other.addressable_shards, strict=True):
            np.testing.assert_allclose(shard.data, of_other.data, rtol=2e-5, atol=1e-6)
    for each in again:
        jax.tree.map(assert_shards, each, actual)


def one_rank_on_each_host_stays_xlas(caplog):
    from jax_ring import override_lax

    caplog.set_level(logging.INFO, "jax_ring")
    mesh = mesh_of_hosts()
    values = floats(2, 4, 6)
    x = put(values, mesh, "host", ("i", "j"))
    with override_lax():
        actual, text, steps = replaced(lambda x: x.max(0), x, out_shardings=NamedSharding(mesh, P(("i", "j"))))
    assert " all-reduce(" in text
    assert not steps
    assert "is left to XLA: the ranks of a group are on 2 hosts, one rank on each" in caplog.text
    for shard in actual.addressable_shards:
        np.testing.assert_array_equal(shard.data, values.max(0)[shard.index])


@pytest.mark.jax_processes(2, devices=4, environment=HOSTS)
def test_two_hosts(caplog):
    from jax_ring.lowering.hierarchical import all_reduce

    all_reduce.PART_BYTES = 1 << 14
    bits_of_ring_psum()
    all_forms_as_by_the_lowering()
    one_rank_on_each_host_stays_xlas(caplog)
