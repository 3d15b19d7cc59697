"""Finds the collectives in HLO text, and counts their bytes."""

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from jax_ring.launcher.schema import escaped
from jax_ring.lowering import trees
from jax_ring.lowering.tuning import Thresholds

# By opcode. The start of an asynchronous collective has the suffix -start.
_KINDS = {
    "all-reduce": "all_reduce",
    "reduce-scatter": "reduce_scatter",
    "all-gather": "all_gather",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "ragged_all_to_all",
    "collective-broadcast": "broadcast",
    "collective-permute": "permute",
}

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*)?\{$")  # only compiled computations list parameters
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (?P<type>.+?) (?P<opcode>[a-z][a-z0-9\-]*)\((?P<rest>.*)$")
_ARRAY = re.compile(r"\b([a-z]+(?:\d+\w*)?)\[([\d,]*)\]")
_CALLED = re.compile(r"\b(condition|body|calls|to_apply)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\b(?:branch_computations=\{([^}]*)\}|(?:true|false)_computation=%?([\w.\-]+))")
_PAIRS = re.compile(r"\bsource_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_OPERAND = re.compile(r"operand_layout_constraints=\{u32\[\], (\w+)\[([\d,]+)\]")
_SITE = re.compile(r'\bsite = "([^"]*)"')
# A call that XLA's partitioner has yet to divide has the engine's target as an attribute.
_TARGET = re.compile(r'(?:custom_call_target=|\btarget = )"(jax_ring_\w+)"')


@dataclass(frozen=True)
class Instruction:
    """A collective of the compiled program.

        for call in jax_ring.explain(train_step, params, batch).instructions:
            print(call.name, call.num_bytes, call.times)

    Attributes:
      name: HLO opcode, or target of a custom call.
      operands: type and shape, as in HLO.
      num_bytes: the message size of one call.
      group_sizes: ranks per group.
      times: calls in one run of the program; None if known only at run time.
      wire_bytes: the average bytes that a rank sends per call.
      call_sites: the lines of a custom call, as in its errors. Joined calls are one instruction.
    """

    name: str
    operands: tuple[str, ...]
    num_bytes: int
    group_sizes: tuple[int, ...]
    times: int | None
    wire_bytes: float
    call_sites: str = ""


def find_collectives(hlo: str) -> list[Instruction]:
    """The collectives of a compiled program, in the order of its computations."""
    match = re.search(r"num_partitions=(\d+)", hlo)
    num_ranks = int(match[1]) if match else 1
    return [instruction for instruction, _ in count(hlo, num_ranks)]


def count(
    hlo: str, num_ranks: int, joined_bytes: Callable[[int], int] | None = None
) -> Iterator[tuple[Instruction, tuple[str, ...]]]:
    """The collectives of a program, with the algorithms that "auto" selects for their groups; none without a choice.

    joined_bytes: from a call's message size to that of the call which it is joined into.
    """
    computations, entry = parse_computations(hlo)
    for match, target, times in _walk(computations, entry, 1):
        yield _instruction(match, target, times, num_ranks, joined_bytes)


def parse_computations(hlo: str) -> tuple[dict[str, list[str]], str]:
    """Each computation's lines, by name, and the entry's name."""
    computations: dict[str, list[str]] = {}
    entry, lines = "", []
    for line in hlo.splitlines():
        if header := _COMPUTATION.match(line):
            lines = computations.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        else:
            lines.append(line)
    return computations, entry


def _walk(computations: dict, name: str, times: int | None) -> Iterator[tuple[re.Match, re.Match | None, int | None]]:
    """Each collective, with its target's match if a custom call, and the number of calls."""
    for line in computations[name]:
        match = _INSTRUCTION.match(line)
        if not match:
            continue
        target = _TARGET.search(line)
        if target or match["opcode"].removesuffix("-start") in _KINDS:
            yield match, target, times
            continue
        for role, called in _CALLED.findall(match["rest"]):
            yield from _walk(computations, called, _times_called(role, match["rest"], times))
        for branches, branch in _BRANCHES.findall(match["rest"]):
            for called in re.findall(r"[\w.\-]+", branches or branch):
                yield from _walk(computations, called, None)


def _times_called(role: str, attributes: str, times: int | None) -> int | None:
    if role not in ("condition", "body"):
        return times
    count = _TRIP_COUNT.search(attributes)
    if times is None or count is None:
        return None
    return times * (int(count[1]) + (role == "condition"))


def _instruction(
    match: re.Match, target: re.Match | None, times: int | None, num_ranks: int, joined_bytes: Callable | None
) -> tuple[Instruction, tuple[str, ...]]:
    opcode, rest = match["opcode"], match["rest"]
    if target:
        kind = target[1].removeprefix("jax_ring_").removesuffix("_async")
    else:
        kind = _KINDS[opcode.removesuffix("-start")]
    arrays = _ARRAY.findall(match["type"])
    # Operands come first. In an all-reduce they are the results, and only newer versions of XLA list them separately.
    has_operands = kind != "all_reduce" or match["type"].startswith("((")
    if opcode.endswith("-start") and len(arrays) > 1 and has_operands:
        # A ragged all-to-all lists all operands and has one result.
        arrays = arrays[-1:] if kind == "ragged_all_to_all" else arrays[len(arrays) // 2 :]
    sizes = _group_sizes(rest, num_ranks)
    num_bytes = sum(_num_bytes(dtype, shape) for dtype, shape in arrays)
    along = _trees(rest, sizes)
    if part := _integers("part", rest):
        num_bytes = part[1] * _num_bytes(arrays[0][0], "1")
        if kind == "all_gather" and (operand := _OPERAND.search(rest)):
            num_bytes = max(sizes) * _num_bytes(*operand.groups())  # the gather may widen it
    elif kind == "reduce_scatter":
        num_bytes = num_bytes * max(sizes) // trees.num_roots(along)
    call_sites = _unescaped(site[1]) if target and (site := _SITE.search(rest)) else ""
    chosen: tuple[str, ...] = ()
    if kind == "all_reduce" and (thresholds := _thresholds(rest)):
        message = joined_bytes(num_bytes) if joined_bytes else num_bytes
        chosen = tuple(each.choose(message) for each in thresholds)
    messages = trees.mean_terms(along)
    if sources := _integers("sources", rest):
        messages = num_moved(((source, rank) for rank, source in enumerate(sources) if source >= 0), len(sources))
    elif pairs := _PAIRS.search(rest):
        messages = num_moved(re.findall(r"(\d+),(\d+)", pairs[1]), num_ranks)
    algorithm = named[1] if (named := re.search(r'\balgorithm = "(\w+)"', rest)) else "auto"
    instruction = Instruction(
        name=target[1] if target else opcode,
        operands=tuple(f"{dtype}[{shape}]" for dtype, shape in arrays),
        num_bytes=num_bytes,
        group_sizes=sizes,
        times=times,
        wire_bytes=wire_bytes(kind, num_bytes, sizes, chosen or algorithm, messages),
        call_sites=call_sites,
    )
    return instruction, chosen


def _unescaped(text: str) -> str:
    """A string that MLIR prints with quotes, and bytes that are not ASCII, in hexadecimal; fit for a terminal."""

    def byte(match: re.Match) -> bytes:
        return b"\\" if match[1] == b"\\" else bytes.fromhex(match[1].decode())

    return escaped(re.sub(rb"\\(\\|[0-9A-F]{2})", byte, text.encode()).decode(errors="replace"))


def _trees(attributes: str, sizes: tuple[int, ...]) -> list[trees.GroupTree]:
    """The groups' trees; none in another order."""
    shards, num_ranks, ranks = (_integers(f"tree_{name}", attributes) for name in ("shards", "sizes", "ranks"))
    places = iter(ranks)
    return [
        trees.GroupTree(num_shards, of_tree, tuple(itertools.islice(places, size)))
        for num_shards, of_tree, size in zip(shards, num_ranks, sizes if shards else (), strict=True)
    ]


def _thresholds(attributes: str) -> list[Thresholds]:
    """The thresholds by which the engine selects a sum's algorithm, for each group; empty without a choice."""
    is_free = 'algorithm = "auto"' in attributes and 'op = "sum"' in attributes and 'order = "ring"' not in attributes
    limits = [_integers(name, attributes) for name in ("one_shot_bytes", "two_shot_bytes")]
    return [Thresholds(*pair) for pair in zip(*limits, strict=True)] if is_free else []


def _integers(name: str, attributes: str) -> list[int]:
    match = re.search(rf"\b{name} = dense<\[?([-\d, ]+)\]?> : tensor<(\d+)x", attributes)
    if match is None:
        return []
    numbers = [int(n) for n in match[1].split(",")]
    return numbers * int(match[2]) if len(numbers) == 1 else numbers


def _num_bytes(dtype: str, shape: str) -> int:
    digits = re.search(r"\d+", dtype)
    bits = int(digits[0]) if digits else 8  # no digits: pred
    return math.ceil(math.prod(int(n) for n in shape.split(",") if n) * bits / 8)


def _group_sizes(attributes: str, num_ranks: int) -> tuple[int, ...]:
    if sizes := _integers("group_sizes", attributes):
        return tuple(sizes)
    if match := re.search(r"replica_groups=\{(\{[\d,]+\}(?:,\{[\d,]+\})*)\}", attributes):
        return tuple(group.count(",") + 1 for group in match[1].split("},"))
    if match := re.search(r"replica_groups=\[(\d+),(\d+)\]<=", attributes):
        return (int(match[2]),) * int(match[1])
    if match := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", attributes):
        axis_sizes = dict(re.findall(r"'([^']*)'=(\d+)", match[1]))
        # A part of an axis states its own size: 'name':(stride)size.
        named = re.findall(r"'([^']*)'(?::\(\d+\)(\d+))?", match[2])
        size = math.prod(int(part or axis_sizes[name]) for name, part in named)
        return (size,) * (num_ranks // size)
    return (num_ranks,)


# ---- Bytes on the wire -----------------------------------------------------------------------------------------------


# By kind: average bytes sent by a rank in a group of p ranks, in units of V, the message size of nccl-tests: of the
# operand of an all-reduce or reduce-scatter, and of the result of an all-gather or ragged all-to-all, on one rank.
# Rings: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009); two-shot
# sends as much.
_SENT_MESSAGES = {
    "all_reduce": lambda p: 2 * (p - 1) / p,
    "reduce_scatter": lambda p: (p - 1) / p,
    "all_gather": lambda p: (p - 1) / p,
    "all_to_all": lambda p: (p - 1) / p,
    # One of the p ranks sends nothing.
    "reduce": lambda p: (p - 1) / p,
    "broadcast": lambda p: (p - 1) / p,
    "permute": lambda p: 1,  # of those that send to another rank
    # An upper bound: the ranks send all that their results can hold. Sizes are known only at run time.
    "ragged_all_to_all": lambda p: (p - 1) / p,
}


def wire_bytes(
    kind: str,
    num_bytes: int,
    group_sizes: Sequence[int],
    algorithm: str | Sequence[str] = "auto",
    num_messages: float = 1,
) -> float:
    """Average bytes that a rank sends per call.

    Args:
      kind: all_reduce, reduce_scatter, all_gather, all_to_all, ragged_all_to_all, reduce, broadcast or permute.
      num_bytes: the message size V.
      group_sizes: ranks per group.
      algorithm: of an all-reduce, for all groups or for each. With "one_shot" each rank sends its message to every
        other.
      num_messages: average messages of a rank: of a sum along the tree, whose result is sent once, or of a permutation,
        by `num_moved()`.
    """
    algorithms = [algorithm] * len(group_sizes) if isinstance(algorithm, str) else algorithm

    def sent_messages(p: int, algorithm: str) -> float:
        if kind == "all_reduce" and algorithm == "one_shot":
            return (p - 1) * num_messages
        result = (p - 1) / p if kind == "all_reduce" else 0
        return (_SENT_MESSAGES[kind](p) - result) * num_messages + result

    total = sum(p * sent_messages(p, a) for p, a in zip(group_sizes, algorithms, strict=True) if p > 1)
    return num_bytes * total / sum(group_sizes)


def num_moved(pairs: Iterable[tuple[int, int]], num_ranks: int) -> float:
    """Average messages of a rank in a permutation. pairs: source and receiver; those of one rank send nothing."""
    return sum(source != receiver for source, receiver in pairs) / num_ranks
