"""check_replicas: a flipped bit in one rank's copy fails the step on all ranks, and names the leaf and the rank."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same_bits, make_mesh, num_calls, run_processes, sharded
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tiers import full_but, vma_fixture

import jax_ring
from jax_ring.collectives.leaves import own_copy
from jax_ring.training import sentinel
from jax_ring.training.wire import reduced_by

check_vma = vma_fixture(without_vma=pytest.mark.one_pair)  # plain JAX on top of the collectives

RANKS = 4
MESH = make_mesh((RANKS,))


def copies(leaf, change=lambda rank, copy: copy, mesh=MESH):
    """A replicated array whose copy on each rank is `change(rank, copy)`."""
    leaf = np.asarray(leaf)
    arrays = [jax.device_put(change(rank, leaf.copy()), device) for rank, device in enumerate(mesh.devices.flat)]
    return jax.make_array_from_single_device_arrays(leaf.shape, NamedSharding(mesh, P()), arrays)


def flipped(leaf, ranks=(2,), element=-1, bit=0, mesh=MESH):
    """A replicated array with one bit flipped in the copies of some ranks."""

    def change(rank, copy):
        if rank in ranks:
            copy.view(f"u{copy.itemsize}").reshape(-1)[element] ^= np.array(1 << bit, f"u{copy.itemsize}")
        return copy

    return copies(leaf, change, mesh)


def params(**others):
    w = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)
    tree = {"b": jnp.zeros((), jnp.bfloat16), "layers": [{"n": jnp.arange(3), "w": w}]}
    return jax.tree.map(copies, tree) | others


def checked(check_vma, impl="ring"):
    def step(params, when):
        return jax_ring.check_replicas(params, "i", when=when)

    return sharded(reduced_by(impl)(step), mesh=MESH, in_specs=P(), out_specs=P(), check_vma=check_vma)


def error_of(function, *args):
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        jax.block_until_ready(function(*args))
    return str(error.value)


@pytest.mark.parametrize("impl", ["ring", "lax"])
def test_a_flipped_bit_is_found_and_nothing_else(check_vma, impl):
    step = checked(check_vma, impl=impl)
    assert_same_bits(step(params(), True), params())
    damaged = params()
    damaged["layers"][0]["w"] = flipped(damaged["layers"][0]["w"], bit=31)
    text = error_of(step, damaged, True)
    assert "['layers'][0]['w']: rank 2 differs from that on rank 0. The step is not applied." in text
    assert "check_replicas: the copies of parameters are not the same on all ranks: ['layers']" in text
    # Not in a step that does not compare, and a later step is as good as any.
    jax.block_until_ready(step(damaged, False))
    assert "rank 2 differs" in error_of(step, damaged, True)
    assert_same_bits(step(params(), True), params())


@pytest.mark.one_pair
def test_every_rank_and_leaf_that_differs_is_named():
    damaged = {name: flipped(np.arange(4.0, dtype=np.float32), ranks) for name, ranks in
               {"a": (0,), "b": (), "c": (1, 3), "d": (3,), "e": (3,), "f": (3,)}.items()}  # fmt: skip
    text = error_of(checked(False), damaged, True)
    assert "['a']: rank 0 differs from that on rank 1; ['c']: ranks 1, 3 differ from that on rank 0; ['d']: " in text
    assert "; and 1 more leaves." in text
    assert "['b']" not in text
    assert "['f']" not in text


@pytest.mark.one_pair
def test_sums_of_several_axes(check_vma):
    mesh = make_mesh((2, 2), ("a", "b"))

    def step(x):
        return jax_ring.check_replicas(x, ("a", "b"))

    step = sharded(step, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=check_vma)
    assert "the array: rank 3 differs from that on rank 0" in error_of(
        step, flipped(np.ones(7, np.float32), (3,), mesh=mesh)
    )


@pytest.mark.one_pair
@pytest.mark.parametrize(
    "dtype",
    [
        "float32",
        "float16",
        "bfloat16",
        "float8_e4m3fn",
        "int8",
        "uint8",
        "int16",
        "int32",
        "uint32",
        "complex64",
        "bool",
    ],
)
def test_digests_see_every_bit_of_every_type(dtype):
    rng = np.random.default_rng(1)
    values = rng.integers(0, 2, 6) if dtype == "bool" else rng.integers(-3, 4, 6)
    value = values.astype(jnp.dtype(dtype))
    if dtype == "complex64":
        value = value + np.complex64(1j) * value[::-1]
    digest = jax.jit(sentinel.digest)
    seen = {digest(value).tobytes()}
    bytes_of_all = value.view(np.uint8)
    bits = [0] if dtype == "bool" else range(8)
    for place in range(bytes_of_all.size):
        for bit in bits:
            other = bytes_of_all.copy()
            other[place] ^= 1 << bit
            seen.add(np.asarray(digest(other.view(value.dtype))).tobytes())
    assert len(seen) == 1 + bytes_of_all.size * len(bits)


@pytest.mark.one_pair
def test_digests_of_64_bits_and_of_keys():
    with jax.enable_x64(True):
        for value in (np.array([1.5, -2]), np.array([1, -2])):
            digests = {np.asarray(sentinel.digest(jnp.asarray(value))).tobytes()}
            for bit in (0, 31, 32, 63):
                other = value.copy()
                other.view(np.uint64)[1] ^= np.uint64(1 << bit)
                digests.add(np.asarray(sentinel.digest(jnp.asarray(other))).tobytes())
            assert len(digests) == 5
    step = checked(True)
    keys = jax.random.split(jax.random.key(0), 3)
    assert_same_bits(jax.random.key_data(step({"key": keys}, True)["key"]), jax.random.key_data(keys))


@pytest.mark.one_pair
def test_what_a_linear_digest_would_miss():
    value = np.arange(64, dtype=np.float32) + 1
    two_signs, swapped, moved = value.copy(), value.copy(), value.copy()
    two_signs[[3, 40]] *= -1
    swapped[[0, 32]] = value[[32, 0]]
    moved[0], moved[1] = moved[0] + 1, moved[1] - 1
    digests = [np.asarray(sentinel.digest(jnp.asarray(x))) for x in (value, two_signs, swapped, moved)]
    for lane in range(2):
        assert len({int(digest[lane]) for digest in digests}) == 4


@pytest.mark.one_pair
def test_the_only_call_is_one_small_sum(check_vma):
    # Two calls would be a collective in a branch, with the barrier that it needs at the end of every step.
    assert num_calls(checked(check_vma), params(), True) == 1


@pytest.mark.one_pair
def test_one_rank_has_nothing_to_compare():
    step = sharded(
        lambda x: jax_ring.check_replicas(x, "i"), mesh=make_mesh((1,)), in_specs=P(), out_specs=P(), check_vma=False
    )
    assert_same_bits(step(jnp.ones(3)), jnp.ones(3))


@pytest.mark.one_pair
def test_invalid_arguments():
    def refused(error, match, tree, **options):
        step = sharded(lambda x: jax_ring.check_replicas(x, "i", **options), mesh=MESH, in_specs=P(), out_specs=P())
        with pytest.raises(error, match=match):
            step(tree)

    refused(TypeError, "must be a boolean scalar, such as step % 10 == 0; got 10", jnp.ones(3), when=10)
    refused(TypeError, "must be a boolean scalar", jnp.ones(3), when=np.ones(2, bool))
    refused(ValueError, "there are no arrays to compare", {})
    with pytest.raises(NameError, match="'i'"):
        jax_ring.check_replicas(jnp.ones(3), "i")


def train_step(optimizer, specs, check_vma=False):
    """A step of an optimizer that takes the ranks' own gradients, from and to (params, state)."""

    def step(params, state):
        local = jax.tree.map(lambda p: own_copy(p, "i") * 2, params)
        updates, state = optimizer.update(local, state, params)
        return optax.apply_updates(params, updates), state

    return sharded(step, mesh=MESH, in_specs=(P(), specs), out_specs=(P(), specs), check_vma=check_vma)


