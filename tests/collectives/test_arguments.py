"""Arguments that cannot be what they are: refused at the call by name. What means the same is accepted."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import make_mesh, sharded
from jax.sharding import PartitionSpec as P

import jax_ring
from jax_ring import zero
from jax_ring.training.wire import reduced_by

pytestmark = pytest.mark.one_pair  # does not depend on JAX's version

MESH = make_mesh((4,))
X = np.arange(64, dtype=np.float32).reshape(16, 4)
PARAMS = {"w": jnp.ones((3, 5)), "b": jnp.ones(2)}


class Index:
    """An integer of somebody else's."""

    def __init__(self, value):
        self.value = value

    def __index__(self):
        return self.value


def run(fun):
    return np.asarray(sharded(fun, mesh=MESH, in_specs=P("i"), out_specs=P("i"), check_vma=False)(X))


def perm_of(rank):
    return [(0, rank), (1, 0)]


CALLS = {
    "ring_psum_scatter: scatter_dimension": lambda x, k: jax_ring.ring_psum_scatter(x, "i", scatter_dimension=k),
    "ring_all_gather: axis": lambda x, k: jax_ring.ring_all_gather(x, "i", axis=k),
    "ring_all_to_all: split_axis": lambda x, k: jax_ring.ring_all_to_all(x, "i", k, 0),
    "ring_all_to_all: concat_axis": lambda x, k: jax_ring.ring_all_to_all(x, "i", 0, k, tiled=True),
    "ring_ppermute: a rank in perm": lambda x, k: jax_ring.ring_ppermute(x, "i", perm_of(k)),
    "ring_reduce: root": lambda x, k: jax_ring.ring_reduce(x, "i", root=k),
    "ring_broadcast: root": lambda x, k: jax_ring.ring_broadcast(x, "i", root=k),
    "ring_pbroadcast: source": lambda x, k: jax_ring.ring_pbroadcast(x, "i", k),
    "broadcast_params: root": lambda x, k: jax_ring.broadcast_params(x, "i", root=k),
    "ring_psum: a rank in groups": lambda x, k: jax_ring.ring_psum(x, "i", axis_index_groups=[[0, k], [2, 3]]),
}


@pytest.mark.parametrize("name", CALLS)
def test_other_integers_are_accepted(name):
    expected = run(lambda x: CALLS[name](x, 1))
    for value in (np.int64(1), np.array(1), Index(1)):
        np.testing.assert_array_equal(run(lambda x, value=value: CALLS[name](x, value)), expected)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("value", ["1", 1.0, float("nan"), None, (1,)], ids=repr)
def test_what_is_no_integer_is_refused_by_name(name, value):
    with pytest.raises(TypeError, match=rf"^{name} must be an integer, got "):
        run(lambda x: CALLS[name](x, value))


@pytest.mark.parametrize("name", [name for name in CALLS if "source" not in name])
def test_what_is_traced_is_refused_as_by_jax(name):
    with pytest.raises(jax.errors.TracerIntegerConversionError):
        run(lambda x: CALLS[name](x, x[0, 0].astype(int)))


@pytest.mark.parametrize("impl", ["ring", "lax"])
def test_parameters_are_sent_from_a_rank_that_exists(impl):
    with pytest.raises(ValueError, match=r"broadcast_params: root must be a rank of .*, that is 0 to 3, got 4"):
        run(reduced_by(impl)(lambda x: jax_ring.broadcast_params(x, "i", root=4)))


def test_a_source_is_called_source():
    with pytest.raises(ValueError, match=r"ring_pbroadcast: source must be a rank of .*, that is 0 to 3, got -1"):
        run(lambda x: jax_ring.ring_pbroadcast(x, "i", -1))


@pytest.mark.parametrize("number", [np.int64(8), np.array(8), Index(8)])
def test_a_number_of_shards(number):
    def total(num_shards):
        return run(lambda x: jax_ring.ring_psum(jax_ring.ShardSums.of(x[:2], "i", num_shards), "i", order="tree")[None])

    np.testing.assert_array_equal(total(number), total(8))


@pytest.mark.parametrize("number", ["8", 8.0, None, [8]], ids=repr)
def test_a_number_of_shards_that_is_no_integer(number):
    with pytest.raises(TypeError, match=r"^ShardSums.of: num_shards must be an integer, got "):
        run(lambda x: jax_ring.ShardSums.of(x[:2], "i", number).terms)


