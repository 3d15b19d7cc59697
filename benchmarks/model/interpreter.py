"""Runs schedules on numpy arrays: proves their orders, and counts steps and bytes."""

import functools
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from model.schedules import Chunk, Receive, Schedule, Send, Step


@dataclass
class Message:
    """A message from rank `source` to rank `to`.

    Attributes:
      chunk: its elements.
      folded: whether the receiver folds rather than copies.
      sent: its time step.
      values: of its elements.
    """

    source: int
    to: int
    chunk: Chunk
    folded: bool
    sent: int
    values: np.ndarray


@dataclass
class Run:
    """A schedule's outcome: each rank's result, and all messages."""

    outputs: list[np.ndarray]
    messages: list[Message] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """Time steps, if a message takes one and a link carries one at a time."""
        return max((message.sent + 1 for message in self.messages), default=0)

    def bytes_per_link(self) -> Counter[tuple[int, int]]:
        """By (source, destination)."""
        return self._count(lambda message: (message.source, message.to))

    def bytes_sent(self) -> list[int]:
        counted = self._count(lambda message: message.source)
        return [counted[rank] for rank in range(len(self.outputs))]

    def bytes_received(self) -> list[int]:
        counted = self._count(lambda message: message.to)
        return [counted[rank] for rank in range(len(self.outputs))]

    def _count(self, key: Callable) -> Counter:
        counter: Counter = Counter()
        for message in self.messages:
            counter[key(message)] += message.values.nbytes
        return counter


def run(schedule: Schedule, inputs: Sequence[np.ndarray], fold: Callable = np.add) -> Run:
    """All-reduces one-dimensional arrays, one per rank, by a schedule.

        letters = [np.array([letter] * 4, dtype=object) for letter in "abcd"]
        run(ring, letters).outputs[0]  # ['bcda', 'cdab', 'dabc', 'abcd']: the order of each block

    Args:
      schedule: of `schedules.ALGORITHMS`, or alike.
      inputs: operands, equal in shape and dtype.
      fold: combines two arrays. A fold that does not commute shows the order, such as concatenation.

    Raises:
      RuntimeError: if a rank waits for a message never sent, or one is not received.
    """
    p = len(inputs)
    ranks = _Ranks(Run([np.array(x) for x in inputs]), fold, [0] * p)
    steps = [deque(schedule(p, len(inputs[0]), rank)) for rank in range(p)]
    waiting = deque(range(p))
    blocked = 0  # consecutive ranks without progress
    while waiting and blocked < len(waiting):
        rank = waiting.popleft()
        before = len(steps[rank])
        while steps[rank] and ranks.can_take(rank, steps[rank][0]):
            ranks.take(rank, steps[rank].popleft())
        blocked = blocked + 1 if len(steps[rank]) == before > 0 else 0
        if steps[rank]:
            waiting.append(rank)
    unreceived = {link: len(messages) for link, messages in ranks.inbox.items() if messages}
    if waiting or unreceived:
        raise RuntimeError(
            f"ranks {sorted(waiting)} wait for messages that were not sent; never received: {unreceived}"
        )
    return ranks.result


@dataclass
class _Ranks:
    """The ranks, and what is on its way between them.

    Attributes:
      clock: the time step of each rank.
      free: the first free time step of each link.
      inbox: by link, messages that are not received yet.
    """

    result: Run
    fold: Callable
    clock: list[int]
    free: Counter[tuple[int, int]] = field(default_factory=Counter)
    inbox: dict[tuple[int, int], deque[Message]] = field(default_factory=dict)

    def can_take(self, rank: int, step: Step) -> bool:
        """Whether all that a step receives has been sent."""
        needed = Counter(source for item in step.receives for source in item.sources if source != rank)
        return all(len(self.inbox.get((source, rank), ())) >= count for source, count in needed.items())

    def take(self, rank: int, step: Step) -> None:
        for incoming in step.receives:
            self.receive(rank, incoming)
        for outgoing in step.sends:
            self.send(rank, outgoing)

    def send(self, rank: int, item: Send) -> None:
        link = rank, item.to
        sent = max(self.clock[rank], self.free[link])
        self.free[link] = sent + 1
        values = self.result.outputs[rank][slice(*item.chunk)].copy()
        message = Message(rank, item.to, item.chunk, False, sent, values)
        self.result.messages.append(message)
        self.inbox.setdefault(link, deque()).append(message)

    def receive(self, rank: int, item: Receive) -> None:
        own, values = self.result.outputs[rank][slice(*item.chunk)], []
        for source in item.sources:
            if source == rank:
                values.append(own)
                continue
            message = self.inbox[source, rank].popleft()
            if message.chunk != item.chunk:
                raise RuntimeError(f"rank {rank} expects {item.chunk} from {source}, which sent {message.chunk}")
            message.folded = len(item.sources) > 1
            self.clock[rank] = max(self.clock[rank], message.sent + 1)
            values.append(message.values)
        own[:] = functools.reduce(self.fold, values)