def float_params(damaged=()):
    rng = np.random.default_rng(0)
    leaves = {name: rng.standard_normal(size).astype(np.float32) for name, size in (("b", 3), ("w", (4, 5)))}
    return {name: flipped(leaf, bit=20) if name in damaged else copies(leaf) for name, leaf in leaves.items()}


OPTIMIZERS = {
    "allreduce": lambda **check: optax.chain(jax_ring.allreduce_gradients("i", **check), optax.adam(0.1)),
    "tree": lambda **check: optax.chain(jax_ring.allreduce_gradients("i", order="tree", **check), optax.adam(0.1)),
    "wire": lambda **check: optax.chain(
        jax_ring.allreduce_gradients("i", wire=jnp.bfloat16, error_feedback=True, **check), optax.sgd(0.1)
    ),
    "several steps": lambda **check: optax.MultiSteps(
        optax.chain(jax_ring.allreduce_gradients("i", **check), optax.sgd(0.1)), 1
    ).gradient_transformation(),
    "zero": lambda **check: jax_ring.zero.sharded_optimizer(optax.adam(0.1), "i", **check),
}


def prepared(name, params, check_vma, **check):
    """A step of one of the optimizers, and its state."""
    optimizer = OPTIMIZERS[name](**check)
    if isinstance(optimizer, jax_ring.ShardedOptimizer):
        specs = optimizer.specs(params)
    else:
        specs = jax_ring.feedback_specs(jax.eval_shape(optimizer.init, params), "i")
    init = sharded(optimizer.init, mesh=MESH, in_specs=P(), out_specs=specs, check_vma=check_vma)
    return train_step(optimizer, specs, check_vma), init(params)


