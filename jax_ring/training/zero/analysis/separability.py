"""Finds optimizers that give other results where each rank updates a part of the parameters: by running them."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jax_ring.training.zero.interface import ShardedOptimizer

T = TypeVar("T")
Layout = Callable[[Any], ShardedOptimizer]

# The probe: odd sizes, so that parts end within leaves and need padding.
_SHAPES = {"a": (5,), "b": {"c": (3, 4)}}
_IS_SHAPE = {"is_leaf": lambda x: isinstance(x, tuple)}
_LONG, _SHORT = 64, 8


class Verdict(NamedTuple):
    """What running an optimizer has shown.

    Attributes:
      difference: what differs from the results without sharding, to follow the optimizer's name; None if nothing does.
      has_moved: whether any of the updates that were compared was not zero.
    """

    difference: str | None
    has_moved: bool


def compare_with_whole(tx: Any, layout: Layout, axis_sizes: dict[Any, int]) -> Verdict:
    """Trains a few small parameters with an optimizer as a whole, and as a layout shards it, and compares.

    The gradients vary over many orders of magnitude, so that thresholds are crossed. In some steps a single one is
    huge, infinite or NaN: then all others are compared, which shows whether it reaches them.

    Args:
      tx: an optax transformation.
      layout: from a transformation to the functions of its sharded form.
      axis_sizes: the axes that the layout and `tx` name, with the number of ranks over which they are compared.
    """
    whole = _Training(lambda params: tx.init(params), tx.update, dict.fromkeys(axis_sizes, 1))
    sharded = layout(tx)
    cut = _Training(sharded.init, sharded.update, axis_sizes)

    @jax.jit
    def start(params):
        states = whole.init(params), cut.init(params)
        largest = jax.tree.map(lambda _: jnp.float32(0), params)
        return states, largest, {"updates": False, "state": [False for _ in _scalars(states[1])], "moved": False}

    @jax.jit
    def step(states, params, gradients, compared, largest, found):
        expected, state = whole.update(gradients, states[0], params)
        actual, own_state = cut.update(gradients, states[1], params)
        expected = jax.tree.map(lambda x: x[0], expected)
        size = jax.tree.map(_mean_size, expected, compared)
        largest = jax.tree.map(jnp.maximum, largest, size)
        flags = {
            "updates": _any(jax.tree.map(_differs, actual, expected, compared, size, largest)),
            "state": [_any(_ranks_differ(x)) for x in _scalars(own_state)],
            "moved": _any(jax.tree.map(lambda x, compared: compared & (x != 0), expected, compared)),
        }
        found = jax.tree.map(jnp.logical_or, found, flags)
        params = jax.tree.map(lambda p, u: p + u.astype(p.dtype), params, expected)
        return (state, own_state), params, largest, found

    total: Any = None
    for gradients, compared in _probes():
        params = _draw(1.0, np.random.default_rng(0))
        states, largest, found = start(params)
        for g in gradients:
            states, params, largest, found = step(states, params, g, compared, largest, found)
        found = jax.device_get(found)
        total = jax.tree.map(operator.or_, total, found) if total else found
    paths = [jax.tree_util.keystr(path) for path, x in _leaves_with_path(states[1]) if x.ndim == 1]
    apart = [path for path, differs in zip(paths, total["state"], strict=True) if differs]
    difference = None
    if total["updates"]:
        difference = "is not elementwise: its updates differ from those without sharding"
    elif apart:
        difference = f"keeps a scalar that differs between ranks, in its state at {', '.join(apart)}"
    else:
        difference = _not_repartitioned(sharded, axis_sizes)
    return Verdict(difference, bool(total["moved"]))


class _Training:
    """An optimizer on a number of ranks. States and updates have a leading axis of ranks; parameters have none."""

    def __init__(self, init: Callable, update: Callable, axis_sizes: dict[Any, int]):
        self.shape = tuple(axis_sizes.values())
        self._init, self._update = init, update
        for axis, size in reversed(axis_sizes.items()):
            self._init = jax.vmap(self._init, axis_name=axis, axis_size=size)
            self._update = jax.vmap(self._update, axis_name=axis, axis_size=size)

    def init(self, params):
        return self._joined(self._init(self._spread(params)))

    def update(self, gradients, state, params):
        state = jax.tree.map(lambda x: x.reshape(*self.shape, *x.shape[1:]), state)
        return self._joined(self._update(self._spread(gradients), state, self._spread(params)))

    def _spread(self, tree):
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (*self.shape, *jnp.shape(x))), tree)

    def _joined(self, tree):
        return jax.tree.map(lambda x: x.reshape(math.prod(self.shape), *x.shape[len(self.shape) :]), tree)


def _draw(scale: float, rng: np.random.Generator) -> Any:
    return jax.tree.map(lambda s: np.float32(scale * rng.standard_normal(s)), _SHAPES, **_IS_SHAPE)


def _probes() -> Iterator[tuple[list[Any], Any]]:
    """The gradients of each step, and which elements of the results to compare."""
    rng = np.random.default_rng(1)
    scales = [1.0, 1e3, 1e-3, 30.0, 0.0]
    everything = jax.tree.map(lambda s: np.ones(s, bool), _SHAPES, **_IS_SHAPE)
    yield [_draw(scales[i % len(scales)], rng) for i in range(_LONG)], everything
    others = {**everything, "a": np.arange(5) > 0}
    for poison in (1e12, np.inf, np.nan):
        gradients = [_draw(1.0, rng) for _ in range(_SHORT)]
        for i in (0, 3):
            gradients[i]["a"][0] = poison
        yield gradients, others


def _mean_size(updates: jax.Array, compared: jax.Array) -> jax.Array:
    return jnp.where(compared & jnp.isfinite(updates), jnp.abs(updates), 0).mean()


def _differs(actual: Any, expected: Any, compared: Any, size: Any, largest: Any) -> jax.Array:
    """Where results differ by more than rounding, which depends on how the compiler fuses operations.

    size, largest: the mean of this step, and the largest of all steps so far: where a schedule has come to 0, the
      rounding of what it was before is left.
    """
    rounding = 1e-4 * (jnp.abs(expected) + size) + jnp.finfo(jnp.float32).eps * largest
    near = jnp.abs(actual - expected) <= rounding
    equal = (actual == expected) | (jnp.isnan(actual) & jnp.isnan(expected))
    return compared & ~near & ~equal


def _ranks_differ(x: jax.Array) -> jax.Array:
    x = jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended) else x
    return (x != x[:1]) & ~((x != x) & (x[:1] != x[:1]))


def _any(tree: Any) -> jax.Array:
    return jnp.any(jnp.array([jnp.any(x) for x in jax.tree.leaves(tree)]))


def _scalars(state: Any) -> list[jax.Array]:
    return [x for x in jax.tree.leaves(state) if x.ndim == 1]


def _leaves_with_path(tree: Any) -> list:
    return jax.tree_util.tree_leaves_with_path(tree)


def _not_repartitioned(sharded: ShardedOptimizer, axis_sizes: dict[Any, int]) -> str | None:
    """Which leaf of the state cannot be moved to another number of ranks, because it has no part for each rank."""
    params = _draw(1.0, np.random.default_rng(0))

    def state_on(ranks: int) -> Any:
        first, *others = axis_sizes
        state = _Training(sharded.init, sharded.update, {first: ranks, **dict.fromkeys(others, 1)}).init(params)
        return jax.tree.map(lambda x: x[0] if x.ndim == 1 else x.reshape(-1, *x.shape[2:]), state)

    expected = jax.eval_shape(partial(state_on, 3))
    actual = jax.eval_shape(lambda: sharded.repartition(state_on(2), params, 3))
    for (path, x), (_, y) in zip(_leaves_with_path(actual), _leaves_with_path(expected), strict=True):
        if x.shape != y.shape:
            return f"has state that is not divided as the parameters are, at {jax.tree_util.keystr(path)}"
    return None


def apart(function: Callable[[], T]) -> T:
    """The result of a function that computes with values, also while this thread traces another one.

    A thread of its own has no axes, no mesh and no trace.
    """

    def run():
        with ExitStack() as stack:
            for context in (
                # The probe contains NaNs on purpose, and is sent from the host.
                *(jax.debug_nans(False), jax.debug_infs(False), jax.transfer_guard("allow")),
                # Where these forbid what the optimizer does, its own update raises the error.
                *(jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard")),
            ):
                stack.enter_context(context)
            return function()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()
