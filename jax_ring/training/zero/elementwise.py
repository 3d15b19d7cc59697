"""Refuses optimizers that the flat layout would get wrong: those that are not elementwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp

from jax_ring import _compat, foreign_errors
from jax_ring.collectives.axes import AxisName, axes_of, check_named
from jax_ring.options import Order
from jax_ring.training.zero.clip import order_given
from jax_ring.training.zero.data_flow import SIZE, Cut, Expressions
from jax_ring.training.zero.interface import Shapes, by_dtype, map_sharded, refuse_further_arguments
from jax_ring.training.zero.traced import Traced, name_of, parts_of

# By `update`: the axes over which the optimizer was found to be elementwise.
_elementwise_over: WeakKeyDictionary[Callable, set[tuple]] = WeakKeyDictionary()


class ElementwiseCheck:
    """Raises ValueError unless an optimizer gives the same results where the leaves of a dtype become one vector.

    For each tree of parameters the optimizer is traced. Its data flow shows what couples elements or parameters; other
    operations on parameters than on vectors show masks and labels.
    """

    def __init__(self, tx: Any, axis_name: AxisName, order: Order):
        self._tx, self._axes, self._order = tx, axes_of(axis_name), order
        self._known_trees: set[Shapes] = set()

    def outside(self, *params: Any) -> None:
        """Checks where the axes are not bound. An optimizer that names others has to wait until they are."""
        # Tracing may create constants, and that would fix the number of devices.
        if _compat.has_backend():
            try:
                self._check(params, {})
            except NameError:
                return

    def inside(self, params: Any) -> None:
        """Checks where the axes are bound."""
        check_named("sharded_optimizer", self._axes)
        self._check((params,), dict(_compat.bound_axis_sizes()))

    def _check(self, trees: tuple, bound: dict[Any, int]) -> None:
        found = _elementwise_over.setdefault(self._tx.update, set())
        if self._axes not in found:
            self._check_tree(_ANY_PARAMETERS, bound)
            found.add(self._axes)
        for tree in trees:
            shapes = Shapes.of(map_sharded(lambda shards: shards.like, tree))
            if shapes not in self._known_trees:
                self._check_tree(jax.tree.map(_filled, shapes.params), bound)
                self._known_trees.add(shapes)

    def _check_tree(self, params: Any, bound: dict[Any, int]) -> None:
        vectors = {name: _shape(SIZE, dtype=name) for name in by_dtype(params)}
        separate = [_shape(SIZE, dtype=x.dtype) for x in jax.tree.leaves(params)]
        known: dict[tuple, Traced] = {}

        def traced(tx, like, num_ranks=2):
            key = (tx.init, tx.update, id(like), num_ranks)
            if key not in known:
                known[key] = Traced.of(tx, like, bound | dict.fromkeys(self._axes, num_ranks))
            return known[key]

        def couples(tx):
            return Cut.of(traced(tx, separate), self._axes).elements

        def distinguishes(tx):
            together, one_by_one = (Expressions.of(traced(tx, like)) for like in (vectors, separate))
            if together.constants != Expressions.of(traced(tx, vectors, num_ranks=3)).constants:
                return "depends on the number of ranks"
            is_alike = len(one_by_one.updates) == len(vectors) and one_by_one.constants == together.constants
            return None if is_alike and Expressions.of(traced(tx, params)) == one_by_one else _LOOKS

        def does_not_divide(tx):
            return Cut.of(traced(tx, vectors), self._axes).division

        with order_given(self._order):
            for fault_of in (couples, distinguishes, does_not_divide):
                _refuse_if(fault_of, self._tx)


def _shape(*shape: int, dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def _filled(x: Any) -> Any:
    """The shape of a leaf. An empty one gets elements: JAX makes the sum of none a constant, which is no operation."""
    return _shape(*(n or 1 for n in jnp.shape(x)), dtype=jnp.result_type(x))


_ANY_PARAMETERS = {"a": {"b": _shape(4, 5), "c": _shape(2, 3, 2, 4)}, "d": _shape(1 << 24)}

_LOOKS = "treats parameters by their names, number, places, shapes or sizes, as a mask does"
_REMEDY = (
    "With layout='flat' each rank gives the optimizer an equal part of one vector for each dtype. Use "
    "layout='parameter', which keeps parameters whole; to clip by the norm of all gradients, "
    "jax_ring.zero.clip_by_global_norm over the same axes."
)


# (transformation) -> its fault or None.
_Test = Callable[[Any], str | None]


def _refuse_if(fault_of: _Test, tx: Any) -> None:
    def has_fault(part):
        try:
            return fault_of(part) is not None
        except Exception:  # some parts work only within the whole
            return False

    try:
        fault = fault_of(tx)
    except Exception as error:
        _refuse_what_fails(fault_of, tx, error)
    if fault is not None:
        parts = _innermost(has_fault, tx)
        raise _not_like_this(parts, fault_of(parts[0]))


def _not_like_this(parts: list, fault: str | None) -> ValueError:
    innermost, *others = dict.fromkeys(map(name_of, parts))
    within = f" (in {', in '.join(others)})" if others else ""
    return ValueError(f"sharded_optimizer: {innermost}{within} {fault}. It cannot be sharded like this. {_REMEDY}")


def _innermost(is_meant: Callable[[Any], bool], tx: Any) -> list:
    """The innermost part for which this is true by itself, and those around it."""
    part = next(filter(is_meant, parts_of(tx)), None)
    return [tx] if part is None else [*_innermost(is_meant, part), tx]


def _refuse_what_fails(fault_of: _Test, tx: Any, error: Exception) -> NoReturn:
    def fails(part):
        try:
            fault_of(part)
        except Exception:
            return True
        return False

    if isinstance(error, NameError):  # a collective over an axis that is not bound here
        raise error
    if isinstance(error, jax.errors.UnexpectedTracerError):
        raise ValueError(
            f"sharded_optimizer: {name_of(tx)} uses a value that is being traced, perhaps its learning rate, so "
            "whether it is the same on all ranks is not known. Make the optimizer outside of the traced function. For "
            "hyperparameters that change, use optax.inject_hyperparams, which keeps them in the state."
        ) from error
    refuse_further_arguments(error)
    if foreign_errors.OTHER_TREE.search(str(error)):
        fault = "takes parameters of one tree alone, as with a mask or labels that are given as a tree"
        raise _not_like_this(_innermost(fails, tx), fault) from error
    fault = f"fails when it is tried on other parameters: {type(error).__name__}: {error}"
    raise ValueError(f"sharded_optimizer: {name_of(tx)} {fault}\n{_REMEDY}") from error