@pytest.mark.one_pair
@pytest.mark.parametrize(
    ("name", "check_vma"),
    full_but([(name, i % 2 == 0) for i, name in enumerate(OPTIMIZERS)], [("tree", False), ("zero", True)]),
)
def test_optimizers_compare_every_n_steps(name, check_vma):
    params = plain_params = float_params()
    step, state = prepared(name, params, check_vma, check_replicas=3)
    plain_step, plain_state = prepared(name, params, check_vma)
    for i in range(4):
        # Found in the steps 0 and 3, and not in the others.
        if i in (0, 3):
            assert "['w']: rank 2 differs from that on rank 0" in error_of(step, float_params(damaged="w"), state)
        else:
            jax.block_until_ready(step(float_params(damaged="w"), state))
        params, state = step(params, state)
        plain_params, plain_state = plain_step(plain_params, plain_state)
    assert_same_bits(params, plain_params)


@pytest.mark.one_pair
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16])
def test_digests_are_in_a_bucket_of_the_gradients(dtype):
    def calls(**check):
        optimizer = OPTIMIZERS["allreduce"](**check)
        params = jax.tree.map(lambda x: x.astype(dtype), float_params())
        return num_calls(train_step(optimizer, P()), params, optimizer.init(params))

    assert calls(check_replicas=3) == calls() == 1


def prepared_gradients(params, **check):
    """A step of plain gradient descent, from and to (params, number), and the number of the first."""

    def step(params, number):
        due = {"check_replicas": number % 3 == 0} if check else {}
        grads = jax_ring.grad(lambda p: ((p["w"] * number).sum() + p["b"].sum()) ** 2, "i", **due)(params)
        return jax.tree.map(lambda p, g: p - g, params, grads), number + 1

    return sharded(step, mesh=MESH, in_specs=P(), out_specs=P(), check_vma=False), np.int32(0)


