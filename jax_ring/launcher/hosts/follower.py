"""A launcher that is led, by another one or by itself: it agrees to what is proposed, and queues what it is to do."""

import asyncio
from collections.abc import Callable
from typing import Any

from jax_ring.launcher import events
from jax_ring.launcher.hosts.groups import Evidence, Group, Register
from jax_ring.launcher.hosts.links import Link

Send = Callable[[dict[str, Any]], None]


class Follower:
    """The side of a launcher that is led.

    own_id: of this host. to_leader: sends a message to the launcher that leads.

    Attributes:
      leads: whether this launcher leads, too.
      asks_where: set if the launcher that leads asks where this host's processes are.
      is_lost: whether that launcher is gone.
    """

    def __init__(self, own_id: str, register: Register, queue: asyncio.Queue[events.Event], to_leader: Send) -> None:
        self._own_id, self._register, self._queue, self._to_leader = own_id, register, queue, to_leader
        self._attempt = -1
        self.leads = self.is_lost = False
        self.asks_where = asyncio.Event()

    async def receive(self, link: Link, leader: str, leader_id: str, evidence: Evidence) -> None:
        """Takes the messages of another launcher, until the connection ends.

        leader: what it is called, after "the launcher". leader_id: its id.
        """
        while (message := await link.receive()) is not None:
            self.take(message)
        self.is_lost = True
        link.abort()
        evidence.lost(leader_id, link.heard, link.acknowledged)
        how = "is silent" if link.is_silent else "has ended, or cannot be reached"
        self._queue.put_nowait(events.LeaderLost(f"the launcher {leader} {how}"))

    def take(self, message: dict[str, Any]) -> None:
        """Takes a message of the launcher that leads."""
        if "propose" in message:
            group = Group.of_message(message["propose"])
            self._register.learn(self._register.started, [group])
            self._to_leader({"accepted": group.number})
        elif "started" in message:
            self._register.learn(Group.of_message(message["started"]), [])
        elif "start" in message:
            group = Group.of_message(message["start"]["group"])
            self._register.learn(group, [])
            self._attempt = group.number
            plan = group.plan_of(self._own_id, message["start"]["coordinator"])
            self._queue.put_nowait(events.Begin(plan, message["start"]["restarts"]))
        elif "over" in message:
            self._queue.put_nowait(events.JobEnded(*message["over"]))
        elif message.get("attempt") == self._attempt:
            if "end" in message:
                self._queue.put_nowait(events.End(*message["end"]))
            elif "pending" in message:
                self._queue.put_nowait(events.ChangePending(message["pending"]))
            elif "blamed" in message:
                self._queue.put_nowait(events.Blamed(message["blamed"]))
            elif "where" in message:
                self.asks_where.set()

    def tell(self, what: str, value: Any) -> None:
        """Tells the launcher that leads of this host's processes in the generation.

        what: "failed" with a `Failure`, and whether the process has ended or is to; "exited" with the rank and the name
          of one that has with status 0; "initializes" with a rank; "left" with a rank and why; "enlisted" with the
          `Needs` of an elastic job; "progress" and "place" with what `reader` tells; "signalled" with how this launcher
          ends its processes; "ended" once none runs.
        """
        self._to_leader({what: value, "attempt": self._attempt})

    def tell_gone(self, gone: list[str]) -> None:
        """Tells which hosts can no longer start a group of their own."""
        self._to_leader({"gone": gone})
