"""In which order a compiled GPU program gives work to its streams, read from its scheduled HLO text.

XLA's main stream runs instructions one after the other. An asynchronous pair, `x-start` and `x-done`, runs on another
stream, beside what is scheduled between the two. The text has the order that XLA chose, and no times.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from jax_ring.inspect.compiled import parse_computations

MAIN, COLLECTIVE, COPIES = "main", "collective", "copies"
PRODUCT, EXCHANGE, OTHER = "matrix product", "collective", "other"

_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (?:.+?) ([a-z][a-z0-9\-]*)\(%?([\w.\-]*)")
_CALLED = re.compile(r"\b(?:calls|to_apply)=%?([\w.\-]+)")
_INNER = re.compile(r"\b(?:body|true_computation|false_computation)=%?([\w.\-]+)|\bbranch_computations=\{([^}]*)\}")
_IS_PRODUCT = re.compile(r" (?:dot|convolution)\(|custom_call_target=\"__cu(?:blas|dnn)")
_IS_EXCHANGE = re.compile(
    r" (?:all-reduce|reduce-scatter|all-gather|all-to-all|collective-permute)(?:-start)?\(|"
    r"custom_call_target=\"jax_ring_"
)
_COSTS_NOTHING = {"parameter", "constant", "get-tuple-element", "bitcast", "tuple", "partition-id", "replica-id"}


@dataclass(frozen=True)
class Work:
    """An instruction of a scheduled program that takes time on a GPU.

    Attributes:
      name: of the instruction.
      kind: PRODUCT, EXCHANGE or OTHER.
      stream: MAIN, COLLECTIVE or COPIES.
      loop: the body of the loop, or the branch, that it is in; "" outside of both.
      begin: its place in the program's order.
      end: the place of the instruction that waits for it, if it is asynchronous; else `begin`.
    """

    name: str
    kind: str
    stream: str
    loop: str
    begin: int
    end: int


def timeline(hlo: str) -> list[Work]:
    """The work of a program, in its order. A loop's body is listed once, in its place, and so is each branch."""
    computations, entry = parse_computations(hlo)
    found: list[Work] = []
    starts: dict[str, int] = {}  # index in `found` of each asynchronous instruction not yet done
    place = 0
    for loop, line in _lines(computations, entry, ""):
        match = _INSTRUCTION.match(line)
        if match is None or match[2] in _COSTS_NOTHING | {"while", "conditional"}:
            continue
        name, opcode, operand = match.groups()
        if opcode.endswith("-done"):
            if (index := starts.pop(operand, None)) is not None:
                found[index] = Work(**{**vars(found[index]), "end": place})
            continue
        kind = _kind(computations, line)
        stream = MAIN
        if opcode.endswith("-start"):
            stream = COLLECTIVE if kind == EXCHANGE else COPIES
            starts[name] = len(found)
        found.append(Work(name, kind, stream, loop, place, place))
        place += 1
    return found


def products_beside(work: list[Work]) -> dict[str, int]:
    """For each asynchronous collective the number of matrix products between its start and its done."""
    products = [each.begin for each in work if each.kind == PRODUCT and each.stream == MAIN]
    return {
        each.name: sum(each.begin < place < each.end for place in products)
        for each in work
        if each.stream == COLLECTIVE
    }


def _lines(computations: dict, name: str, loop: str) -> Iterator[tuple[str, str]]:
    """The lines of a computation and of the loops and branches in it, each with the one that it is in."""
    for line in computations[name]:
        yield loop, line
        for one, several in _INNER.findall(line):
            for inner in re.findall(r"[\w.\-]+", one or several):
                yield from _lines(computations, inner, inner)


def _kind(computations: dict, line: str) -> str:
    called = _CALLED.search(line)
    # An all-reduce also calls the function that adds two elements. That is no operation of its own.
    lines = [line, *(computations.get(called[1], ()) if called else ())]
    if any(_IS_EXCHANGE.search(each) for each in lines):
        return EXCHANGE
    return PRODUCT if any(_IS_PRODUCT.search(each) for each in lines) else OTHER
