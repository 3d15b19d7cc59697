"""The binary tree over shards of `order="tree"`: its nodes, and those that a rank contributes.

A node of n shards is split at the largest power of two below n (the hash tree of RFC 6962). The tree depends on V
alone: a rank adds its shards as far as the tree allows, and contributes the partial sums.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import NamedTuple, TypeVar

Value = TypeVar("Value")


class Node(NamedTuple):
    """The node over shards `first`, ..., `first + size - 1`."""

    first: int
    size: int

    def children(self) -> tuple["Node", "Node"]:
        """A node's halves; the left one is a power of two, and the larger."""
        left = 1 << (self.size - 1).bit_length() - 1
        return Node(self.first, left), Node(self.first + left, self.size - left)


def roots_of(num_shards: int, num_ranks: int, ranks: Iterable[int]) -> list[Node]:
    """The largest nodes within some ranks' shards, from left to right, whose sums a fold leaves.

    Rank r has the V/p shards from r * V/p on.
    """
    each = num_shards // num_ranks
    held = {rank * each + i for rank in ranks for i in range(each)}

    def visit(node: Node) -> list[Node]:
        present = sum(shard in held for shard in range(node.first, node.first + node.size))
        if present in (0, node.size):
            return [node] if present else []
        return [found for child in node.children() for found in visit(child)]

    return visit(Node(0, num_shards))


@cache
def terms_of(num_shards: int, num_ranks: int, rank: int) -> tuple[Node, ...]:
    """The partial sums of rank `rank` of `num_ranks`: the largest nodes within its shards.

    There are up to 2 log2(V/p) terms; one if V/p is a power of two.
    """
    return tuple(roots_of(num_shards, num_ranks, (rank,)))


def num_slots(num_shards: int, num_ranks: int) -> int:
    """The most terms of a rank, for which the one program of all has room."""
    return max(len(terms_of(num_shards, num_ranks, rank)) for rank in range(num_ranks))


class Term(NamedTuple):
    """A step of a fold.

    Attributes:
      rank: of the term.
      slot: of the rank's terms.
      merges: how often the top two of the stack are added after pushing this.
    """

    rank: int
    slot: int
    merges: int


@cache
def fold_of(num_shards: int, num_ranks: int) -> tuple[Term, ...]:
    """The fold of all ranks' terms, in the order of shards, as a program for a stack machine."""
    owned = [(rank, slot, node) for rank in range(num_ranks)
             for slot, node in enumerate(terms_of(num_shards, num_ranks, rank))]  # fmt: skip
    after = merges_of(num_shards, [node for _, _, node in owned])
    return tuple(Term(rank, slot, merges) for (rank, slot, _), merges in zip(owned, after, strict=True))


def merges_of(num_shards: int, nodes: Sequence[Node]) -> list[int]:
    """How often the top two of a stack are added after each of these nodes."""
    place, merges = {node: i for i, node in enumerate(nodes)}, [0] * len(nodes)
    ends = [node.first + node.size for node in nodes]

    def covers(node: Node) -> bool:
        if node in place:
            return True
        if node.size == 1:
            return False
        left, right = map(covers, node.children())
        if left and right:
            merges[ends.index(node.first + node.size)] += 1
        return left and right

    covers(Node(0, num_shards))
    return merges


def run_fold(
    terms: Sequence[Term], value_of: Callable[[int, int], Value], add: Callable[[Value, Value], Value]
) -> list:
    """Runs a fold: value_of(rank, slot) is a term, add(left, right) a sum. Returns the stack."""
    stack: list[Value] = []
    for term in terms:
        stack.append(value_of(term.rank, term.slot))
        for _ in range(term.merges):
            right = stack.pop()
            stack.append(add(stack.pop(), right))
    return stack
