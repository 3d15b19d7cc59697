"""Builds the two binary trees of the double-tree all-reduce."""

from typing import NamedTuple


class Node(NamedTuple):
    """A rank's position in a tree: parent, children in rank order, and depth (0 at the root)."""

    parent: int | None
    children: tuple[int, ...]
    depth: int


Tree = list[Node]  # by rank


def inorder_tree(num_ranks: int) -> Tree:
    """The binary tree whose in-order traversal visits the ranks in order, and whose leaves are the even ranks.

    The root is 2^floor(log2 p) - 1. Its left subtree is full; its right subtree is a smaller tree of the same kind. The
    height is floor(log2 p).
    """
    parent: list[int | None] = [None] * num_ranks
    children: list[list[int]] = [[] for _ in range(num_ranks)]
    depth = [0] * num_ranks

    def build(begin: int, end: int, above: int | None) -> None:
        if begin == end:
            return
        root = begin + (1 << ((end - begin).bit_length() - 1)) - 1
        parent[root] = above
        if above is not None:
            children[above].append(root)
            depth[root] = depth[above] + 1
        build(begin, root, root)
        build(root + 1, end, root)

    build(0, num_ranks, None)
    return [Node(*node) for node in zip(parent, map(tuple, children), depth, strict=True)]


def double_binary_tree(num_ranks: int) -> tuple[Tree, Tree]:
    """Two trees over the same ranks. No rank is an inner node of both, so each can carry half of a message.

    The second is the mirror image of the first, or, if the number of ranks is odd, the first shifted by one rank.
    Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", Parallel
    Computing 35 (2009).
    """
    first = inorder_tree(num_ranks)
    if num_ranks % 2 == 0:
        rename = [num_ranks - 1 - i for i in range(num_ranks)]
    else:
        rename = [(i + 1) % num_ranks for i in range(num_ranks)]
    second = list(first)
    for i, node in enumerate(first):
        second[rename[i]] = Node(
            None if node.parent is None else rename[node.parent],
            tuple(sorted(rename[child] for child in node.children)),
            node.depth,
        )
    return first, second
