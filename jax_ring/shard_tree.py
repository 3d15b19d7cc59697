"""The binary tree over shards along which `order="tree"` adds: its nodes, and which of them a rank contributes.

A tree over V shards is split at the largest power of two smaller than V, and so is each of its parts (the shape of the
hash tree of RFC 6962). It depends on V alone, never on the number of ranks: a rank that holds several shards adds them
up as far as the tree allows, and contributes the partial sums that are left.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import NamedTuple, TypeVar

Value = TypeVar("Value")


class Node(NamedTuple):
    """A node of the tree, over the shards `first`, ..., `first + size - 1`."""

    first: int
    size: int

    def children(self) -> tuple["Node", "Node"]:
        """The two halves of a node of several shards. The left one has a power of two of them, and at least half."""
        left = 1 << (self.size - 1).bit_length() - 1
        return Node(self.first, left), Node(self.first + left, self.size - left)


def maximal_nodes(num_shards: int, shards: Iterable[int]) -> list[Node]:
    """The largest nodes of a tree over `num_shards` that contain none but the given shards, from left to right."""
    held = set(shards)

    def visit(node: Node) -> list[Node]:
        present = sum(shard in held for shard in range(node.first, node.first + node.size))
        if present in (0, node.size):
            return [node] if present else []
        return [found for child in node.children() for found in visit(child)]

    return visit(Node(0, num_shards))


@cache
def terms_of(num_shards: int, num_ranks: int, rank: int) -> tuple[Node, ...]:
    """The partial sums that rank `rank` of `num_ranks` contributes: those of the largest nodes within its shards.

    The rank holds the V/p consecutive shards from rank * V/p on. There are at most 2 log2(V/p) terms, and one if V/p
    is a power of two.
    """
    each = num_shards // num_ranks
    return tuple(maximal_nodes(num_shards, range(rank * each, (rank + 1) * each)))


def num_slots(num_shards: int, num_ranks: int) -> int:
    """The largest number of terms of a rank. All ranks run one program, in which each has room for so many."""
    return max(len(terms_of(num_shards, num_ranks, rank)) for rank in range(num_ranks))


class Term(NamedTuple):
    """A step of a fold.

    Attributes:
      rank: whose term it is.
      slot: which of the rank's terms.
      merges: how many times the two partial sums on top of the stack are added after this one has been pushed.
    """

    rank: int
    slot: int
    merges: int


@cache
def fold_of(num_shards: int, num_ranks: int, ranks: tuple[int, ...] | None = None) -> tuple[Term, ...]:
    """The fold of the terms of some ranks (all, by default), as a program for a stack machine.

    The terms come in the order of their shards. What is on the stack in the end are the sums of the largest nodes
    within the shards of these ranks: one, if these are all ranks.
    """
    members = range(num_ranks) if ranks is None else sorted(ranks)
    owned = [(rank, slot, node) for rank in members
             for slot, node in enumerate(terms_of(num_shards, num_ranks, rank))]  # fmt: skip
    after = merges_of(num_shards, [node for _, _, node in owned])
    return tuple(Term(rank, slot, merges) for (rank, slot, _), merges in zip(owned, after, strict=True))


def roots_of(num_shards: int, num_ranks: int, ranks: Iterable[int]) -> list[Node]:
    """The largest nodes within the shards of some ranks, from left to right: those whose sums their fold leaves."""
    each = num_shards // num_ranks
    return maximal_nodes(num_shards, (rank * each + i for rank in ranks for i in range(each)))


def merges_of(num_shards: int, nodes: Sequence[Node]) -> list[int]:
    """After each of these nodes, from left to right, how many pairs of partial sums on top of a stack are added."""
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
    """Runs a fold: value_of(rank, slot) is a term, add(left, right) a sum. Returns what is left on the stack."""
    stack: list[Value] = []
    for term in terms:
        stack.append(value_of(term.rank, term.slot))
        for _ in range(term.merges):
            right = stack.pop()
            stack.append(add(stack.pop(), right))
    return stack
