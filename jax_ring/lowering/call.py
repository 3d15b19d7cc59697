"""What a call is: the kinds of collectives, and a call of one, with its groups and who serves it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_ring import _compat
from jax_ring.lowering import trees
from jax_ring.lowering.topology import Levels, Member
from jax_ring.options import Options


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

    def refusal(self, op: str, dtype: Any) -> str:
        """Why this kind refuses a dtype, with places for function and type; empty if it does not.

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


def is_number(dtype: Any) -> bool:
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


# ---- Calls -----------------------------------------------------------------------------------------------------------

Pairs = tuple[tuple[int, int], ...]  # (source, receiver)


class Service(NamedTuple):
    """Who serves a call.

    Attributes:
      levels: groups of the engine and of XLA; None if XLA serves the whole call.
      engine: "cpu" or "cuda".
      members: by mesh position, the devices that it connects.
      why_not: the reason, if `levels` is None.
      automatic_axes: axes that enclosing shard_maps leave to the compiler, of more than one device.
      group_trees: of the engine's groups, for order "tree".
    """

    levels: Levels | None
    engine: str = ""
    members: tuple[Member, ...] = ()
    why_not: str = ""
    automatic_axes: tuple[str, ...] = ()
    group_trees: tuple[trees.GroupTree, ...] = ()


class CallSpec(NamedTuple):
    """A call of a collective: function, kind and reduction from its primitive, the rest from lowering.

    Attributes:
      function: the public function, for messages.
      op: the reduction: "sum", "max" or "min".
      to_xla: (ctx, operand, **params) to the results for one operand, by XLA.
      axes, axis_index_groups, options: parameters of all primitives.
      axis_size, dimension, tiled, concat_dimension, root, perm: parameters of some, see `Kind.params`.
      groups: of mesh positions, in rank order.
      description: for errors, without the line; equal for equal calls.
      part: (offset, length) of the slice of a 1-D array that a reduce-scatter reads or an all-gather writes. An
        all-gather also takes the array with earlier parts, if any. Further operands are awaited, not read.
      rounds_to: the 16-bit float to which a reduce-scatter of a part rounds float32 before adding; else empty.
      blocks_apart: whether an all-to-all has an operand and a result for each rank.
    """

    function: str
    kind: Kind
    op: str = "sum"
    to_xla: Callable | None = None
    axes: tuple = ()
    axis_index_groups: tuple[tuple[int, ...], ...] | None = None
    options: Options = Options()
    axis_size: int = 0
    dimension: int = 0
    tiled: bool = False
    concat_dimension: int | None = None
    root: int = 0
    perm: Pairs | None = None
    groups: tuple[tuple[int, ...], ...] = ()
    service: Service = Service(None)
    description: str = ""
    part: tuple[int, ...] = ()
    rounds_to: str = ""
    blocks_apart: bool = False

    @property
    def levels(self) -> Levels:
        """The groups' split between hosts, if an engine serves the call."""
        assert self.service.levels is not None
        return self.service.levels

    @property
    def is_sum(self) -> bool:
        """Whether the order of the fold affects the result."""
        return self.kind.adds and self.op == "sum"

    @property
    def adds_along_tree(self) -> bool:
        return self.kind.adds and self.options.order == "tree"

    @property
    def params(self) -> dict[str, Any]:
        """The primitive's parameters, without options."""
        names = ("axes", "axis_index_groups", *self.kind.params)
        return {name: getattr(self, name) for name in names}

    @property
    def blocks(self) -> dict[str, Any]:
        """The blocks in the user's arrays, as arguments of blocks.py."""
        return {"axis_size": self.axis_size, "dimension": self.dimension, "tiled": self.tiled}

    def within_hosts(self, kind: Kind, **changes: Any) -> "CallSpec":
        """The call of this kind between each host's ranks that is a step of this one."""
        levels, group_trees = self.levels, self.service.group_trees if kind.adds else ()
        return self._replace(
            kind=kind,
            op=self.op if kind.adds else "sum",
            groups=levels.intra,
            service=self.service._replace(levels=levels._replace(inter=()), group_trees=group_trees),
            description=f"{self.description} ({kind.name.replace('_', '-')} within a host)",
            **{**_NO_PARAMS, "axis_size": levels.num_ranks, **changes},
        )


_NO_PARAMS = {"dimension": 0, "tiled": False, "concat_dimension": None, "root": 0, "perm": None}
