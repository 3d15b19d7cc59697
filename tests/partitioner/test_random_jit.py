"""Some random `jit` programs have the bits of XLA's; random_jit.py runs more."""

import pytest
import random_jit

pytestmark = pytest.mark.full  # many programs of the same kinds


@pytest.mark.parametrize("first", [0, 100, 200])
def test_random_programs(first):
    texts = [random_jit.compare(first + i) for i in range(6)]
    assert sum(text.count("jax_ring_") for text in texts) > 6
