"""A launcher that is led, by another one or by itself: it agrees to what is proposed, and queues what it is to do."""

import asyncio
from collections.abc import Callable
from typing import Any

from jax_ring.launcher import events
from jax_ring.launcher.hosts.groups import Host, Register
from jax_ring.launcher.hosts.messages import Message, MessageError

Send = Callable[[Message], None]


class Follower:
    """The side of a launcher that is led.

    own: this host. to_leader: sends a message to the launcher that leads.

    Attributes:
      leads: whether this launcher leads, too.
      asks_where: set if the launcher that leads asks where this host's processes are.
    """

    def __init__(self, own: Host, register: Register, queue: asyncio.Queue[events.Event], to_leader: Send) -> None:
        self._own, self._register, self._queue, self._to_leader = own, register, queue, to_leader
        self._attempt = 0
        self.leads = False
        self.asks_where = asyncio.Event()

    def take(self, message: Message) -> None:
        """Takes a message of the launcher that leads. Raises MessageError if it is not about this host."""
        kind, value, attempt = message
        if attempt not in (0, self._attempt):
            return  # of a generation that has ended
        match kind:
            case "propose":
                self._register.learn(self._register.started, [value])
                self.tell("accepted", value.number)
            case "started":
                self._register.learn(value, [])
            case "start":
                group, coordinator, restarts, newest_commit = value
                plan = group.plan_of(self._own.id, coordinator)
                if not (set(plan.slots) <= set(self._own.slots) and coordinator.isprintable()):
                    raise MessageError(f"it starts {plan.slots!r:.100} at {coordinator!r:.100}, which is not here")
                self._register.learn(group, [])
                self._attempt = group.number
                self._queue.put_nowait(events.Begin(plan, restarts, newest_commit))
            case "end" | "pending" | "blamed" | "over":
                self._queue.put_nowait(value)
            case "where":
                self.asks_where.set()

    def tell(self, kind: str, value: Any) -> None:
        """Sends a message to the launcher that leads, of a kind that `messages` has for it."""
        self._to_leader(Message(kind, value, self._attempt))
