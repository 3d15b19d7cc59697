"""The two binary trees of the double-tree all-reduce."""

from typing import NamedTuple


class Node(NamedTuple):
    """A rank's place in a tree."""

    parent: int | None
    children: tuple[int, ...]  # by rank
    depth: int  # 0 at the root


Tree = list[Node]  # by rank


def inorder_tree(num_ranks: int) -> Tree:
    """The binary tree that numbers its nodes from left to right, and whose leaves are the even ranks.

    Its root is the largest power of two less one; to the left of it all levels are full, and to the right is a smaller
    such tree. Its height is floor(log2 p).
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
    """Two trees over the same ranks, of which no rank is an inner node in both, so that each can carry half a message.

    The second is the first one's mirror image, or, where the number of ranks is odd, the first one shifted by a rank.
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
