"""ring_psum reuses the buffer of a computed operand, and never overwrites the caller's arrays."""

import jax.numpy as jnp
import numpy as np
from helpers import TARGET, compiled_text, sharded
from jax import lax

from jax_ring import ring_psum

X = jnp.arange(8 * 1000.0)
TOTAL = np.tile(np.asarray(X).reshape(8, -1).sum(0), 8)


def is_in_place(fun) -> bool:
    call = next(line for line in compiled_text(fun, X).splitlines() if TARGET in line and "custom-call(" in line)
    return "output_to_operand_aliasing" in call


def test_a_computed_value_is_overwritten():
    f = sharded(lambda x: ring_psum(x * 2, "i"), check_vma=False)
    assert is_in_place(f)
    np.testing.assert_array_equal(f(X), 2 * TOTAL)


def test_an_argument_is_not_overwritten():
    for f in (lambda x: ring_psum(x, "i"), lambda x: ring_psum(x[None], "i")[0]):
        f = sharded(f, check_vma=False)
        x = X + 0
        assert not is_in_place(f)
        assert " copy(" not in compiled_text(f, x)
        np.testing.assert_array_equal(f(x), TOTAL)
        np.testing.assert_array_equal(x, X)


def test_a_value_that_is_needed_later_is_kept():
    def f(x):
        y = jnp.abs(x)
        return ring_psum(y, "i") - y

    np.testing.assert_array_equal(sharded(f, check_vma=False)(X), TOTAL - np.asarray(X))


def test_one_value_summed_twice_in_one_call():
    def f(x):
        y = x * 2
        a, b = ring_psum((y, y), "i")
        return a + b

    np.testing.assert_array_equal(sharded(f, check_vma=False)(X), 4 * TOTAL)


def test_loop_variables_are_overwritten_and_the_argument_is_kept():
    f = sharded(lambda x: lax.fori_loop(0, 3, lambda _, c: ring_psum(c, "i") * 0.125, x), check_vma=False)
    x = X + 0
    assert is_in_place(f)
    np.testing.assert_allclose(f(x), TOTAL / 8, rtol=1e-6)
    np.testing.assert_array_equal(x, X)


def test_large_messages_in_and_out_of_place():
    # Above the size from which results are written with streaming stores.
    x = jnp.ones(8 * (1 << 20)) * jnp.arange(8.0).repeat(1 << 20)
    np.testing.assert_array_equal(sharded(lambda x: ring_psum(x, "i"), check_vma=False)(x), np.full(x.shape, 28.0))
    np.testing.assert_array_equal(sharded(lambda x: ring_psum(-x, "i"), check_vma=False)(x), np.full(x.shape, -28.0))
