"""Joins collectives of one line in a shard_map's body before lowering, so that they are lowered as one.

`jax.tree.map(lambda x: ring_psum(x, "data"), tree)` has an equation per leaf. Those equal but for operands, all there
when the first runs, become one equation. The combiner joins the rest, at more effort.
"""

from collections.abc import Hashable
from typing import Any

from jax.extend.core import Jaxpr, Literal, Primitive

from jax_ring import _compat
from jax_ring.lowering.module_state import Numbers
from jax_ring.lowering.passes import combiner

# Primitives with any number of operands of one dtype and one result for each.
PRIMITIVES: set[Primitive] = set()


class _Group:
    """Equations that can be one.

    Attributes:
      places: in the jaxpr.
      num_operands, num_bytes: in total.
      expressions: of the operands.
    """

    def __init__(self) -> None:
        self.places: list[int] = []
        self.num_operands = 0
        self.num_bytes = 0
        self.expressions: set[Hashable] = set()

    def can_take(self, expressions: list[Hashable], num_bytes: int) -> bool:
        """Whether operands can be added; maybe equal ones are left to the combiner, which sends them once."""
        return (
            self.num_operands + len(expressions) <= combiner.COMBINE_THRESHOLD_COUNT
            and self.num_bytes + num_bytes <= combiner.COMBINE_THRESHOLD_BYTES
            and self.expressions.isdisjoint(expressions)
        )


def join(jaxpr: Jaxpr):
    """The jaxpr with collectives joined, within the combiner's limits."""
    equations = jaxpr.eqns
    if len([1 for equation in equations if equation.primitive in PRIMITIVES]) < 2:
        return jaxpr
    groups = [group.places for group in _groups(equations) if len(group.places) > 1]
    joined = {places[0]: _joined([equations[place] for place in places]) for places in groups}
    left_out = {place for places in groups for place in places[1:]}
    return jaxpr.replace(
        eqns=[joined.get(place, equations[place]) for place in range(len(equations)) if place not in left_out]
    )


def _groups(equations) -> list[_Group]:
    groups: list[_Group] = []
    open_groups: dict[Hashable, _Group] = {}
    expressions = _Expressions()
    place_of: dict[Any, int] = {}  # variable to the place of the equation that computes it
    for place, equation in enumerate(equations):
        key = _key(equation)
        if key is not None:
            operands = equation.invars
            numbers = [expressions.of(operand) for operand in operands]
            num_bytes = max(map(_num_bytes, (operands, equation.outvars)))
            ready = max(place_of.get(operand, -1) for operand in operands)
            group = open_groups.get(key)
            if group is None or ready >= group.places[0] or not group.can_take(numbers, num_bytes):
                group = open_groups[key] = _Group()
                groups.append(group)
            group.places.append(place)
            group.num_operands += len(numbers)
            group.num_bytes += num_bytes
            group.expressions.update(numbers)
        expressions.note(equation)
        place_of.update(dict.fromkeys(equation.outvars, place))
    return groups


def _key(equation) -> Hashable | None:
    """What collectives of one line and `jax.named_scope` have in common that can be one; None for other equations."""
    if equation.primitive not in PRIMITIVES:
        return None
    options = equation.params["options"]
    if options.apart or options.overlap or options.num_shards is not None:
        return None
    shapes = [operand.aval.shape for operand in equation.invars]
    is_constant = any(isinstance(operand, Literal) for operand in equation.invars)
    if is_constant or not all(isinstance(n, int) for shape in shapes for n in shape):
        return None
    return equation.primitive, *equation.params.items(), equation.invars[0].aval.dtype, *_compat.place_of(equation)


def _num_bytes(atoms) -> int:
    return sum([atom.aval.size * atom.aval.dtype.itemsize for atom in atoms])


def _joined(equations):
    return equations[0].replace(
        invars=[operand for equation in equations for operand in equation.invars],
        outvars=[result for equation in equations for result in equation.outvars],
    )


class _Expressions:
    """Numbers for variables, equal for one primitive of equal operands.

    Parameters are ignored, so equal numbers may differ.
    """

    def __init__(self) -> None:
        self._numbers = Numbers()
        self._of: dict[Any, int] = {}

    def of(self, atom) -> Hashable:
        return None if isinstance(atom, Literal) else self._of.get(atom, atom)

    def note(self, equation) -> None:
        operands = [self.of(atom) for atom in equation.invars]
        for i, result in enumerate(equation.outvars):
            self._of[result] = self._numbers[equation.primitive, i, *operands]
