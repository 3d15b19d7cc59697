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
from jax_ring.training.expressions import expressions_of, primitives_of
from jax_ring.training.optax_parts import name_of, parts_of
from jax_ring.training.separability import Layout, Verdict, apart, compare_with_whole
from jax_ring.training.sharded_optimizer import ShardedOptimizer

# The axes over which the optimizer with a certain `update` has been found to be elementwise.
_elementwise_over: WeakKeyDictionary[Callable, set[tuple]] = WeakKeyDictionary()


class ElementwiseCheck:
    """Raises ValueError if an optimizer gives other results where the leaves of a dtype become one vector.

    It compares values on a probe, once, and for each tree of parameters the operations that the optimizer applies to
    them with those that it applies to vectors of other names and sizes. The first finds what couples elements, the
    second finds masks and labels.
    """

    def __init__(self, tx: Any, layout: Layout, axis_name: AxisName):
        self._tx, self._layout, self._axes = tx, layout, axes_of(axis_name)
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
        if _compat.has_backend() and not any(isinstance(axis, int) for axis in self._axes):
            try:
                self._check(params, ())
            except NameError:
                return

    def _check_inside(self, params: Any) -> None:
        check_named("sharded_optimizer", self._axes)
        self._check((params,), tuple(_compat.bound_axis_sizes()))

    def _check(self, trees: tuple, bound: tuple) -> None:
        axis_sizes = {self._axes[0]: 2, **{axis: 1 for axis in (*self._axes[1:], *bound) if axis != self._axes[0]}}
        elementwise = _elementwise_over.setdefault(self._tx.update, set())
        if tuple(axis_sizes) not in elementwise:
            # In an order in which each names the fault best: a mean over a leaf depends on its size as well.
            apart(partial(self._check_tree, _OTHER_DIMENSIONS, axis_sizes))
            apart(partial(self._check_values, axis_sizes))
            apart(partial(self._check_tree, _OTHER_SIZES, axis_sizes))
            elementwise.add(tuple(axis_sizes))
        for tree in trees:
            shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), tree)
            key = (jax.tree.structure(shapes), tuple((x.shape, x.dtype) for x in jax.tree.leaves(shapes)))
            if key not in self._known_trees:
                apart(partial(self._check_tree, shapes, axis_sizes))
                self._known_trees.add(key)

    def _check_values(self, axis_sizes: dict[Any, int]) -> None:
        axis_env = _axis_env(axis_sizes)

        def compare(tx: Any) -> Verdict:
            return compare_with_whole(tx, self._layout, axis_sizes)

        try:
            verdict = compare(self._tx)
        except Exception as error:
            _refuse_what_fails(self._tx, error)
        difference, tx = verdict.difference, self._tx
        if difference is None and (not verdict.has_moved or "cond" in primitives_of(*_step(tx, _VECTORS), **axis_env)):
            # Perhaps a part has not been used yet, as with optax.MultiSteps.
            for part in parts_of(tx):
                difference = _difference(compare, part)
                if difference is not None:
                    tx = part
                    break
        if difference is not None:
            _refuse(_blamed(tx, lambda part: _difference(compare, part) is not None), difference)

    def _check_tree(self, params: Any, axis_sizes: dict[Any, int]) -> None:
        vectors, axis_env = _anonymous(params), _axis_env(axis_sizes)

        def looks_at_leaves(tx: Any) -> bool:
            return expressions_of(*_step(tx, params), **axis_env) != expressions_of(*_step(tx, vectors), **axis_env)

        try:
            looks = looks_at_leaves(self._tx)
        except Exception as error:
            _refuse_what_fails(self._tx, error)
        if looks:
            _refuse(
                _blamed(self._tx, lambda part: _succeeds(looks_at_leaves, part)),
                "treats parameters by their names, places, shapes or sizes, as a mask does",
            )


def _step(tx: Any, params: Any) -> tuple:
    """A function that makes the state and the first updates, and its arguments."""

    def run(gradients, params):
        return tx.update(gradients, tx.init(params), params)

    return run, params, params


def _axis_env(axis_sizes: dict[Any, int]) -> dict[str, Any]:
    return {"axis_env": [(axis, 1) for axis in axis_sizes]}


def _shape(*shape: int, dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def _anonymous(params: Any) -> dict[str, Any]:
    """The leaves in the same order, as vectors of one size."""
    return {f"{i:08}": _shape(_SIZE, dtype=leaf.dtype) for i, leaf in enumerate(jax.tree.leaves(params))}


_SIZE = 7
_OTHER_DIMENSIONS = {"a": {"b": _shape(_SIZE, 1), "c": _shape(1, 1, _SIZE, 1)}, "d": _shape(_SIZE)}
_OTHER_SIZES = {"a": {"b": _shape(4, 5), "c": _shape(2, 3, 2, 4)}, "d": _shape(1 << 24)}
_VECTORS = _anonymous(_OTHER_SIZES)


def _difference(compare: Callable[[Any], Verdict], part: Any) -> str | None:
    try:
        return compare(part).difference
    except Exception:  # some parts only work within the whole
        return None


def _succeeds(test: Callable[[Any], bool], part: Any) -> bool:
    try:
        return test(part)
    except Exception:
        return False


def _blamed(tx: Any, is_at_fault: Callable[[Any], bool]) -> str:
    """The innermost part that is at fault by itself, and those that contain it."""
    names = [name_of(tx)]
    while at_fault := next(filter(is_at_fault, parts_of(tx)), None):
        tx = at_fault
        names.append(name_of(tx))
    innermost, *others = dict.fromkeys(reversed(names))
    return f"{innermost} (in {', in '.join(others)})" if others else innermost


_REMEDY = (
    "With layout='flat' each rank gives the optimizer an equal part of one vector for each dtype. Use "
    "layout='parameter', which keeps parameters whole; to clip by the norm of all gradients, "
    "jax_ring.zero.clip_by_global_norm."
)


def _refuse(name: str, fault: str) -> NoReturn:
    raise ValueError(f"sharded_optimizer: {name} {fault}, so it cannot be sharded like this. {_REMEDY}")


def _refuse_what_fails(tx: Any, error: Exception) -> NoReturn:
    if isinstance(error, NameError):  # a collective over an axis that is not bound here
        raise error
    if isinstance(error, jax.errors.UnexpectedTracerError):
        raise ValueError(
            f"sharded_optimizer: {name_of(tx)} uses a value that is being traced, perhaps its learning rate, so it "
            "cannot be tried out, and whether it is elementwise is not known. Make the optimizer outside of the traced "
            "function. For hyperparameters that change, use optax.inject_hyperparams, which keeps them in the state."
        ) from error
    raise ValueError(
        f"sharded_optimizer: {name_of(tx)} fails for parameters of another tree: {type(error).__name__}: {error}\n"
        f"{_REMEDY}"
    ) from error
