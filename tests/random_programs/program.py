"""A random program as data, as Python source, and made smaller."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple


class Value(NamedTuple):
    """What is known of a value when the program is made.

    Attributes:
      shape, dtype: on each rank.
      bound: the largest magnitude.
      unit: values are multiples of 1 / unit, a power of two.
      gain: an upper bound for derivatives by operands, summed over all paths.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bound: float = 1
    unit: int = 1
    gain: float = 1


@dataclass(frozen=True)
class Body:
    """A function of one value, defined before the step that calls it."""

    name: str
    argument: str
    steps: tuple
    result: str


@dataclass(frozen=True)
class Step:
    """`results = expression`.

    Attributes:
      uses: the names of the values in the expression.
      bodies: the functions in it.
      simpler: expressions that may stand in its place, because their results have the same types.
      features: what the step tests, for counts.
    """

    results: tuple[str, ...]
    expression: str
    uses: tuple[str, ...]
    bodies: tuple[Body, ...] = ()
    simpler: tuple[str, ...] = ()
    features: tuple[str, ...] = ()


@dataclass(frozen=True)
class Operand:
    """An operand of the program.

    Attributes:
      axes: the mesh axes over which it differs between ranks.
      bound: the largest magnitude.
    """

    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str, ...]
    bound: int


@dataclass(frozen=True)
class Program:
    """A program, with all that is needed to run it.

    Attributes:
      mesh: axis sizes by name.
      devices: their indices, in the order of the mesh.
      transformation: how the program is run; a key of `runner.TRANSFORMATIONS`.
      scale: the weights of the results in a loss are multiples of it, so that means of gradients are exact.
      tolerance: in place of equality: how many roundings there are, and the largest magnitude of a result.
    """

    seed: int
    mesh: dict[str, int]
    devices: tuple[int, ...]
    check_vma: bool
    x64: bool
    transformation: str
    scale: int
    operands: tuple[Operand, ...]
    steps: tuple[Step, ...]
    tolerance: tuple[float, float] | None = None
    values: dict = field(default_factory=dict, compare=False, hash=False)

    def source(self) -> str:
        """Python source, which `runner.run` executes."""
        lines = [
            f"# Seed {self.seed}. Save as FILE and run: python -m tests.random_programs --file FILE",
            "import jax",
            "import jax.numpy as jnp",
            "from jax import lax",
            "from wrappers import *",
            "",
            f"MESH = {self.mesh}",
            f"DEVICES = {list(self.devices)}",
            f"CHECK_VMA = {self.check_vma}",
            f"X64 = {self.x64}",
            f"TRANSFORMATION = {self.transformation!r}",
            f"SCALE = {self.scale}",
            "# For real numbers: how many roundings there are, and the largest magnitude of a result.",
            f"TOLERANCE = {self.tolerance}",
            "# Of each: shape on a rank, dtype, the mesh axes over which it differs, the largest magnitude.",
            f"OPERANDS = {[(x.shape, x.dtype, x.axes, x.bound) for x in self.operands]}",
            "",
            "",
            f"def program(ops, {', '.join(f'x{i}' for i in range(len(self.operands)))}):",
            *_indented(self.steps),
            f"    return ({''.join(f'{name}, ' for name in self.results())})",
        ]
        return "\n".join(lines) + "\n"

    def results(self) -> list[str]:
        """The values that no step uses."""
        used = {name for step in self.steps for name in step.uses}
        names = [f"x{i}" for i in range(len(self.operands))] if not self.steps else []
        return [name for name in [*names, *(r for step in self.steps for r in step.results)] if name not in used]

    def features(self) -> set[str]:
        """What the program tests."""
        return {self.transformation, *["real numbers"] * (self.tolerance is not None), *_features(self.steps)}

    def smaller(self) -> Iterator["Program"]:
        """Programs with a step less, or a simpler one."""
        for count in range(1, len(self.steps)):
            yield replace(self, steps=self.steps[:count])
        for steps in _smaller(self.steps):
            yield replace(self, steps=steps)
        if self.transformation != "forward":
            yield replace(self, transformation="forward")


def _indented(steps) -> list[str]:
    lines = []
    for step in steps:
        for body in step.bodies:
            lines += [f"def {body.name}({body.argument}):", *_indented(body.steps), f"    return {body.result}"]
        lines.append(f"{', '.join(step.results)} = {step.expression}")
    return [f"    {line}" for line in lines]


def _features(steps) -> set[str]:
    found: set[str] = set()
    for step in steps:
        found.update(step.features)
        for body in step.bodies:
            found |= _features(body.steps)
    return found


def _smaller(steps) -> Iterator[tuple]:
    for i, step in enumerate(steps):
        before, after = steps[:i], steps[i + 1 :]
        for expression in step.simpler:
            if expression != step.expression:
                called = tuple(body for body in step.bodies if body.name in expression)
                yield (*before, replace(step, expression=expression, bodies=called, simpler=()), *after)
        for j, body in enumerate(step.bodies):
            for inner in _smaller(body.steps):
                bodies = (*step.bodies[:j], replace(body, steps=inner), *step.bodies[j + 1 :])
                yield (*before, replace(step, bodies=bodies), *after)
