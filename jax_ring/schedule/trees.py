"""The two binary trees of the double-tree all-reduce."""

from functools import cache
from typing import NamedTuple


class Node(NamedTuple):
    """A rank in a tree: parent, children in rank order, depth from 0."""

    parent: int | None
    children: tuple[int, ...]
    depth: int


Tree = list[Node]  # by rank


def inorder_tree(num_ranks: int) -> Tree:
    """The binary tree with in-order traversal in rank order, and the even ranks as leaves.

    The root is 2^floor(log2 p) - 1, with a full left subtree and a smaller tree of the kind on the right. The height is
    floor(log2 p).
    """
    tree = [Node(None, (), 0)] * num_ranks

    def build(begin: int, end: int, parent: int | None, depth: int) -> tuple[int, ...]:
        """Builds the tree of these ranks; returns its root, if there are any."""
        if begin == end:
            return ()
        root = begin + (1 << ((end - begin).bit_length() - 1)) - 1
        children = *build(begin, root, root, depth + 1), *build(root + 1, end, root, depth + 1)
        tree[root] = Node(parent, children, depth)
        return (root,)

    build(0, num_ranks, None, 0)
    return tree


@cache  # the same for all ranks
def double_binary_tree(num_ranks: int) -> tuple[Tree, Tree]:
    """Two trees without a common inner node, so that each can carry half of a message.

    The second mirrors the first, or, for an odd number of ranks, shifts it by one. Sanders, Speck and Träff, "Two-tree
    algorithms for full bandwidth broadcast, reduction and scan", Parallel Computing 35 (2009).
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
