"""What a schedule is made of: chunks of a message, and a rank's steps, each of which receives and then sends."""

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
        """Elements."""
        return self.end - self.begin


class Receive(NamedTuple):
    """Makes a chunk the fold of what `sources` have of it, from the first to the last.

    A rank's own number among its sources stands for the value that it has. So `(left, me)` folds what comes from the
    left with one's own, `(0, 1, 2, 3)` is a fold in the order of the ranks, and one source alone is a copy.
    """

    chunk: Chunk
    sources: tuple[int, ...]


class Send(NamedTuple):
    """Sends the chunk, as it is by then, to a rank."""

    chunk: Chunk
    to: int


class Step(NamedTuple):
    """Receives, all at once, and then sends, all at once."""

    receives: tuple[Receive, ...] = ()
    sends: tuple[Send, ...] = ()


Steps = list[Step]
Schedule = Callable[[int, int, int], Steps]  # (ranks, elements, rank) -> the rank's steps


@lru_cache(1024)  # all ranks ask for the same ones
def blocks(whole: Chunk, count: int) -> tuple[Chunk, ...]:
    """`count` chunks of equal size, of which the last ones are shorter, or empty, where that does not come out."""
    size = -(-whole.size // count)
    bounds = [min(whole.begin + i * size, whole.end) for i in range(count + 1)]
    return tuple(Chunk(*pair) for pair in pairwise(bounds))


def check(num_ranks: int, num_elements: int, rank: int) -> None:
    """Raises ValueError if there is no such rank, or no such message."""
    if num_ranks < 1 or not 0 <= rank < num_ranks:
        raise ValueError(f"there must be at least one rank, and 0 <= rank < ranks; got rank {rank} of {num_ranks}")
    if num_elements < 0:
        raise ValueError(f"a message has 0 elements or more, got {num_elements}")


def without_empty(steps: Steps) -> Steps:
    """The steps without the messages that carry nothing; both ends of such a message leave it out."""
    kept = (
        Step(tuple(r for r in step.receives if r.chunk.size > 0), tuple(s for s in step.sends if s.chunk.size > 0))
        for step in steps
    )
    return [step for step in kept if step != Step()]


def relabel(steps: Steps, ranks: Sequence[int], begin: int) -> Steps:
    """A group's steps in a larger one, where its rank i is `ranks[i]` and its message begins at `begin`."""

    def moved(chunk: Chunk) -> Chunk:
        return Chunk(chunk.begin + begin, chunk.end + begin)

    return [
        Step(
            tuple(Receive(moved(r.chunk), tuple(ranks[source] for source in r.sources)) for r in step.receives),
            tuple(Send(moved(s.chunk), ranks[s.to]) for s in step.sends),
        )
        for step in steps
    ]
