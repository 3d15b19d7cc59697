"""The elements of a schedule: chunks of a message, and a rank's steps. A step receives, then sends."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple


class Chunk(NamedTuple):
    """Elements [begin, end) of a message."""

    begin: int
    end: int

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.end - self.begin

    def moved(self, offset: int) -> "Chunk":
        """As many elements, `offset` further on."""
        return Chunk(self.begin + offset, self.end + offset)


class Receive(NamedTuple):
    """Replaces a chunk by the fold of the values that `sources` have of it, in this order.

    The receiving rank among the sources stands for its own value. So `(left, rank)` folds the value from the left with
    its own, `(0, 1, 2, 3)` folds in rank order, and a single other source is a copy.

    Attributes:
      merges: for a fold along a tree, the number of partial sums on top of a stack that are added after each source;
        empty for a fold in sequence.
      offsets: how far each source's elements are from the chunk, for ranks that send several values for an element;
        empty if they are the chunk.
    """

    chunk: Chunk
    sources: tuple[int, ...]
    merges: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()

    def sent(self) -> list[tuple[int, Chunk]]:
        """The sources, each with the elements that it sends."""
        offsets = self.offsets or (0,) * len(self.sources)
        return [(source, self.chunk.moved(offset)) for source, offset in zip(self.sources, offsets, strict=True)]


class Send(NamedTuple):
    """Sends the current value of the chunk to a rank."""

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
    """`count` chunks of equal size. If `count` does not divide the size, the last ones are shorter, or empty."""
    size = -(-whole.size // count)
    bounds = [min(whole.begin + i * size, whole.end) for i in range(count + 1)]
    return tuple(Chunk(*pair) for pair in pairwise(bounds))


def check(num_ranks: int, num_elements: int, rank: int) -> None:
    """Raises ValueError if the rank is out of range, or the number of elements negative."""
    if num_ranks < 1 or not 0 <= rank < num_ranks:
        raise ValueError(f"there must be at least one rank, and 0 <= rank < ranks; got rank {rank} of {num_ranks}")
    if num_elements < 0:
        raise ValueError(f"a message has 0 elements or more, got {num_elements}")


def without_empty(steps: Steps) -> Steps:
    """The steps without empty messages. Both ends of such a message drop it."""
    kept = (
        Step(tuple(r for r in step.receives if r.chunk.size > 0), tuple(s for s in step.sends if s.chunk.size > 0))
        for step in steps
    )
    return [step for step in kept if step != Step()]


def relabel(steps: Steps, ranks: Sequence[int], begin: int) -> Steps:
    """The steps of a group within a larger one, where its rank i is `ranks[i]` and its message begins at `begin`."""

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
