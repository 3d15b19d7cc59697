"""Primitives that lower to several collectives, for `explain()`."""

from collections.abc import Callable

from jax.extend.core import Primitive

# By primitive: (platforms, axis context, **params) to a function of the operands, which is lowered in its place.
STEPS: dict[Primitive, Callable] = {}
