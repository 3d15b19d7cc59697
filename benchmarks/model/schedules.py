"""All-reduce schedules as data: pure functions from (ranks, elements, rank) to the rank's steps.

A step receives, then sends. Parameters are keyword arguments; a rank out of range is a ValueError. Empty messages are
not sent. `interpreter.run` runs a schedule.
"""

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from itertools import pairwise
from typing import NamedTuple

# ---- Steps ----------------------------------------------------------------------------------------------------------


class Chunk(NamedTuple):
    """Elements [begin, end) of a message."""

    begin: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.begin

    def moved(self, offset: int) -> "Chunk":
        return Chunk(self.begin + offset, self.end + offset)


class Receive(NamedTuple):
    """Replaces a chunk by the fold of its values from `sources`, in this order.

    The receiver among the sources stands for its own value: `(left, rank)` folds the value from the left with its own,
    `(0, 1, 2, 3)` folds in rank order, and a single other source is a copy.
    """

    chunk: Chunk
    sources: tuple[int, ...]


class Send(NamedTuple):
    """Sends the chunk's current value to a rank."""

    chunk: Chunk
    to: int


class Step(NamedTuple):
    """All receives at once, then all sends at once."""

    receives: tuple[Receive, ...] = ()
    sends: tuple[Send, ...] = ()


Steps = list[Step]
Schedule = Callable[[int, int, int], Steps]  # (ranks, elements, rank) -> the rank's steps


