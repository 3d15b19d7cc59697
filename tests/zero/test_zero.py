"""The sharded optimizer: the same updates with 1/p of the state, restored on other numbers of devices."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from helpers import SHARDED, assert_same_bits, compiled_text, make_mesh, sharded
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tiers import full_but, vma_fixture

from jax_ring import value_and_grad, zero
from jax_ring.training.wire import reduced_by

check_vma = vma_fixture(without_vma=pytest.mark.one_pair)  # plain JAX on top of the collectives

RANKS = 4
REPLICATED = P()
RNG = np.random.default_rng(0)
X = RNG.standard_normal((48, 7)).astype(np.float32)
PARAMS = {
    "w": RNG.standard_normal((7, 5)).astype(np.float32),
    "half": RNG.standard_normal((5, 3)).astype(jnp.bfloat16),
    "b": np.zeros(3, np.float32),
    "scale": np.float32(1),
}
OPTIMIZERS = {
    "adamw": optax.adamw(optax.linear_schedule(0.1, 0.01, 3), weight_decay=0.1),
    "momentum": optax.sgd(0.05, momentum=0.9, nesterov=True),
}


def loss(params, x):
    return ((jnp.tanh(x @ params["w"]) @ params["half"].astype(x.dtype) + params["b"]) ** 2).mean() * params["scale"]


@functools.cache
def replicated_steps(tx, steps, check_vma):
    def step(params, state, x):
        _, grads = value_and_grad(loss, "i")(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    specs = (REPLICATED, REPLICATED, SHARDED)
    f = sharded(step, mesh=make_mesh((RANKS,)), in_specs=specs, out_specs=specs[:2], check_vma=check_vma)
    params, state = jax.device_put((PARAMS, tx.init(PARAMS)), NamedSharding(make_mesh((RANKS,)), REPLICATED))
    for _ in range(steps):
        params, state = f(params, state, X)
    return params


class Sharded:
    """Training with a sharded optimizer, which can continue on another number of ranks."""

    def __init__(self, tx, check_vma=True, ranks=RANKS, loss=loss, **options):
        self.mesh = make_mesh((ranks,))
        self.optimizer = zero.sharded_optimizer(tx, "i", **options)
        self.specs = self.optimizer.specs(PARAMS)

        def step(params, state, x):
            own = jax.tree.map(lambda p: lax.pcast(p, "i", to="varying"), params) if check_vma else params
            updates, state = self.optimizer.update(jax.grad(loss)(own, x), state, params)
            return optax.apply_updates(params, updates), state

        common = {"mesh": self.mesh, "check_vma": check_vma}
        specs = (REPLICATED, self.specs, SHARDED)
        self.step = sharded(step, in_specs=specs, out_specs=specs[:2], **common)
        self.params = jax.device_put(PARAMS, NamedSharding(self.mesh, REPLICATED))
        self.state = sharded(self.optimizer.init, in_specs=REPLICATED, out_specs=self.specs, **common)(PARAMS)

    def run(self, steps):
        for _ in range(steps):
            self.params, self.state = self.step(self.params, self.state, X)
        return self.params


def assert_close(actual, expected, steps=3):
    """Asserts equality up to the rounding of each step, in which compilers may fuse operations differently.

    The tolerance is relative to all parameters of a dtype, because a difference in one reaches all gradients.
    """
    for dtype in (jnp.float32, jnp.bfloat16):
        begin, a, e = (
            np.concatenate([np.ravel(p).astype(np.float64) for p in jax.tree.leaves(tree) if p.dtype == dtype])
            for tree in (PARAMS, actual, expected)
        )
        unit = float(jnp.finfo(dtype).eps)
        assert np.linalg.norm(a - e) <= steps * unit * (np.linalg.norm(begin) + np.linalg.norm(e))


@pytest.mark.one_pair
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("stage", [1, 2])
def test_updates_match_the_unsharded_optimizer(name, stage, check_vma):
    tx = OPTIMIZERS[name]
    expected = replicated_steps(tx, 3, check_vma)
    assert_close(Sharded(tx, check_vma, stage=stage).run(3), expected)


@pytest.mark.one_pair
def test_stages_and_impls_agree():
    runs = []
    for stage, impl in itertools.product((1, 2), ("ring", "lax")):
        with reduced_by(impl):
            runs.append(Sharded(optax.sgd(1.0), stage=stage).run(1))
    for name in ("w", "b", "scale"):
        for run in runs[1:]:
            assert_same_bits(run[name], runs[0][name])


def test_state_is_p_times_smaller():
    training = Sharded(optax.adam(0.1))
    state = jax.tree.leaves(training.state)
    measured = sum(leaf.addressable_shards[0].data.nbytes for leaf in state)
    # Two moments of 39 float32 and 15 bfloat16 parameters in four padded shards, and a step count.
    assert measured == 2 * (10 * 4 + 4 * 2) + 4
    assert {leaf.sharding.device_set == set(training.mesh.devices) for leaf in state} == {True}


def test_stage_2_scatters():
    for stage, scatters in ((1, 0), (2, 2)):
        training = Sharded(optax.adam(0.1), stage=stage)
        text = compiled_text(training.step, PARAMS, training.state, X)
        assert text.count('"jax_ring_reduce_scatter"') == scatters
        assert text.count('"jax_ring_all_reduce"') == 2 - scatters
        assert text.count('"jax_ring_all_gather"') == 2


def test_norm_of_the_whole_gradient_is_clipped(check_vma):
    limit = 0.01
    expected = replicated_steps(optax.chain(optax.clip_by_global_norm(limit), optax.sgd(1.0)), 2, check_vma)
    clipped = optax.chain(zero.clip_by_global_norm(limit, "i"), optax.sgd(1.0))
    assert_close(Sharded(clipped, check_vma).run(2), expected, steps=2)


@pytest.mark.parametrize("ranks", full_but([3, 8], [3]))
def test_restored_on_another_number_of_devices(ranks, tmp_path):
    def loss(params, x):
        """Has exact gradients, so only the optimizer can differ."""
        return sum((p * jnp.arange(1, 1 + p.size, dtype=p.dtype).reshape(p.shape)).sum() for p in params.values())

    tx = OPTIMIZERS["adamw"]
    first = Sharded(tx, loss=loss)
    first.run(2)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "step", {"params": first.params, "state": first.state})
    second = Sharded(tx, ranks=ranks, loss=loss)
    before = jax.sharding.AbstractMesh((RANKS,), ("i",))
    init = jax.shard_map(second.optimizer.init, mesh=before, in_specs=REPLICATED, out_specs=second.specs)
    on_host = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    saved = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_host),
        {"params": second.params, "state": jax.eval_shape(init, PARAMS)},
    )
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "step", saved)
    second.params = jax.device_put(restored["params"], NamedSharding(second.mesh, REPLICATED))
    second.state = jax.device_put(
        second.optimizer.repartition(restored["state"], PARAMS, ranks),
        jax.tree.map(lambda spec: NamedSharding(second.mesh, spec), second.specs),
    )
    back = first.optimizer.repartition(second.state, PARAMS, RANKS)
    assert_same_bits(back, first.state)
    assert_close(second.run(2), first.run(2), steps=4)


def test_summed_gradients_are_refused():
    optimizer = zero.sharded_optimizer(optax.sgd(1.0), "i")

    def step(params, x):
        return optimizer.update(jax.grad(loss)(params, x), optimizer.init(params), params)[0]

    with pytest.raises(ValueError, match=r"sharded_optimizer: the leaf at \['b'\].* is already the same on all ranks"):
        sharded(step, mesh=make_mesh((RANKS,)), in_specs=(REPLICATED, SHARDED), out_specs=REPLICATED)(PARAMS, X)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"stage": 4}, "stage must be 1, 2 or 3, got 4"), ({"order": "mpi"}, "order must be one of")],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        zero.sharded_optimizer(optax.sgd(1.0), "i", **options)
