"""Operations that are rounded one by one: an elementwise function has the same bits however its arrays are cut.

Compilers contract a product and a sum to one operation, which rounds once, and divide by a broadcast scalar by
multiplying with its reciprocal. Whether they do depends on the shape of the array, on the place of an element in it, on
other arrays of the program, and on what comes before and after.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ring import _compat
from jax_ring.collectives.leaves import own_copy
from jax_ring.options import promoted
from jax_ring.training.same_bits.evaluation import Known, evaluate, with_rules
from jax_ring.training.same_bits.fence import fence


def each_rounded(f: Callable, *trees: Any) -> Any:
    """`f(*trees)`, with the operations of real floats rounded one by one.

    Additions, products, divisions and square roots have the bits that IEEE 754 gives them, for each element by itself.
    So have the inputs, where they are computed in the same program. Other functions, such as exp, have not.
    """
    trees = jax.tree.map(jnp.asarray, trees)
    closed, types = jax.make_jaxpr(f, return_shape=True)(*trees)

    def rounded(closed, leaves):
        rounding = Rounding(leaves)
        return evaluate(closed, [rounding.stored(x) for x in leaves], Known(rounding))

    results = with_rules(closed, jax.tree.leaves(trees), rounded, of_derivatives=False)
    return jax.tree.unflatten(jax.tree.structure(types), results)


class Rounding:
    """Hides results from the compiler, which then has to round them: `x ^ zero`, with a zero that it does not know.

    That is one instruction more in the loop that computes x, which takes no time where memory does.
    """

    def __init__(self, leaves: list[jax.Array]):
        """leaves: what results are computed from."""
        self._zeros: dict[frozenset, jax.Array] = {}  # by the axes over which they vary
        for x in leaves:
            axes = _compat.varying_axes(x)
            if axes not in self._zeros and x.size and jnp.issubdtype(x.dtype, jnp.number):
                zero = fence(own_copy(jnp.zeros((), jnp.float32), tuple(axes)), after=x)
                self._zeros[axes] = lax.bitcast_convert_type(zero, jnp.uint32)

    def stored(self, x: Any) -> Any:
        """x, as if it had been stored in memory and read again."""
        zero = self._zero_for(x)
        return x if zero is None else _with_bits(x, lambda bits: bits ^ zero.astype(bits.dtype))

    def results(self, name: str, bind: Callable[[list], list], operands: list) -> list:
        """The results of an elementwise operation."""
        if name == "rsqrt" and _is_real(operands[0]):  # XLA has an approximation of its own for vectors
            wide = operands[0].astype(promoted(operands[0].dtype, jnp.float32))
            root = self.stored(lax.sqrt(wide))
            return [self.stored((jnp.ones_like(root) / root).astype(operands[0].dtype))]
        if name == "div" and jnp.ndim(operands[1]):
            operands = [operands[0], self._own_divisor(*operands)]
        results = bind(operands)
        if name in ("mul", "div"):
            return [self.stored(x) for x in results]
        # Narrow floats are computed in float32, and not rounded between two operations.
        return [self.stored(x) if _is_real(x) and jnp.finfo(x.dtype).bits < 32 else x for x in results]

    def _own_divisor(self, dividend: Any, divisor: Any) -> Any:
        """The divisor, which is a broadcast no longer: every element depends on that of the dividend."""
        zero = self._zero_for(dividend)
        if zero is None:
            return self.stored(divisor)

        def own(bits):
            of_dividend = lax.bitcast_convert_type(dividend, bits.dtype)
            return bits ^ (of_dividend & zero.astype(bits.dtype))

        return _with_bits(divisor, own)

    def _zero_for(self, x: Any) -> jax.Array | None:
        """A zero that varies over the axes over which x does. None if x is no number of those, or is a constant."""
        if not isinstance(x, jax.core.Tracer) or not _is_real(x) or not x.size:
            return None
        axes = _compat.varying_axes(x)
        found = [zero for others, zero in self._zeros.items() if others <= axes]
        return own_copy(found[0], tuple(axes)) if found else None


def _is_real(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _with_bits(x: Any, f: Callable) -> Any:
    bits = lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * jnp.dtype(x.dtype).itemsize}"))
    return lax.bitcast_convert_type(f(bits), x.dtype)
