"""An unmodified training script gives the same bits under override_lax(), with no all-reduce of XLA left."""

import pytest
from flax_training import batches, init_state, make_train_step, train
from helpers import TARGET, assert_same_bits, make_mesh
from tiers import vma_fixture

from jax_ring import override_lax

pytestmark = pytest.mark.full  # the whole family, and programs that others cover
check_vma = vma_fixture(without_vma=pytest.mark.one_pair)  # plain JAX on top of the collectives

STEPS = 10


def num_all_reduces(train_step):
    """The number of all-reduces of jax_ring, and of XLA, in the compiled step."""
    text = train_step.lower(init_state(), *next(batches(1))).compile().as_text()
    return text.count(f'custom_call_target="{TARGET}"'), text.count(" all-reduce(")


def test_flax_with_batch_norm_and_clipping(check_vma):
    train_step = make_train_step(make_mesh(names=("data",)), check_vma)
    expected_state, expected_losses = train(train_step, STEPS)
    assert expected_losses[-1] < expected_losses[0]
    assert num_all_reduces(train_step)[0] == 0
    with override_lax():
        state, losses = train(train_step, STEPS)
        by_engine, by_xla = num_all_reduces(train_step)
    assert by_engine
    assert not by_xla
    # Bit for bit, because XLA:CPU sums float32 in rank order as well.
    assert losses == expected_losses
    assert_same_bits(state, expected_state)
