"""Groups as tables that a rank reads at its mesh position."""

from collections.abc import Sequence

import numpy as np

Groups = Sequence[Sequence[int]]  # of mesh positions


def group_table(groups: Groups) -> np.ndarray:
    """By position, its group's index."""
    table = np.zeros(sum(map(len, groups)), np.int32)
    for i, group in enumerate(groups):
        table[list(group)] = i
    return table


def rank_table(groups: Groups) -> np.ndarray:
    """By position, its rank in its group."""
    table = np.zeros(sum(map(len, groups)), np.int32)
    for group in groups:
        table[list(group)] = range(len(group))
    return table
