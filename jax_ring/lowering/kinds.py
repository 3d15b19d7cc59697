"""Differences between kinds of collectives, as a table."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jax_ring import _compat


@dataclass(frozen=True, eq=False)
class Kind:
    """A kind of collective.

    Attributes:
      name: a key of `runtime.TARGETS`.
      params: of its primitives, besides common ones.
      adds: whether ranks contribute to sums, in an optional order.
      scatters: whether an operand has a block per rank.
      gathers: whether a result does.
      in_place: whether a result may overwrite its operand, which in other kinds peers may still read.
      joins: whether each operand has its own result, so that calls can be joined.
      has_xla: whether XLA has it; others become an all-reduce.
      is_ragged: whether sizes are known only at run time.
    """

    name: str
    params: tuple[str, ...] = ()
    adds: bool = False
    scatters: bool = False
    gathers: bool = False
    in_place: bool = False
    joins: bool = True
    has_xla: bool = True
    is_ragged: bool = False

    def by_xla(self, platforms: tuple[str, ...]) -> str:
        """XLA's collective where no engine serves the call."""
        is_wrong = self is REDUCE_SCATTER and "cpu" in platforms and _compat.WRONG_REDUCE_SCATTER_ON_CPU
        return self.name if self.has_xla and not is_wrong else ALL_REDUCE.name

    def refusal(self, op: str, dtype) -> str:
        """Why it refuses a dtype, with places for function and type; empty if it does not.

        op: the reduction.
        """
        if not is_number(dtype):
            return "{function} takes arrays of numbers, got {type}"
        if self.adds and op == "sum" and dtype == np.bool_:
            return "{function} does not add booleans, got {type}. Use x.astype(jnp.int32)."
        if op != "sum" and jnp.issubdtype(dtype, jnp.complexfloating):
            return (
                "{function}: complex numbers have no order, got {type}. Compare jnp.abs(x), or the real and imaginary "
                "parts each."
            )
        return ""


def is_number(dtype) -> bool:
    """Whether NumPy knows a dtype: no random keys, and no float0."""
    return isinstance(dtype, np.dtype) and dtype != jax.dtypes.float0


_BLOCKS = ("axis_size", "dimension", "tiled")
ALL_REDUCE = Kind("all_reduce", adds=True, in_place=True)
REDUCE = Kind("reduce", ("root",), adds=True, in_place=True, has_xla=False)
BROADCAST = Kind("broadcast", ("root",), in_place=True, has_xla=False)
REDUCE_SCATTER = Kind("reduce_scatter", _BLOCKS, adds=True, scatters=True)
ALL_GATHER = Kind("all_gather", _BLOCKS, gathers=True)
# The received blocks are concatenated along `concat_dimension`.
ALL_TO_ALL = Kind("all_to_all", (*_BLOCKS, "concat_dimension"), scatters=True, gathers=True)
PERMUTE = Kind("permute", ("perm",))
RAGGED_ALL_TO_ALL = Kind("ragged_all_to_all", joins=False, is_ragged=True)

KINDS = {
    kind.name: kind
    for kind in (
        ALL_REDUCE, REDUCE, BROADCAST, REDUCE_SCATTER, ALL_GATHER, ALL_TO_ALL, PERMUTE, RAGGED_ALL_TO_ALL
    )
}  # fmt: skip