@pytest.mark.parametrize("number", ["4", 4.0, [4]], ids=repr)
def test_a_number_of_shards_of_a_plain_sum(number):
    with pytest.raises(TypeError, match=r"^ring_psum: num_shards must be an integer, got "):
        run(lambda x: jax_ring.ring_psum(x, "i", order="tree", num_shards=number))


@pytest.mark.parametrize("kind", [iter, np.array, set, tuple])
def test_pairs_may_come_from_anything_that_lists_them(kind):
    pairs = [(i, (i + 1) % 4) for i in range(4)]
    expected = run(lambda x: jax_ring.ring_ppermute(x, "i", pairs))
    np.testing.assert_array_equal(run(lambda x: jax_ring.ring_ppermute(x, "i", kind(pairs))), expected)
    sources = [3, 0, 1, 2]
    np.testing.assert_array_equal(run(lambda x: jax_ring.ring_pshuffle(x, "i", iter(sources))), expected)


@pytest.mark.parametrize("perm", [3, None, [0, 1]], ids=repr)
def test_what_is_no_pairs(perm):
    with pytest.raises(TypeError, match=r"^ring_ppermute: perm must consist of pairs"):
        run(lambda x: jax_ring.ring_ppermute(x, "i", perm))


@pytest.mark.parametrize("layout", ["flat", "parameter"])
def test_a_number_of_ranks_to_shard_over(layout):
    optimizer = zero.sharded_optimizer(optax.adam(0.1), "i", layout=layout)
    init = jax.shard_map(optimizer.init, mesh=MESH, in_specs=P(), out_specs=optimizer.specs(PARAMS), check_vma=False)
    state = jax.jit(init)(PARAMS)
    functions = [lambda count: optimizer.repartition(state, PARAMS, count)]
    if optimizer.shares is not None:
        functions.append(lambda count: optimizer.shares(PARAMS, count))
    for function in functions:
        for count in (2.0, "2", None):
            with pytest.raises(TypeError, match=r"sharded_optimizer: num_ranks must be an integer, got "):
                function(count)
        for count in (0, -1):
            with pytest.raises(ValueError, match=f"sharded_optimizer: num_ranks must be positive, got {count}"):
                function(count)
        expected, got = function(2), function(Index(2))
        jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.mark.parametrize("residual", [None, 0.0, {"v": jnp.zeros((4, 4))}, {"w": jnp.zeros((5, 1, 1))}], ids=repr)
def test_a_residual_of_another_tree(residual):
    with pytest.raises(ValueError, match=r"^sync_with_feedback: residual must be a tree like that of the gradients"):
        run(lambda x: jax_ring.sync_with_feedback({"w": x}, residual, "i")[0]["w"])


NAN = float("nan")


class Opaque:
    """Neither a number nor an array. Its name is the same in every process of pytest-xdist."""

    def __repr__(self):
        return "Opaque()"


NO_ARRAY = Opaque()
NO_NUMBERS = ["x", None, NO_ARRAY, {}, float]
NOT_BOOLEAN = [*NO_NUMBERS, 1, 2.0, NAN, [True], np.ones(2, bool)]
ADAM = optax.adam(0.1)


def loss(w, x):
    return (w * x).sum()


def refused(kind, text, function):
    """What is called is refused by this text at its beginning."""
    with pytest.raises(kind) as error:
        function()
    assert str(error.value).startswith(text), str(error.value)


@pytest.mark.parametrize("when", NOT_BOOLEAN, ids=repr)
def test_whether_to_compare(when):
    text = f"must be a boolean scalar, such as step % 10 == 0; got {when!r}"
    refused(
        TypeError, f"check_replicas: when {text}", lambda: run(lambda x: jax_ring.check_replicas(x, "i", when=when))
    )
    if when is not None:  # of `value_and_grad`, None is the default
        for function in (jax_ring.value_and_grad, jax_ring.grad):
            made = f"{function.__name__}: check_replicas {text}"
            refused(TypeError, made, lambda function=function: function(loss, "i", check_replicas=when))


