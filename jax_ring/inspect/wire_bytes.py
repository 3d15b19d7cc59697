"""Closed formulas for the bytes of each kind of collective.

V is the message size of nccl-tests: of the operand of an all-reduce or reduce-scatter, and of the result of an
all-gather or ragged all-to-all, on one rank. Rings: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for
clusters of workstations" (2009); two-shot sends as much.
"""

from collections.abc import Iterable, Sequence

# By kind: average bytes sent by a rank in a group of p ranks, in units of V.
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
