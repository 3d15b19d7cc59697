"""Primitives that lower to several collectives, for `explain()`."""

from collections.abc import Callable

from jax.extend.core import Primitive

# By primitive: (platforms, axis context, **params) to the function of the operands that it is lowered as.
STEPS: dict[Primitive, Callable] = {}
