"""What differs between the kinds of collectives, in one table."""

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
      params: the parameters of its primitives, besides those that all have.
      adds: whether each rank contributes to sums, in an order that is an option.
      scatters: whether an operand consists of blocks, one per rank.
      gathers: whether a result does.
      in_place: whether a result may overwrite its operand. In other kinds, peers may still read a rank's operand when
        its result is written.
      joins: whether each operand has a result of its own, so that one call can take the operands of several.
      has_xla: whether XLA has this collective. It has an all-reduce in the place of the others.
      is_ragged: whether sizes are known at run time alone.
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
        """The name of XLA's collective to which a call of this kind lowers where no engine serves it."""
        is_wrong = self is REDUCE_SCATTER and "cpu" in platforms and _compat.WRONG_REDUCE_SCATTER_ON_CPU
        return self.name if self.has_xla and not is_wrong else ALL_REDUCE.name

    def refusal(self, op: str, dtype) -> str:
        """Why it does not take operands of a dtype, with places for the function and their type; empty if it does.

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
    """Whether a dtype is not one that NumPy does not know, such as that of random keys, nor float0, without values."""
    return isinstance(dtype, np.dtype) and dtype != jax.dtypes.float0


_BLOCKS = ("axis_size", "dimension", "tiled")
ALL_REDUCE = Kind("all_reduce", adds=True, in_place=True)
REDUCE = Kind("reduce", ("root",), adds=True, in_place=True, has_xla=False)
BROADCAST = Kind("broadcast", ("root",), in_place=True, has_xla=False)
REDUCE_SCATTER = Kind("reduce_scatter", _BLOCKS, adds=True, scatters=True)
ALL_GATHER = Kind("all_gather", _BLOCKS, gathers=True)
# The blocks that a rank receives lie along `concat_dimension`.
ALL_TO_ALL = Kind("all_to_all", (*_BLOCKS, "concat_dimension"), scatters=True, gathers=True)
PERMUTE = Kind("permute", ("perm",))
RAGGED_ALL_TO_ALL = Kind("ragged_all_to_all", joins=False, is_ragged=True)

KINDS = {
    kind.name: kind
    for kind in (
        ALL_REDUCE, REDUCE, BROADCAST, REDUCE_SCATTER, ALL_GATHER, ALL_TO_ALL, PERMUTE, RAGGED_ALL_TO_ALL
    )
}  # fmt: skip
