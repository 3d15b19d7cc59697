"""Refuses optimizers that the flat layout would get wrong: those that are not elementwise."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp

from jax_ring import _compat
from jax_ring.collectives.axes import AxisName, axes_of, check_named
from jax_ring.options import check_arrays
from jax_ring.training.zero.analysis.expressions import expressions_of, primitives_of
from jax_ring.training.zero.analysis.optax_parts import name_of, parts_of
from jax_ring.training.zero.analysis.separability import Layout, apart, compare_with_whole
from jax_ring.training.zero.interface import ShardedOptimizer

# The axes over which the optimizer with a certain `update` has been found to be elementwise.
_elementwise_over: WeakKeyDictionary[Callable, set[tuple]] = WeakKeyDictionary()


class ElementwiseCheck:
    """Raises ValueError if an optimizer gives other results where the leaves of a dtype become one vector.

    It compares values on a probe, once, and for each tree of parameters the operations that the optimizer applies to
    them with those that it applies to vectors of other names and sizes. The first finds what couples elements, the
    second finds masks and labels.
    """

    def __init__(self, tx: Any, layout_over: Callable[[Any], Layout], axis_name: AxisName):
        """layout_over: (axis) -> the layout over that axis alone."""
        self._tx, self._layout_over, self._axes = tx, layout_over, axes_of(axis_name)
        self._known_trees: set[Any] = set()

    def checked(self, plain: ShardedOptimizer) -> ShardedOptimizer:
        """The sharded optimizer, whose functions check their parameters first."""

        def init(params):
            self._check_inside(params)
            return plain.init(params)

        def update(gradients, state, params):
            self._check_inside(params)
            return plain.update(gradients, state, params)

        def specs(params):
            self.check_outside(params)
            return plain.specs(params)

        return plain._replace(init=init, update=update, specs=specs)

    def check_outside(self, *params: Any) -> None:
        """Checks where the axes are not bound. An optimizer that names others has to wait until they are."""
        # A computation here would fix the number of devices.
        if _compat.has_backend():
            try:
                self._check(params, ())
            except NameError:
                return

    def _check_inside(self, params: Any) -> None:
        check_named("sharded_optimizer", self._axes)
        self._check((params,), tuple(_compat.bound_axis_sizes()))

    def _check(self, trees: tuple, bound: tuple) -> None:
        found = _elementwise_over.setdefault(self._tx.update, set())
        if self._axes not in found:
            # In an order in which each names the fault best: a mean over a leaf depends on its size as well.
            self._check_tree(_OTHER_DIMENSIONS, bound)
            for axis in self._axes:
                self._check_values(axis, bound)
            self._check_tree(_OTHER_SIZES, bound)
            found.add(self._axes)
        for tree in trees:
            check_arrays("sharded_optimizer", "the parameters", tree)
            shapes = jax.tree.map(_filled, tree)
            key = (jax.tree.structure(shapes), tuple((x.shape, x.dtype) for x in jax.tree.leaves(shapes)))
            if key not in self._known_trees:
                self._check_tree(shapes, bound)
                self._known_trees.add(key)

    def _check_values(self, axis: Any, bound: tuple) -> None:
        axis_sizes = {axis: 2, **{other: 1 for other in (*self._axes, *bound) if other != axis}}

        def test(tx: Any) -> tuple[str | None, bool]:
            verdict = compare_with_whole(tx, self._layout_over(axis), axis_sizes)
            # A part that has not been used yet, as in optax.MultiSteps, has to be tried by itself.
            may_hide = not verdict.has_moved or "cond" in primitives_of(*_step(tx, _VECTORS), **self._axis_env(bound))
            return verdict.difference, may_hide

        apart(partial(_refuse_if, test, self._tx))

    def _check_tree(self, params: Any, bound: tuple) -> None:
        axis_env = self._axis_env(bound)

        def test(tx: Any) -> tuple[str | None, bool]:
            own, others = (expressions_of(*_step(tx, x), **axis_env) for x in (params, _anonymous(params)))
            return None if own == others else _LOOKS, False

        apart(partial(_refuse_if, test, self._tx))

    def _axis_env(self, bound: tuple) -> dict[str, Any]:
        return {"axis_env": [(axis, 1) for axis in dict.fromkeys((*self._axes, *bound))]}


def _step(tx: Any, params: Any) -> tuple:
    """A function that makes the state and the first updates, and its arguments."""

    def run(gradients, params):
        return tx.update(gradients, tx.init(params), params)

    return run, params, params


def _shape(*shape: int, dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def _filled(x: Any) -> Any:
    """The shape of a leaf. An empty one gets elements: JAX makes the sum of none a constant, which is no operation."""
    return _shape(*(n or 1 for n in jnp.shape(x)), dtype=jnp.result_type(x))


def _anonymous(params: Any) -> dict[str, Any]:
    """The leaves in the same order, as vectors of one size."""
    return {f"{i:08}": _shape(_SIZE, dtype=leaf.dtype) for i, leaf in enumerate(jax.tree.leaves(params))}


_SIZE = 7
_OTHER_DIMENSIONS = {"a": {"b": _shape(_SIZE, 1), "c": _shape(1, 1, _SIZE, 1)}, "d": _shape(_SIZE)}
_OTHER_SIZES = {"a": {"b": _shape(4, 5), "c": _shape(2, 3, 2, 4)}, "d": _shape(1 << 24)}
_VECTORS = _anonymous(_OTHER_SIZES)

_LOOKS = "treats parameters by their names, places, shapes or sizes, as a mask does"
_REMEDY = (
    "With layout='flat' each rank gives the optimizer an equal part of one vector for each dtype. Use "
    "layout='parameter', which keeps parameters whole; to clip by the norm of all gradients, "
    "jax_ring.zero.clip_by_global_norm over the same axes."
)

# (transformation) -> its fault or None, and whether its parts may have faults that it hides.
_Test = Callable[[Any], tuple[str | None, bool]]


def _refuse_if(test: _Test, tx: Any) -> None:
    try:
        found = _fault(test, tx)
    except Exception as error:
        _refuse_what_fails(tx, error)
    if found is not None:
        names, fault = found
        innermost, *others = dict.fromkeys(names)
        within = f" (in {', in '.join(others)})" if others else ""
        raise ValueError(f"sharded_optimizer: {innermost}{within} {fault}. It cannot be sharded like this. {_REMEDY}")


def _fault(test: _Test, tx: Any) -> tuple[tuple[str, ...], str] | None:
    """The fault of the innermost part that has one by itself, and the names of this part and of those around it."""
    fault, may_hide = test(tx)
    for part in parts_of(tx) if fault or may_hide else ():
        try:
            inner = _fault(test, part)
        except Exception:  # some parts only work within the whole
            continue
        if inner is not None:
            return (*inner[0], name_of(tx)), inner[1]
    return ((name_of(tx),), fault) if fault else None


def _refuse_what_fails(tx: Any, error: Exception) -> NoReturn:
    if isinstance(error, NameError):  # a collective over an axis that is not bound here
        raise error
    if isinstance(error, jax.errors.UnexpectedTracerError):
        raise ValueError(
            f"sharded_optimizer: {name_of(tx)} uses a value that is being traced, perhaps its learning rate, so it "
            "cannot be tried out, and whether it is elementwise is not known. Make the optimizer outside of the traced "
            "function. For hyperparameters that change, use optax.inject_hyperparams, which keeps them in the state."
        ) from error
    fault = f"fails when it is tried on other parameters: {type(error).__name__}: {error}"
    raise ValueError(f"sharded_optimizer: {name_of(tx)} {fault}\n{_REMEDY}") from error