@pytest.mark.parametrize("name", full_but(["gradients", *OPTIMIZERS], ["gradients", "zero"]))
def test_a_step_that_donates_its_parameters_keeps_no_copy_of_them(name):
    params = {"w": jnp.ones((64, 4)), "b": jnp.ones(3)}

    def num_copies(**check):
        if name == "gradients":
            step, state = prepared_gradients(params, **check)
        else:
            step, state = prepared(name, params, check_vma=False, **check)
        text = jax.jit(step, donate_argnums=(0, 1)).lower(params, state).compile().as_text()
        return len(re.findall(r"= f32\[64,4\]\S* copy\(", text))

    assert num_copies(check_replicas=3) <= num_copies()


@pytest.mark.one_pair
def test_a_zero_state_with_a_count_is_repartitioned():
    plain, checked = (jax_ring.zero.sharded_optimizer(optax.adam(0.1), "i", **options)
                      for options in ({}, {"check_replicas": 2}))  # fmt: skip
    params = float_params()
    states = [
        sharded(optimizer.init, mesh=MESH, in_specs=P(), out_specs=optimizer.specs(params))(params)
        for optimizer in (plain, checked)
    ]
    plain_state, checked_state = (
        optimizer.repartition(state, params, 2) for optimizer, state in zip((plain, checked), states, strict=True)
    )
    assert checked_state.step == 0
    assert_same_bits(checked_state.inner, plain_state)


@pytest.mark.one_pair
def test_invalid_options():
    for make in (OPTIMIZERS["allreduce"], OPTIMIZERS["zero"]):
        with pytest.raises(TypeError, match="check_replicas must be a number of steps, got True"):
            make(check_replicas=True)
        with pytest.raises(ValueError, match="check_replicas must be a positive number of steps, got 0"):
            make(check_replicas=0)
    optimizer = jax_ring.allreduce_gradients("i", check_replicas=2)
    state = optimizer.init(float_params())
    with pytest.raises(ValueError, match=r"pass them to the optimizer: optimizer.update\(gradients, state, params\)"):
        optimizer.update(float_params(), state)


def loss(params, x):
    return ((x @ params["w"].sum(-1) + params["b"].sum()) ** 2).mean()


@pytest.mark.one_pair
@pytest.mark.parametrize(
    ("options", "check_vma"),
    [
        ({}, True),
        ({"wire": jnp.bfloat16}, False),
        ({"num_shards": 8}, True),
        ({"num_shards": RANKS, "reduce_gradients": False}, False),
    ],
    ids=str,
)
def test_value_and_grad_compares_when_it_is_told_to(options, check_vma):
    x = np.random.default_rng(1).standard_normal((2 * RANKS, 4)).astype(np.float32)

    def step(params, x, when):
        with_check = jax_ring.value_and_grad(loss, "i", check_replicas=when, **options)(params, x)
        without = jax_ring.value_and_grad(loss, "i", **options)(params, x)
        # Of gradients that are not reduced, each rank has its own.
        return jax.tree.map(lambda g: own_copy(g, "i")[None], (with_check, without))

    step = sharded(step, mesh=MESH, in_specs=(P(), P("i"), P()), out_specs=P("i"), check_vma=check_vma)
    for when in (True, False):
        with_check, without = step(float_params(), x, when)
        assert_same_bits(with_check, without)
    assert "value_and_grad: the copies" in error_of(step, float_params(damaged="w"), x, True)
    jax.block_until_ready(step(float_params(damaged="w"), x, False))


