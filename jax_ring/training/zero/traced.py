"""An optax transformation: as two traced functions, and the transformations that it is made of."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr

from jax_ring import _compat
from jax_ring.options import path_texts
from jax_ring.training.zero.clip import as_equation, norm_given_by


class Traced(NamedTuple):
    """An optax transformation for certain parameters; the types of its state, and the paths to them."""

    init: ClosedJaxpr
    update: ClosedJaxpr
    state: list
    paths: list[str]

    @classmethod
    def of(cls, tx: Any, params: Any, axis_sizes: dict[Any, int]) -> Traced:
        """Traces where these axes are bound, without a mesh. UnexpectedTracerError if it holds a tracer."""
        env = list(axis_sizes.items())
        with (
            _compat.without_vma(),
            jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())),
            # Lift the program's settings here. If they forbid an operation of the optimizer, its own update raises the
            # error.
            jax.numpy_rank_promotion("allow"),
            jax.numpy_dtype_promotion("standard"),
            jax.transfer_guard("allow"),
            norm_given_by(as_equation),
        ):
            init, state = jax.make_jaxpr(tx.init, axis_env=env, return_shape=True)(params)
            update, results = jax.make_jaxpr(tx.update, axis_env=env, return_shape=True)(params, state, params)
        found, expected = (str(jax.tree.structure(tree)) for tree in (results, (params, state)))
        if found != expected:
            raise ValueError(f"update returned a tree {found} instead of {expected}")
        if any(isinstance(x, jax.core.Tracer) for x in (*init.consts, *update.consts)):
            raise jax.errors.UnexpectedTracerError("closure")
        return cls(init, update, jax.tree.leaves(state), path_texts(state))

    def split(self, results: list) -> tuple[list, list]:
        """What stands for updates and for the state in results of `update`."""
        return results[: len(self.init.in_avals)], results[len(self.init.in_avals) :]


class Part(NamedTuple):
    """A part of an optax transformation, which is one itself."""

    init: Callable
    update: Callable


def is_transformation(x: Any) -> bool:
    """Whether x can be used as an optax GradientTransformation."""
    return not isinstance(x, type) and callable(getattr(x, "init", None)) and callable(getattr(x, "update", None))


def check_transformation(function: str, tx: Any) -> None:
    """Raises TypeError unless tx, an argument of `function`, can be used as an optax GradientTransformation."""
    if not is_transformation(tx):
        raise TypeError(f"{function}: tx must be an optax GradientTransformation, such as optax.adam(1e-3); got {tx!r}")


def parts_of(tx: Any) -> list[Part]:
    """The transformations that `tx` directly contains, in their order, as far as closures show them."""
    inits, updates = (list(_held(f)) for f in (tx.init, tx.update))
    parts = [Part(x.init, x.update) for x in updates if is_transformation(x)]
    # optax.chain keeps two tuples of functions instead.
    groups = [[x for x in found if _is_functions(x)] for found in (inits, updates)]
    for init_functions, update_functions in zip(*groups, strict=False):
        if len(init_functions) == len(update_functions):
            parts += map(Part, init_functions, update_functions)
    return [_without_wrapper(part) for part in parts]


def name_of(tx: Any) -> str:
    """The name of the function that made a transformation, such as scale_by_adam."""
    tx = _without_wrapper(tx)
    name = _made_by(tx.update)
    if name in ("stateless", "stateless_with_tree_map"):
        return next((_made_by(x) for x in _held(tx.update) if callable(x)), name)
    return name


def all_names(tx: Any) -> set[str]:
    """The names of a transformation and of all that it contains."""
    return {name_of(tx)}.union(*map(all_names, parts_of(tx)))


def _without_wrapper(tx: Any) -> Any:
    """The transformation itself, where optax has only changed the signature of its update."""
    while _made_by(tx.update) == "with_extra_args_support" and (
        inner := [*filter(is_transformation, _held(tx.update))]
    ):
        tx = inner[0]
    return tx


def _made_by(function: Any) -> str:
    if isinstance(function, functools.partial):
        return _made_by(function.func)
    return getattr(function, "__qualname__", type(function).__name__).split(".")[0]


def _held(function: Any) -> Iterator[Any]:
    """What a function holds: the values of its closure, of its object if it is a method, and of partial arguments."""
    if isinstance(function, functools.partial):
        values = [*function.args, *function.keywords.values(), function.func]
        yield from _held(function.func)
    else:
        values = [cell.cell_contents for cell in getattr(function, "__closure__", None) or () if _is_set(cell)]
        values += getattr(getattr(function, "__self__", None), "__dict__", {}).values()
    for value in values:
        yield from _flattened(value)


def _flattened(x: Any) -> Iterator[Any]:
    """The values in nested containers. Transformations and tuples of functions are values."""
    if isinstance(x, dict | list | tuple) and not is_transformation(x) and not _is_functions(x):
        for value in x.values() if isinstance(x, dict) else x:
            yield from _flattened(value)
    else:
        yield x


def _is_functions(x: Any) -> bool:
    return isinstance(x, list | tuple) and not is_transformation(x) and len(x) > 0 and all(map(callable, x))


def _is_set(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:  # the variable has no value yet
        return False
    return True
