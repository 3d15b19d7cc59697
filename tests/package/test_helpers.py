"""The assertions of helpers.py accept equal trees and reject different ones."""

from collections import OrderedDict

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits, assert_same_trees

X = np.array([0, 1, np.nan], np.float32)
NAN_OF_OTHER_BITS = np.array([0, 1, -np.nan], np.float32)
NEGATIVE_ZERO = np.array([-0.0, 1, np.nan], np.float32)
WRONG = {
    "container": {"a": (X, [X])},
    "kind of dict": OrderedDict(a=[X, [X]]),
    "missing leaf": {"a": [X, []]},
    "dtype": {"a": [X, [X.astype(jnp.bfloat16)]]},
    "shape": {"a": [X, [X[None]]]},
    "value": {"a": [X, [np.nextafter(X, np.float32(2))]]},
    "number for NaN": {"a": [X, [np.nan_to_num(X)]]},
    "NaN for number": {"a": [X, [X * np.float32(np.nan)]]},
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
@pytest.mark.parametrize("check", [assert_same_trees, assert_same_bits])
def test_rejects(check, wrong):
    right = {"a": [X, [X]]}
    for trees in ((wrong, right), (right, wrong)):
        with pytest.raises(AssertionError):
            check(*trees)


@pytest.mark.parametrize("check", [assert_same_trees, assert_same_bits])
def test_accepts(check):
    check({"a": [jnp.asarray(X), None]}, {"a": [NAN_OF_OTHER_BITS, None]})


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float8_e5m2, jnp.complex64], ids=lambda d: d.__name__)
def test_only_bits_distinguish_signs_of_zeros(dtype):
    plus, minus = X.astype(dtype), NEGATIVE_ZERO.astype(dtype)
    assert_same_trees(plus, minus)
    with pytest.raises(AssertionError):
        assert_same_bits(plus, minus)


def test_tolerance():
    assert_same_trees(X * np.float32(1.0005), X, rtol=1e-3)
    with pytest.raises(AssertionError):
        assert_same_trees(X * np.float32(1.002), X, rtol=1e-3)