@pytest.mark.one_pair
@pytest.mark.parametrize("options", [{}, {"num_shards": 8}], ids=str)
def test_parameters_that_another_axis_divides(options):
    """What is the same over that axis stays so, in the types of vma tracking."""

    def of_columns(params, x):
        return (lax.psum((x @ params["w"]).sum(-1), "j") * params["scale"]).mean()

    def step(params, x, damage):
        here = (lax.axis_index("i") == 2) & (lax.axis_index("j") == 1) & damage
        value, grads = jax_ring.value_and_grad(of_columns, "i", check_replicas=True, **options)(params, x)
        kept = jax_ring.check_replicas(params, "i")
        return value, grads, kept, jax_ring.check_replicas({"w": params["w"] + here.astype(int)}, "i")

    specs = {"w": P(None, "j"), "scale": P()}
    params = {"w": np.arange(8, dtype=np.float32).reshape(4, 2), "scale": np.float32(2)}
    x = np.ones((2 * RANKS, 4), np.float32)
    step = sharded(
        step, mesh=make_mesh((RANKS, 2), ("i", "j")), in_specs=(specs, P("i"), P()),
        out_specs=(P(), specs, specs, {"w": P("i", "j")}),
    )  # fmt: skip
    value, grads, kept, _ = step(params, x, False)
    expected = jax.value_and_grad(lambda p: ((x @ p["w"]).sum(-1) * p["scale"]).mean())(params)
    assert_same_bits((value, grads), expected)
    assert_same_bits(kept, params)
    assert "check_replicas: the copies of parameters are not the same on all ranks: ['w']: rank 2" in error_of(
        step, params, x, True
    )


@pytest.mark.one_pair
def test_grad_compares_all_its_parameters():
    def of_two(w, b, x):
        return loss({"w": w, "b": b}, x)

    def step(w, b, x):
        return jax_ring.grad(of_two, "i", argnums=(0, 1), check_replicas=True, num_shards=RANKS)(w, b, x)

    step = sharded(step, mesh=MESH, in_specs=(P(), P(), P("i")), out_specs=P(), check_vma=False)
    tree, damaged = float_params(), float_params(damaged="b")
    x = np.ones((RANKS, 4), np.float32)
    jax.block_until_ready(step(tree["w"], tree["b"], x))
    assert "grad: the copies of parameters are not the same on all ranks: [1]: rank 2 differs" in error_of(
        step, tree["w"], damaged["b"], x
    )


PROCESS = """
import functools, os
os.environ["JAX_RING_TIMEOUT_S"] = "3600"  # a rank that waits for one that has failed hangs
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import jax_ring
jax.distributed.initialize("{address}", {processes}, {process})
mesh = Mesh(jax.devices(), ("i",))

def array(of_ranks):
    copies = [jax.device_put(of_ranks[jax.devices().index(d)], d) for d in jax.local_devices()]
    return jax.make_array_from_single_device_arrays(of_ranks[0].shape, NamedSharding(mesh, P()), copies)

@functools.partial(jax.jit, donate_argnums=0)
@functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P()), out_specs=(P(), P()))
def step(params, number):
    params = jax_ring.check_replicas(params, "i", when=number % 4 == 0)
    sums = jax_ring.ring_psum(jax.tree.map(lambda x: x * 2, params), "i")
    return jax.tree.map(lambda x, y: x + y / 1024, params, sums), number + 1

good = np.ones(1000, np.float32)
bad = good.copy()
bad.view(np.uint32)[777] ^= 1
for ranks in ((), (6,), (), (1, 6)):
    state = dict(w=array([bad if r in ranks else good for r in range(8)])), array([np.int32(1)] * 8)
    try:
        for _ in range(6):  # no rank waits in a later step for one that has failed
            state = step(*state)
        jax.block_until_ready(state)
        print("no error")
    except jax.errors.JaxRuntimeError as error:
        text = str(error)[str(error).index("check_replicas: "):].partition(" The step")[0]
        print(text)
jax.distributed.shutdown()
"""


@pytest.mark.full
def test_all_ranks_of_all_processes_fail_together():
    for text in run_processes(PROCESS, [{}, {}], devices=4):
        same = "check_replicas: the copies of parameters are not the same on all ranks: ['w']: "
        # Gloo writes parts of lines at any time.
        assert re.findall(r"no error|check_replicas: .*", text) == [
            "no error",
            same + "rank 6 differs from that on rank 0.",
            "no error",
            same + "ranks 1, 6 differ from that on rank 0.",
        ]