@pytest.mark.parametrize("when", [True, np.True_, np.array(True), jnp.array(True), None], ids=repr)
def test_whether_to_compare_is_any_boolean(when):
    def step(x):
        same = jnp.ones(3)
        return x + jax_ring.check_replicas(same, "i", when=x.size > 0 if when is None else when)[0]

    np.testing.assert_array_equal(run(step), X + 1)


def test_numbers_are_compared():
    assert (run(lambda x: x + jax_ring.check_replicas({"a": 3, "b": jnp.ones(4)}, "i")["a"]) == X + 3).all()


@pytest.mark.parametrize("layout", ["flat", "parameter"])
@pytest.mark.parametrize("order", [None, "x", [], np.array(["rank", "ring"])], ids=repr)
def test_an_order_of_a_sharded_optimizer(layout, order):
    text = f"sharded_optimizer: order must be one of 'rank', 'ring', 'any', 'tree'; got {order!r}"
    refused(ValueError, text, lambda: zero.sharded_optimizer(ADAM, "i", layout=layout, order=order))


def clipped(max_norm):
    def step(x):
        norm = x.max() if max_norm is None else max_norm
        return zero.clip_by_global_norm(norm, "i").update({"a": x}, optax.EmptyState())[0]["a"]

    return run(step)


@pytest.mark.parametrize("max_norm", [*NO_NUMBERS, True, np.True_, 1j, [1.0], np.ones(4), jnp.array(True)], ids=repr)
def test_what_is_no_norm(max_norm):
    text = f"clip_by_global_norm: max_norm must be a real number, got {max_norm!r}"
    refused(TypeError, text, lambda: zero.clip_by_global_norm(max_norm, "i"))


@pytest.mark.parametrize("max_norm", [-1, -0.5, NAN, np.float32(-1), np.array(NAN)], ids=repr)
def test_a_norm_that_nothing_has(max_norm):
    text = f"clip_by_global_norm: max_norm must be 0 or more, got {max_norm!r}"
    refused(ValueError, text, lambda: zero.clip_by_global_norm(max_norm, "i"))


@pytest.mark.parametrize("max_norm", [2.0, np.float32(2), np.float64(2), np.array(2.0), np.array([2]), jnp.array(2.0)])
def test_other_norms_are_accepted(max_norm):
    np.testing.assert_array_equal(clipped(max_norm), clipped(2))


def test_norms_that_are_zero_infinite_or_traced():
    assert not clipped(0).any()
    np.testing.assert_array_equal(clipped(float("inf")), X)
    assert np.isfinite(clipped(None)).all()


def test_a_norm_may_be_a_hyperparameter():
    clip = optax.inject_hyperparams(zero.clip_by_global_norm)(max_norm=lambda step: 2.0 + step, axis_name="i")
    np.testing.assert_array_equal(run(lambda x: clip.update(x, clip.init(x))[0]), clipped(2))


@pytest.mark.parametrize("leaf", [3, 1.5, "x", NO_ARRAY, np.array(["x"]), jax.random.key(0), float], ids=repr)
def test_a_leaf_that_has_no_bucket(leaf):
    text = "of tree must be an array of numbers or a jax.ShapeDtypeStruct, got "
    refused(TypeError, f"plan_buckets: the leaf at the root {text}", lambda: jax_ring.plan_buckets(leaf))
    tree = {"a": jnp.ones(2), "b": leaf}
    refused(TypeError, f"plan_buckets: the leaf at ['b'] {text}", lambda: jax_ring.plan_buckets(tree))


def test_a_plan_of_other_leaves():
    leaves = [np.float32(1), np.zeros(2, bool), np.zeros(2, jax.dtypes.float0), jnp.ones(2, jnp.int4)]
    assert len(jax_ring.plan_buckets([*leaves, jax.ShapeDtypeStruct((2,), jnp.bfloat16)]).buckets) == 4
    assert not jax_ring.plan_buckets({}).buckets


@pytest.mark.parametrize("name", ["bucket_bytes", "first_bucket_bytes"])
def test_a_size_of_buckets_is_no_boolean(name):
    text = f"plan_buckets: {name} must be a whole number of bytes, got True"
    refused(TypeError, text, lambda: jax_ring.plan_buckets(jnp.ones(3), **{name: True}))


GRADIENTS = {"value_and_grad": jax_ring.value_and_grad, "grad": jax_ring.grad}


