"""Gradients of a sharded optimizer whose tree, shapes or dtypes are not those of the parameters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import SHARDED, assert_same_bits, assert_same_trees, make_mesh, sharded, without_paths
from jax.sharding import PartitionSpec as P

from jax_ring import zero

pytestmark = pytest.mark.one_pair  # plain JAX on code that other tests of ZeRO cover

RANKS = 2
RNG = np.random.default_rng(0)
PARAMS = {"a": RNG.standard_normal((2, 3)).astype(np.float32), "b": [RNG.standard_normal(5).astype(np.float32)]}
OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "adamw": optax.adamw(0.1, weight_decay=0.1),
}


def equal_gradients(params, seed=1):
    """Gradients of all ranks, which are equal, so that the mean has no rounding of its own: a leading axis of ranks."""
    rng = np.random.default_rng(seed)

    def draw(p):
        return np.broadcast_to(rng.standard_normal(p.shape).astype(p.dtype), (RANKS, *p.shape))

    return jax.tree.map(draw, params)


def update(tx, params, gradients, *, steps=1, state_of=None, check_vma=True, **options):
    """The updates after some steps. `gradients` have a leading axis of ranks."""
    optimizer = zero.sharded_optimizer(tx, "i", **options)

    def run(params, gradients):
        gradients = jax.tree.map(lambda g: g[0], gradients)
        state = optimizer.init(params if state_of is None else state_of)
        for _ in range(steps):
            updates, state = optimizer.update(gradients, state, params)
        return updates

    return sharded(run, mesh=make_mesh((RANKS,)), in_specs=(P(), SHARDED), out_specs=P(), check_vma=check_vma)(
        params, gradients
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda g: {"a": g["a"], "c": g["b"]},
            r"there is none at \['b'\]\[0\]; the parameters have nothing at \['c'\]",
        ),
        (lambda g: {"a": g["a"].swapaxes(1, 2), "b": g["b"]}, r"\['a'\] has shape \(3, 2\).* is \(2, 3\)"),
        (lambda g: {"a": g["a"], "b": tuple(g["b"])}, r"PyTreeDef.* instead of PyTreeDef"),
        (lambda g: {"a": g["a"]}, r"there is none at \['b'\]\[0\]"),
    ],
    ids=["keys", "transposed", "containers", "missing"],
)
def test_gradients_of_another_tree_are_refused(change, message):
    with pytest.raises(ValueError, match=f"sharded_optimizer: .*gradients.*{message}"):
        update(optax.sgd(1.0), PARAMS, change(equal_gradients(PARAMS)))


def test_a_state_of_another_number_of_ranks_is_refused():
    other = {**PARAMS, "b": [np.zeros(50, np.float32)]}
    with pytest.raises(ValueError, match=r"the state.* has shape \(28,\).* is \(6,\).*repartition"):
        update(optax.adam(0.1), PARAMS, equal_gradients(PARAMS), state_of=other)


def test_repartition_refuses_a_state_that_is_too_small():
    optimizer = zero.sharded_optimizer(optax.adam(0.1), "i")
    state = optax.adam(0.1).init({"float32": jnp.zeros(8)})
    with pytest.raises(ValueError, match=r"repartition: .*float32.* has shape \(8,\).* need 11 elements"):
        optimizer.repartition(state, PARAMS, 4)


@pytest.mark.parametrize(("master", "wire"), [("float32", "bfloat16"), ("bfloat16", "float32")])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_gradients_of_another_dtype_are_as_in_optax(name, master, wire):
    tx = OPTIMIZERS[name]
    params = jax.tree.map(lambda p: p.astype(master), PARAMS)
    gradients = equal_gradients(jax.tree.map(lambda p: p.astype(wire), PARAMS))
    own, state = jax.tree.map(lambda g: g[0], gradients), tx.init(params)
    for _ in range(2):
        expected, state = jax.jit(tx.update)(own, state, params)
    # The dtype of the updates is that of optax, too. Compilers may fuse differently.
    eps = max(float(jnp.finfo(leaf.dtype).eps) for leaf in jax.tree.leaves(expected))
    assert_same_trees(update(tx, params, gradients, steps=2), expected, rtol=4 * eps)


def test_gradients_travel_in_their_own_dtype():
    optimizer = zero.sharded_optimizer(optax.adam(0.1), "i")

    def run(params, gradients):
        return optimizer.update(gradients, optimizer.init(params), params)[0]

    def sent(dtype):
        f = sharded(run, mesh=make_mesh((RANKS,)), in_specs=P(), out_specs=P(), check_vma=False)
        text = f.lower(PARAMS, jax.tree.map(lambda p: p.astype(dtype), PARAMS)).as_text()
        return [line for line in without_paths(text).splitlines() if "jax_ring_reduce_scatter" in line]

    assert [line.count("bf16") > 0 for line in sent(jnp.bfloat16)] == [True]
    assert [line.count("bf16") > 0 for line in sent(jnp.float32)] == [False]


def test_gradients_of_several_dtypes_are_promoted(check_vma):
    gradients = equal_gradients(PARAMS)
    mixed = {"a": gradients["a"].astype(jnp.bfloat16), "b": gradients["b"]}
    promoted = {"a": mixed["a"].astype(np.float32), "b": gradients["b"]}
    tx = optax.adam(0.1)
    expected = update(tx, PARAMS, promoted)
    for stage in (1, 2):
        assert_same_bits(update(tx, PARAMS, mixed, stage=stage, check_vma=check_vma), expected)


def test_integer_parameters_without_gradient_keep_their_value(check_vma):
    tx = optax.adamw(0.1, weight_decay=0.5)
    params = {**PARAMS, "n": np.arange(3, dtype=np.int32)}
    optimizer = zero.sharded_optimizer(tx, "i", stage=1 if check_vma else 2)

    def run(params, x):
        def loss(params):
            return sum((leaf * x.sum()).sum() for leaf in jax.tree.leaves(params))

        own = jax.tree.map(lambda p: jax.lax.pcast(p, "i", to="varying"), params) if check_vma else params
        gradients = jax.grad(loss, allow_int=True)(own)
        assert gradients["n"].dtype == jax.dtypes.float0
        updates, _ = optimizer.update(gradients, optimizer.init(params), params)
        return optax.apply_updates(params, updates)

    mesh = make_mesh((RANKS,))
    f = sharded(run, mesh=mesh, in_specs=(P(), SHARDED), out_specs=P(), check_vma=check_vma)
    new = f(params, np.ones(RANKS))
    text = without_paths(f.lower(params, np.ones(RANKS)).as_text())
    assert text.count("jax_ring_all_gather") == 1  # of the floats
    assert_same_bits(new.pop("n"), params["n"])
    gradients = jax.tree.map(np.ones_like, PARAMS)
    expected = optax.apply_updates(PARAMS, tx.update(gradients, tx.init(PARAMS), PARAMS)[0])
    assert_same_trees(new, jax.tree.map(np.asarray, expected), rtol=1e-6)


def test_parameters_that_another_axis_divides():
    """They have an optimizer of their own, with specs as the error says."""
    mesh = make_mesh((RANKS, 2), ("i", "m"))
    params = {"columns": np.arange(8, dtype=np.float32).reshape(4, 2), "scale": np.float32(2)}
    specs = {"columns": P(None, "m"), "scale": P()}
    tx = optax.sgd(0.5, momentum=0.5)
    optimizer = zero.sharded_optimizer(tx, "i")
    of_whole = zero.sharded_optimizer(tx, "i", layout="parameter")

    def gradients(params):
        return jax.tree.map(lambda x: jax.lax.pcast(x + 1, "i", to="varying"), params)

    def all_in_one(optimizer, params):
        return optimizer.update(gradients(params), optimizer.init(params), params)[0]

    for each, message in (
        (optimizer, r"at \['columns'\] varies over \['m'\], and that at \['scale'\] over \[\], beside 'i'.*specs"),
        (of_whole, r"at \['columns'\] varies over \['m'\], beside 'i', which layout='parameter'.*layout='flat'"),
    ):
        step = functools.partial(all_in_one, each)
        with pytest.raises(ValueError, match=message):
            sharded(step, mesh=mesh, in_specs=(specs,), out_specs=specs)(params)

    def state_specs(name):
        of_state = optimizer.specs({name: params[name]})
        return jax.tree.map(lambda spec: P(("m", *spec)) if spec else spec, of_state) if name == "columns" else of_state

    for name, spec in specs.items():
        own, of_own, of_state = {name: params[name]}, {name: spec}, state_specs(name)
        init = sharded(optimizer.init, mesh=mesh, in_specs=(of_own,), out_specs=of_state)
        step = sharded(
            lambda own, state: optimizer.update(gradients(own), state, own), mesh=mesh,
            in_specs=(of_own, of_state), out_specs=(of_own, of_state),
        )  # fmt: skip
        state, expected = init(own), tx.init(own)
        for _ in range(2):
            updates, state = step(own, state)
            wanted, expected = tx.update(jax.tree.map(lambda x: x + 1, own), expected, own)
            assert_same_bits(updates, wanted)
