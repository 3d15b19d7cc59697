"""A collective's options: algorithm, order of folding, stream."""

import contextlib
import contextvars
import dataclasses
import functools
import operator
from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

Algorithm = Literal["auto", "one_shot", "two_shot", "ring"]
Order = Literal["rank", "ring", "any", "tree"]

ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
ORDERS: tuple[Order, ...] = get_args(Order)


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of one call, hashable parameters of the primitive, the same on all ranks.

    No tuple: JAX looks in those for programs, several times per equation.
    """

    algorithm: Algorithm = "auto"  # how the engine moves the data; never changes the result
    order: Order = "rank"  # in which a sum is folded
    overlap: bool = False  # whether a GPU runs the call on XLA's collective stream, beside the main one
    # For order="tree": operands have a first dimension with a slot for each of the rank's terms, as in ShardSums. None:
    # one shard per rank and no such dimension.
    num_shards: int | None = None
    apart: bool = False  # whether never to join the call with others, e.g. one per bucket of gradients

    def of_sum(self, order: Order) -> "Options":
        """The options of a sum in this order, otherwise unchanged."""
        return dataclasses.replace(self, order=order)

    def ignored_by_xla(self) -> str:
        """Options that XLA ignores, as keyword arguments; maybe empty.

        Not order "tree": XLA then moves, and the program adds.
        """
        ignored = {"algorithm": self.algorithm != "auto", "order": self.order == "ring"}
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in ignored if ignored[name])


@contextlib.contextmanager
def setting(variable: contextvars.ContextVar, value: Any) -> Iterator[None]:
    """Gives a context variable this value in the block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


_DEFAULT = Options()
_defaults = contextvars.ContextVar("defaults", default=_DEFAULT)


def bucketed(overlap: bool) -> contextlib.AbstractContextManager[None]:
    """The options of collectives in the block whose operands are buckets.

    overlap: whether GPUs run them beside their computation.
    """
    return setting(_defaults, Options(overlap=overlap, apart=True))


def check_choice(function: str, name: str, value: Any, choices: Sequence[str]) -> None:
    """Raises ValueError unless `value`, argument `name` of `function`, is a choice."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{function}: {name} must be one of {', '.join(map(repr, choices))}; got {value!r}")


def integer(function: str, name: str, value: Any) -> int:
    """`value`, argument `name` of `function`, as a Python integer.

    Raises:
      TypeError: if it is none, or traced: JAX's error, with the value's origin.
    """
    try:
        return operator.index(value)
    except TypeError:
        if isinstance(value, jax.core.Tracer):
            raise
        raise TypeError(f"{function}: {name} must be an integer, got {value!r}") from None


def check_function(function: str, name: str, value: Any) -> None:
    """Raises TypeError unless `value`, argument `name` of `function`, can be called."""
    if not callable(value):
        raise TypeError(f"{function}: {name} must be a function, got {value!r}")


def array_or_none(value: Any) -> jax.Array | np.ndarray | None:
    """`value` as an array, maybe without dimensions; None if it is no array or number.

    Of NumPy: JAX's would start its backend, and fix the number of devices.
    """
    if isinstance(value, jax.Array):
        return value
    if isinstance(value, bool | int | float | complex | np.ndarray | np.generic):
        return np.asarray(value)
    return jnp.asarray(value) if hasattr(value, "__jax_array__") and not isinstance(value, type) else None


def promoted(*dtypes: Any) -> np.dtype:
    """The dtype that holds values of all of these, also where JAX promotes none by itself."""
    with jax.numpy_dtype_promotion("standard"):
        return np.dtype(functools.reduce(jnp.promote_types, dtypes))


def path_text(path: Any, root: str = "the root") -> str:
    """The path of a leaf as errors name it; `root` is for a tree that is a leaf."""
    return jax.tree_util.keystr(path) or root


def path_texts(tree: Any, root: str = "the root") -> list[str]:
    """The paths of all leaves, as errors name them."""
    return [path_text(path, root) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def check_arrays(function: str, name: str, tree: Any) -> None:
    """Raises TypeError unless the leaves of `tree`, argument `name` of `function`, are arrays or numbers.

    What has a dtype stands for an array, such as `jax.ShapeDtypeStruct`.
    """
    if all(map(_is_array, jax.tree.leaves(tree))):  # paths take more time
        return
    path, leaf = next(item for item in jax.tree_util.tree_leaves_with_path(tree) if not _is_array(item[1]))
    raise TypeError(f"{function}: the leaf at {path_text(path)} of {name} must be an array or a number, got {leaf!r}")


def _is_array(leaf: Any) -> bool:
    if isinstance(leaf, jax.Array | bool | int | float | complex):
        return True
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or isinstance(leaf, type):
        return hasattr(leaf, "__jax_array__")
    return not isinstance(dtype, np.dtype) or dtype.kind not in "OSUMm"  # objects, texts and times


def make_options(function: str, algorithm: Algorithm = "auto", order: Order = "rank") -> Options:
    """The options of a call of `function`, for operands without slots.

    Raises:
      ValueError: if an option is none of its choices, or if the algorithm cannot fold in that order.
    """
    if algorithm == "auto" and order == "rank":
        return _defaults.get()
    check_choice(function, "algorithm", algorithm, ALGORITHMS)
    check_choice(function, "order", order, ORDERS)
    if order == "ring" and algorithm not in ("auto", "ring"):
        raise ValueError(
            f"{function}: order='ring' needs algorithm='ring' or 'auto', because no other algorithm folds in that "
            f"order; got algorithm={algorithm!r}. With order='rank' every algorithm gives the same result, and with "
            "order='any' the engine takes an order that suits the algorithm."
        )
    if order == "tree" and algorithm == "ring":
        raise ValueError(
            f"{function}: order='tree' cannot have algorithm='ring', in which a partial sum visits one rank after the "
            "other; pass 'auto', 'one_shot' or 'two_shot'"
        )
    return dataclasses.replace(_defaults.get(), algorithm=algorithm, order=order)
