"""A schedule's elements: chunks, and a rank's steps, which receive, then send."""

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
