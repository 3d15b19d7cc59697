"""What a collective puts on the wire: closed formulas, for the predictions of `explain()`.

V is the message in the sense of nccl-tests: what each rank contributes to an all-reduce or a reduce-scatter, and what
each rank gets from an all-gather. The formulas for rings are those of Patarasuk and Yuan, "Bandwidth optimal all-reduce
algorithms for clusters of workstations" (2009); two-shot moves as much.
"""

from collections.abc import Sequence

# By kind: a rank's messages in units of V, in a group of p ranks.
_MESSAGES = {
    "all_reduce": lambda p: 2 * (p - 1) / p,
    "reduce_scatter": lambda p: (p - 1) / p,
    "all_gather": lambda p: (p - 1) / p,
    "all_to_all": lambda p: (p - 1) / p,
    # One rank of p has nothing to send.
    "reduce": lambda p: (p - 1) / p,
    "broadcast": lambda p: (p - 1) / p,
    "permute": lambda p: 1,
}


def wire_bytes(kind: str, num_bytes: int, group_sizes: Sequence[int], algorithm: str | Sequence[str] = "auto") -> float:
    """Bytes that a rank sends for one collective, on average over all ranks.

    Args:
      kind: all_reduce, reduce_scatter, all_gather, all_to_all, reduce, broadcast or permute.
      num_bytes: the message, V.
      group_sizes: how many ranks each group has.
      algorithm: that of an all-reduce, or of each group's. With "one_shot" every rank sends its whole message to every
        other one.
    """
    algorithms = [algorithm] * len(group_sizes) if isinstance(algorithm, str) else algorithm

    def messages(p: int, algorithm: str) -> float:
        return p - 1 if kind == "all_reduce" and algorithm == "one_shot" else _MESSAGES[kind](p)

    total = sum(p * messages(p, a) for p, a in zip(group_sizes, algorithms, strict=True) if p > 1)
    return num_bytes * total / sum(group_sizes)
