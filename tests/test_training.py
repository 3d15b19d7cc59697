"""Ten steps of the GPT of the examples with Adam: the same bits where they should be, and one device's numbers."""

import pathlib
import sys

import jax
import numpy as np
import optax
import pytest
from helpers import assert_same_bits, make_mesh
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "examples"))
import train_gpt

RANKS, STEPS = 8, 10
OPTIMIZER = optax.adam(1e-3)
PARAMS = train_gpt.init_params(jax.random.key(0), width=32, layers=2, context=16)
TEXT = train_gpt.load_text()[: STEPS * 16 * 17].reshape(STEPS, 16, 17).astype(np.int32)


def train(ranks, **options):
    """Losses of ten steps of the example, and the parameters after them."""
    mesh = make_mesh((ranks,), ("data",))
    train_step = train_gpt.make_train_step(mesh, OPTIMIZER, **options)
    copy = jax.tree.map(np.array, PARAMS)  # the step gives its arguments' memory to its results
    params, state = jax.device_put((copy, OPTIMIZER.init(copy)), jax.NamedSharding(mesh, P()))
    losses = []
    for tokens in TEXT:
        params, state, value = train_step(params, state, tokens)
        losses.append(value)
    return jax.device_get((np.stack(losses), params))


@pytest.fixture(scope="module")
def ring():
    return train(RANKS)


def test_losses_fall(ring):
    losses, _ = ring
    assert losses[0] == pytest.approx(np.log(train_gpt.VOCABULARY), rel=0.02)
    assert losses[-1] < losses[0] - 0.2


# By default all of so small a layer is in one bucket.
@pytest.mark.parametrize("options", [{"impl": "lax"}, {"bucket_bytes": 1 << 10}], ids=["lax", "1 KiB"])
def test_same_bits(ring, options):
    jax.tree.map(assert_same_bits, train(RANKS, **options), ring)


def test_one_device_on_the_whole_batch(ring):
    """Gradients are means over 256 bytes' losses, added in another order: an error of some units in the last place.

    Adam divides a gradient by its own size, so that a step is off by the relative error of its gradient: measured,
    1.1e-6 of the parameters' norm after ten steps.
    """
    losses, params = ring
    alone_losses, alone_params = train(1)
    np.testing.assert_allclose(losses, alone_losses, rtol=1e-6)
    square = lambda tree: sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in jax.tree.leaves(tree))  # noqa: E731
    difference = square(jax.tree.map(np.subtract, params, alone_params)) / square(alone_params)
    assert difference < 1e-5**2