@pytest.mark.parametrize("function", GRADIENTS)
def test_arguments_that_are_parameters(function):
    def made(argnums):
        return GRADIENTS[function](loss, "i", argnums=argnums)

    for argnums in ("x", None, 1.0, {}.keys):
        refused(TypeError, f"{function}: argnums must be an integer, got {argnums!r}", lambda n=argnums: made(n))
    refused(TypeError, f"{function}: a number in argnums must be an integer, got 'x'", lambda: made((0, "x")))
    text = f"{function}: argnums must name at least one argument, and each once; got "
    for argnums in ((), [0, 0]):
        refused(ValueError, text + repr(argnums), lambda n=argnums: made(n))
    expected = run(lambda x: x + jax.tree.leaves(made(0)(jnp.ones(4), x))[-1])
    for argnums in (np.int64(0), np.array(0), Index(0), -2, [0], np.array([0]), (np.int64(0),), range(1), {0}):
        got = run(lambda x, n=argnums: x + jax.tree.leaves(made(n)(jnp.ones(4), x))[-1])
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("fun", [3, None, "x"], ids=repr)
def test_what_is_no_function(fun):
    calls = {name: lambda make=make: make(fun, "i") for name, make in GRADIENTS.items()}
    calls["accumulate_gradients"] = lambda: jax_ring.accumulate_gradients(fun, 2)
    for name, call in calls.items():
        refused(TypeError, f"{name}: fun must be a function, got {fun!r}", call)


@pytest.mark.parametrize("weight", NO_NUMBERS, ids=repr)
def test_what_is_no_weight(weight):
    text = f"weighted_pmean: weight must be a real number, got {weight!r}"
    refused(TypeError, text, lambda: run(lambda x: jax_ring.weighted_pmean(x, weight, "i")))


TREES = {
    "check_replicas": ("tree", lambda tree: jax_ring.check_replicas(tree, "i")),
    "broadcast_params": ("params", lambda tree: jax_ring.broadcast_params(tree, "i")),
    "reduce_in_backward": ("tree", lambda tree: jax_ring.reduce_in_backward(tree, "i")),
    "weighted_pmean": ("x", lambda tree: jax_ring.weighted_pmean(tree, 1, "i")),
    "sync_gradients": ("the gradients", lambda tree: jax_ring.sync_gradients(tree, "i")),
    "allreduce_gradients": ("the gradients", lambda tree: jax_ring.allreduce_gradients("i").update(tree, ())[0]),
}


@pytest.mark.parametrize("function", TREES)
def test_leaves_that_are_no_arrays(function):
    name, call = TREES[function]
    for leaf in ("x", NO_ARRAY, np.array(["x"]), float):
        text = f"{function}: the leaf at ['b'] of {name} must be an array or a number, got {leaf!r}"
        refused(TypeError, text, lambda leaf=leaf: run(lambda x: call({"a": x, "b": leaf})["a"]))
        text = f"{function}: the leaf at the root of {name} must be an array or a number, got {leaf!r}"
        refused(TypeError, text, lambda leaf=leaf: run(lambda x: (call(leaf), x)[1]))
    for number in (3, 2.5, np.float32(1), np.ones(2)):
        run(lambda x, number=number: x + jax.tree.leaves(call({"b": number}))[0].max())


@pytest.mark.parametrize("layout", ["flat", "parameter"])
def test_parameters_that_are_no_arrays(layout):
    optimizer = zero.sharded_optimizer(ADAM, "i", layout=layout)
    text = "sharded_optimizer: the leaf at ['b'] of the {} must be an array or a number, got 'x'"
    params, wrong = {"b": jnp.ones(3)}, {"b": "x"}
    refused(TypeError, text.format("parameters"), lambda: optimizer.specs(wrong))
    refused(TypeError, text.format("parameters"), lambda: run(lambda x: (optimizer.init(wrong), x)[1]))
    update = lambda x: (optimizer.update(wrong, optimizer.init(params), params), x)[1]  # noqa: E731
    refused(TypeError, text.format("gradients"), lambda: run(update))


