"""What is computed once for a module: programs have many calls that differ in nothing but their operands."""

from collections.abc import Callable, Hashable
from typing import TypeVar

from jax_ring import _compat

T = TypeVar("T")


def cached_in_module(ctx, key: Hashable, compute: Callable[[], T]) -> T:
    """The result of compute(), which is called once for each key in the module under lowering."""
    known = _compat.module_state(ctx).setdefault("memo", {})
    if key not in known:
        known[key] = compute()
    return known[key]