@lru_cache(1024)  # the same for all ranks
def blocks(whole: Chunk, count: int) -> tuple[Chunk, ...]:
    """`count` chunks of equal size, the last ones shorter or empty."""
    size = -(-whole.size // count)
    bounds = [min(whole.begin + i * size, whole.end) for i in range(count + 1)]
    return tuple(Chunk(*pair) for pair in pairwise(bounds))


def check(num_ranks: int, num_elements: int, rank: int) -> None:
    """Raises ValueError for a rank out of range or a negative number of elements."""
    if num_ranks < 1 or not 0 <= rank < num_ranks:
        raise ValueError(f"there must be at least one rank, and 0 <= rank < ranks; got rank {rank} of {num_ranks}")
    if num_elements < 0:
        raise ValueError(f"a message has 0 elements or more, got {num_elements}")


def without_empty(steps: Steps) -> Steps:
    """The steps without empty messages, which both ends drop."""
    kept = (
        Step(tuple(r for r in step.receives if r.chunk.size > 0), tuple(s for s in step.sends if s.chunk.size > 0))
        for step in steps
    )
    return [step for step in kept if step != Step()]


def relabel(steps: Steps, ranks: Sequence[int], begin: int) -> Steps:
    """A group's steps within a larger one: its rank i is `ranks[i]`, its message begins at `begin`."""
    return [
        Step(
            tuple(
                r._replace(chunk=r.chunk.moved(begin), sources=tuple(ranks[source] for source in r.sources))
                for r in step.receives
            ),
            tuple(Send(s.chunk.moved(begin), ranks[s.to]) for s in step.sends),
        )
        for step in steps
    ]


# ---- The trees of the double-tree all-reduce ------------------------------------------------------------------------


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


# ---- Algorithms -----------------------------------------------------------------------------------------------------


def _hop(chunk: Chunk, hop: int, num_ranks: int, rank: int, first: int, last: int) -> Step:
    """A rank's step for hop `hop` around the ring: up to p-1 folds, then copies."""
    left, right = (rank - 1) % num_ranks, (rank + 1) % num_ranks
    sources = (left, rank) if hop < num_ranks else (left,)
    return Step((Receive(chunk, sources),) if hop > first else (), (Send(chunk, right),) if hop < last else ())


def _ring_hops(block: Sequence[Chunk], rank: int, first: int, last: int) -> Steps:
    """Hops `first` to `last` of all blocks; block i starts at rank i+1."""
    p = len(block)
    return without_empty(
        [_hop(block[(rank - hop - 1) % p], hop, p, rank, first, last) for hop in range(first, last + 1)]
    )


def reduce_scatter(num_ranks: int, num_elements: int, rank: int) -> Steps:
    """The ring's first round.

        run(reduce_scatter, [np.ones(8)] * 4).outputs[1][2:4]  # array([4., 4.]): rank 1's block of the sum

    Block i starts at rank i+1, is folded in turn, and ends at rank i.
    """
    check(num_ranks, num_elements, rank)
    return _ring_hops(blocks(Chunk(0, num_elements), num_ranks), rank, 0, num_ranks - 1)


def all_gather(num_ranks: int, num_elements: int, rank: int) -> Steps:
    """The ring's second round.

        run(all_gather, [np.full(8, rank) for rank in range(4)]).outputs[0]  # array([0, 0, 1, 1, 2, 2, 3, 3])

    Block i starts at rank i, and is copied.
    """
    check(num_ranks, num_elements, rank)
    return _ring_hops(blocks(Chunk(0, num_elements), num_ranks), rank, num_ranks - 1, 2 * num_ranks - 2)


def ring(num_ranks: int, num_elements: int, rank: int, *, pieces: int = 1) -> Steps:
    """The ring: both rounds, with all links always busy. Block i is folded over ranks i+1, i+2, ..., i.

        run(ring, [np.ones(8)] * 4).bytes_sent()  # [96, 96, 96, 96]: 2(p-1)/p of 64 bytes

    Blocks are cut into `pieces`, which take both rounds in turn.

    Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69 (2009).
    """
    check(num_ranks, num_elements, rank)
    block = [blocks(b, pieces) for b in blocks(Chunk(0, num_elements), num_ranks)]
    return [
        step for piece in range(pieces) for step in _ring_hops([b[piece] for b in block], rank, 0, 2 * num_ranks - 2)
    ]


def rank_ordered_ring(num_ranks: int, num_elements: int, rank: int, *, pieces: int = 8, lag: int = 7) -> Steps:
    """A chain of ranks that folds pieces in turn, and a second round that distributes results.

        run(rank_ordered_ring, [np.ones(8)] * 4).bytes_sent()  # [128, 128, 64, 64]

    Ranks alternate between a piece on its way and a result `lag` pieces behind.
    """
    check(num_ranks, num_elements, rank)
    last = 2 * num_ranks - 2
    piece = blocks(Chunk(0, num_elements), pieces)
    steps = []
    for i in range(pieces + lag):
        if i < pieces:
            steps.append(_hop(piece[i], rank, num_ranks, rank, 0, last))
        if i >= lag and rank < num_ranks - 1:
            steps.append(_hop(piece[i - lag], rank + num_ranks, num_ranks, rank, 0, last))
    return without_empty(steps)


def one_shot(num_ranks: int, num_elements: int, rank: int) -> Steps:
    """Ranks send their messages to all others.

        run(one_shot, [np.ones(8)] * 4).bytes_sent()  # [192, 192, 192, 192]: p-1 times 64 bytes

    Each folds them in rank order.
    """
    check(num_ranks, num_elements, rank)
    whole = Chunk(0, num_elements)
    peers = [(rank + i) % num_ranks for i in range(1, num_ranks)]
    return without_empty(
        [Step(sends=tuple(Send(whole, peer) for peer in peers)), Step((Receive(whole, tuple(range(num_ranks))),))]
    )


def two_shot(num_ranks: int, num_elements: int, rank: int) -> Steps:
    """Ranks send block i to rank i, which sends the result to all others.

        run(two_shot, [np.ones(8)] * 4).steps  # 2

    Rank i folds in rank order.
    """
    check(num_ranks, num_elements, rank)
    block = blocks(Chunk(0, num_elements), num_ranks)
    peers = [(rank + i) % num_ranks for i in range(1, num_ranks)]
    return without_empty(
        [
            Step(sends=tuple(Send(block[peer], peer) for peer in peers)),
            Step((Receive(block[rank], tuple(range(num_ranks))),), tuple(Send(block[rank], peer) for peer in peers)),
            Step(tuple(Receive(block[peer], (peer,)) for peer in peers)),
        ]
    )


def halving_doubling(num_ranks: int, num_elements: int, rank: int) -> Steps:
    """Recursive vector halving, then doubling: ever smaller halves with ever more distant partners.

        run(halving_doubling, [np.ones(8)] * 4).steps  # 4: 2 log2(p)

    With p' the largest power of two up to p, only p' ranks take part. Of the first 2(p-p') these are the odd ones,
    which fold in their left neighbour's message first, and send it the result.

    Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 19 (2005).
    """
    check(num_ranks, num_elements, rank)
    power = 1 << (num_ranks.bit_length() - 1)
    extra = num_ranks - power
    whole = Chunk(0, num_elements)
    if rank < 2 * extra and rank % 2 == 0:
        return without_empty([Step(sends=(Send(whole, rank + 1),)), Step((Receive(whole, (rank + 1,)),))])

    def rank_of(number: int) -> int:
        return 2 * number + 1 if number < extra else number + extra

    mine = rank // 2 if rank < 2 * extra else rank - extra
    steps = [Step((Receive(whole, (rank - 1, rank)),))] if mine < extra else []
    block = blocks(whole, power)
    begin, end, exchanges = 0, power, []
    for distance in (1 << i for i in range(power.bit_length() - 1)):
        middle = (begin + end) // 2
        halves = Chunk(block[begin].begin, block[middle - 1].end), Chunk(block[middle].begin, block[end - 1].end)
        upper = bool(mine & distance)
        exchanges.append((rank_of(mine ^ distance), halves[upper], halves[not upper]))
        begin, end = (middle, end) if upper else (begin, middle)
    for partner, kept, given in exchanges:
        steps += [Step(sends=(Send(given, partner),)), Step((Receive(kept, tuple(sorted((partner, rank)))),))]
    for partner, kept, given in reversed(exchanges):
        steps += [Step(sends=(Send(kept, partner),)), Step((Receive(given, (partner,)),))]
    if mine < extra:
        steps.append(Step(sends=(Send(whole, rank - 1),)))
    return without_empty(steps)


def _tree_steps(tree: Tree, pieces: Sequence[Chunk], rank: int) -> list[tuple[int, Step]]:
    """A rank's steps in one tree, up and down, each with its time if messages take one step."""
    node, height = tree[rank], max(node.depth for node in tree)
    above = () if node.parent is None else (node.parent,)
    timed = []
    for time, piece in enumerate(pieces):
        fold = (Receive(piece, tuple(sorted((*node.children, rank)))),) if node.children else ()
        timed.append((time + height - node.depth, Step(fold, tuple(Send(piece, parent) for parent in above))))
        copy = tuple(Receive(piece, (parent,)) for parent in above)
        timed.append((time + height + node.depth, Step(copy, tuple(Send(piece, child) for child in node.children))))
    return timed


def double_tree(num_ranks: int, num_elements: int, rank: int, *, pieces: int = 1) -> Steps:
    """Reduces and broadcasts half of the message over each of two binary trees, in `pieces`.

        run(double_tree, [np.ones(8)] * 4).bytes_sent()  # [64, 128, 128, 64]

    Inner nodes fold their children's values and their own in rank order (in the second tree of an odd number of ranks,
    in the ring's). Source: `double_binary_tree`.
    """
    check(num_ranks, num_elements, rank)
    halves = blocks(Chunk(0, num_elements), 2)
    timed = [
        timed_step
        for tree, half in zip(double_binary_tree(num_ranks), halves, strict=True)
        for timed_step in _tree_steps(tree, blocks(half, pieces), rank)
    ]
    return without_empty([step for _, step in sorted(timed, key=lambda pair: pair[0])])


def two_level(
    num_ranks: int, num_elements: int, rank: int, *, ranks_per_host: int = 8, between: Schedule = ring
) -> Steps:
    """A ring reduce-scatter per host, an all-reduce of each chunk between hosts, and a ring all-gather.

        run(functools.partial(two_level, ranks_per_host=2), [np.ones(8)] * 4).steps  # 4

    The i-th ranks of hosts all-reduce chunk i by `between`, all chunks at once.

    Raises:
      ValueError: if `ranks_per_host` does not divide the number of ranks.
    """
    check(num_ranks, num_elements, rank)
    if ranks_per_host < 1 or num_ranks % ranks_per_host:
        raise ValueError(f"{num_ranks} ranks do not fill hosts of {ranks_per_host}; give a divisor of {num_ranks}")
    host, local = divmod(rank, ranks_per_host)
    neighbours = range(host * ranks_per_host, (host + 1) * ranks_per_host)
    counterparts = range(local, num_ranks, ranks_per_host)
    chunk = blocks(Chunk(0, num_elements), ranks_per_host)[local]
    return [
        *relabel(reduce_scatter(ranks_per_host, num_elements, local), neighbours, 0),
        *relabel(between(len(counterparts), chunk.size, host), counterparts, chunk.begin),
        *relabel(all_gather(ranks_per_host, num_elements, local), neighbours, 0),
    ]


ALGORITHMS: dict[str, Schedule] = {
    "ring": ring,
    "rank_ordered_ring": rank_ordered_ring,
    "one_shot": one_shot,
    "two_shot": two_shot,
    "double_tree": double_tree,
    "halving_doubling": halving_doubling,
    "two_level": two_level,
}