@pytest.mark.parametrize("layout", ["flat", "parameter"])
@pytest.mark.parametrize("state", [None, 3, {}], ids=repr)
def test_a_state_that_init_did_not_make(layout, state):
    optimizer = zero.sharded_optimizer(ADAM, "i", layout=layout)
    text = "sharded_optimizer: the tree of the state is not that of the state that init makes here: "
    refused(ValueError, text, lambda: optimizer.repartition(state, PARAMS, 2))
    counting = zero.sharded_optimizer(ADAM, "i", layout=layout, check_replicas=2)
    text = "sharded_optimizer: with check_replicas the state is a CheckedState, as init makes it; got PyTreeDef("
    refused(TypeError, text, lambda: counting.repartition(state, PARAMS, 2))
    refused(TypeError, text, lambda: run(lambda x: (counting.update(PARAMS, state, PARAMS), x)[1]))


@pytest.mark.parametrize("options", [{}, {"error_feedback": True, "wire": jnp.bfloat16}], ids=str)
def test_a_state_without_a_count(options):
    plain, counting = (jax_ring.allreduce_gradients("i", check_replicas=n, **options) for n in (None, 2))
    text = "allreduce_gradients: with check_replicas the state is a CheckedState, as init makes it; got "
    refused(TypeError, text, lambda: run(lambda x: counting.update(x, plain.init(x), x)[0]))


AXES = {
    "value_and_grad": lambda axis: jax_ring.value_and_grad(loss, axis),
    "grad": lambda axis: jax_ring.grad(loss, axis),
    "allreduce_gradients": jax_ring.allreduce_gradients,
    "feedback_specs": lambda axis: jax_ring.feedback_specs((), axis),
    "clip_by_global_norm": lambda axis: zero.clip_by_global_norm(1.0, axis),
    "sharded_optimizer": lambda axis: zero.sharded_optimizer(ADAM, axis),
}


@pytest.mark.parametrize("function", AXES)
def test_what_names_no_axis(function):
    for axis in (None, {"i"}, {}, ["i", None], ["i", ["j"]]):
        text = f"{function}: axis_name must be the name of a mapped axis, or a tuple or list of names; got {axis!r}"
        refused(TypeError, text, lambda axis=axis: AXES[function](axis))
    for axis in (0, ("i", 1)):
        refused(
            ValueError, f"{function} is over named axes, got the positional", lambda axis=axis: AXES[function](axis)
        )
    refused(ValueError, f"{function}: each axis may be named once, got ('i', 'i')", lambda: AXES[function](["i", "i"]))
    for axis in ("i", "not bound yet", ("i", "j"), ["i"], ()):
        AXES[function](axis)


@pytest.mark.full
def test_checks_do_not_start_the_backend():
    code = """
import jax, numpy as np, jax_ring
from jax_ring import zero
zero.clip_by_global_norm(1.0, "i"), zero.clip_by_global_norm(np.float32(1), "i")
jax_ring.allreduce_gradients("i", check_replicas=2)
jax_ring.value_and_grad(abs, "i", check_replicas=True), jax_ring.grad(abs, "i", check_replicas=np.True_)
jax.config.update("jax_num_cpu_devices", 3)
assert jax.device_count("cpu") == 3
"""
    subprocess.run(
        [sys.executable, "-P", "-c", code],  # -P: the installed package, not the source tree
        check=True, env={**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip


NO_NAMES = [P("i"), MESH, jax.sharding.NamedSharding(MESH, P("i"))]


@pytest.mark.parametrize("axis", NO_NAMES, ids=lambda axis: type(axis).__name__)
def test_what_has_an_axis_and_is_none(axis):
    for call in (
        lambda x: jax_ring.ring_psum(x, axis),
        lambda x: jax_ring.ring_ppermute(x, axis, perm_of(1)),
        jax_ring.value_and_grad(jnp.sum, axis),
    ):
        with pytest.raises(NameError, match=rf"must be the name of an axis, not a {type(axis).__name__}, .* here: 'i'"):
            run(call)


def test_arguments_in_the_wrong_order():
    with pytest.raises(TypeError, match=r"^ring_psum: axis_name must be the name of an axis, not a \w*Tracer"):
        run(lambda x: jax_ring.ring_psum("i", x))


def test_means_are_taken_in_any_case():
    with pytest.raises(
        TypeError, match=r"value_and_grad\(\) has no argument 'mean'.*sync_gradients\(..., mean=False\)"
    ):
        jax_ring.value_and_grad(jnp.sum, "i", mean=False)
