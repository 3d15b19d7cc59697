"""One description of a call on its way through lowering: what it computes, and who serves it."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jax_ring.lowering import trees
from jax_ring.lowering.kinds import Kind
from jax_ring.lowering.topology import Levels
from jax_ring.options import Options

Pairs = tuple[tuple[int, int], ...]  # (source, receiver)


class Service(NamedTuple):
    """Who serves a call.

    Attributes:
      levels: the groups that an engine serves, and those that XLA serves; None if XLA serves the whole call.
      engine: "cpu" or "cuda".
      why_not: why no engine serves the call, if `levels` is None.
      automatic_axes: the mesh axes that the enclosing shard_maps leave to the compiler, of more than one device.
    """

    levels: Levels | None
    engine: str = ""
    why_not: str = ""
    automatic_axes: tuple[str, ...] = ()


class CallSpec(NamedTuple):
    """A call of a collective. Its primitive knows the function, the kind and the reduction; lowering adds the rest.

    Attributes:
      function: the name of the public function, for messages.
      kind: what it does.
      op: the reduction: "sum", "max" or "min".
      to_xla: (ctx, operand, **params of the primitive) to the results for one operand, by XLA's collectives.
      axes, axis_index_groups, options: parameters that all primitives have.
      axis_size, dimension, tiled, concat_dimension, root, perm: parameters of some, see `Kind.params`.
      groups: of mesh positions that communicate with each other, each in rank order.
      service: who serves the call.
      description: names it in errors, without its line: equal calls have equal descriptions.
      group_trees: along which it adds if its order is "tree" and its groups do not have all ranks of their trees.
      part: the first element and the number of elements of the part that the operand of a reduce-scatter or the result
        of an all-gather is, of an array of one dimension, which the call has in its stead. An all-gather takes the
        array with the parts before as well, if there are any. Further operands are not read, but awaited.
      rounds_to: the float of 16 bits to which a reduce-scatter of a part rounds float32 before it adds; else empty.
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
    group_trees: tuple[trees.GroupTree, ...] | None = None
    part: tuple[int, ...] = ()
    rounds_to: str = ""

    @property
    def levels(self) -> Levels:
        """How the groups are split between hosts, if an engine serves the call."""
        assert self.service.levels is not None
        return self.service.levels

    @property
    def is_sum(self) -> bool:
        """Whether its result depends on the order in which it folds."""
        return self.kind.adds and self.op == "sum"

    @property
    def adds_along_tree(self) -> bool:
        """Whether it adds along a tree."""
        return self.kind.adds and self.options.order == "tree"

    @property
    def params(self) -> dict[str, Any]:
        """The parameters of the primitive, without the options."""
        names = ("axes", "axis_index_groups", *self.kind.params)
        return {name: getattr(self, name) for name in names}

    @property
    def blocks(self) -> dict[str, Any]:
        """The blocks of its operands and results in the user's arrays, as arguments of the functions in layout.py."""
        return {"axis_size": self.axis_size, "dimension": self.dimension, "tiled": self.tiled}

    def within_hosts(self, kind: Kind, **changes: Any) -> "CallSpec":
        """The call of this kind between the ranks of each host that is a step of this one."""
        levels = self.levels
        return self._replace(
            kind=kind,
            op=self.op if kind.adds else "sum",
            groups=levels.intra,
            service=self.service._replace(levels=levels._replace(inter=())),
            description=f"{self.description} ({kind.name.replace('_', '-')} within a host)",
            **{**_NO_PARAMS, "axis_size": levels.num_ranks, **changes},
        )


_NO_PARAMS = {"dimension": 0, "tiled": False, "concat_dimension": None, "root": 0, "perm": None}
