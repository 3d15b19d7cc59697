"""A launcher that is led: it agrees to what is proposed, and does with its processes what it is told."""

import asyncio
import dataclasses
from typing import Any

from jax_ring.launcher import events
from jax_ring.launcher.events import Failure
from jax_ring.launcher.hosts.groups import Evidence, Group, Register
from jax_ring.launcher.hosts.links import Link
from jax_ring.launcher.shared import Role


class Follower(Role):
    """The side of a launcher that another one leads.

    leader: the other one in messages, after "the launcher". leader_id: its id. own_id: this host's.
    """

    leads = False

    def __init__(
        self,
        link: Link,
        leader: str,
        own_id: str,
        leader_id: str,
        register: Register,
        evidence: Evidence,
        queue: asyncio.Queue[events.Event],
    ) -> None:
        super().__init__()
        self._link, self._leader, self._leader_id, self._register = link, leader, leader_id, register
        self._own_id, self._evidence, self._queue = own_id, evidence, queue
        self._attempt = -1
        self.is_lost = False  # whether the launcher that leads is gone
        self.asks_where = asyncio.Event()
        self._receiving = asyncio.create_task(self._receive())

    async def close(self) -> None:
        self._receiving.cancel()
        await self._link.close()

    def tell_gone(self, gone: list[str]) -> None:
        self._link.send({"gone": gone})

    async def _receive(self) -> None:
        while (message := await self._link.receive()) is not None:
            if self._take(message):
                return
        self.is_lost = True
        self._link.abort()
        self._evidence.lost(self._leader_id, self._link.heard, self._link.acknowledged)
        how = "is silent" if self._link.is_silent else "has ended, or cannot be reached"
        self._queue.put_nowait(events.LeaderLost(f"the launcher {self._leader} {how}"))

    def _take(self, message: dict[str, Any]) -> bool:
        """Takes a message; returns whether it is the last one."""
        if "propose" in message:
            group = Group.of_message(message["propose"])
            self._register.learn(self._register.started, [group])
            self._link.send({"accepted": group.number})
        elif "started" in message:
            self._register.learn(Group.of_message(message["started"]), [])
        elif "start" in message:
            self._start(message["start"])
        elif "end" in message:
            self._queue.put_nowait(events.JobEnded(*message["end"]))
        elif message.get("attempt") == self._attempt:
            if "stop" in message:
                self._queue.put_nowait(events.End(*message["stop"]))
            elif "pending" in message:
                self._queue.put_nowait(events.ChangePending(message["pending"]))
            elif "where" in message:
                self.asks_where.set()
            elif "stuck" in message:
                blamed, waiting = message["stuck"]
                self._queue.put_nowait(events.Stuck(dict(blamed), tuple(waiting)))
        return "end" in message

    def _start(self, start: dict[str, Any]) -> None:
        group = Group.of_message(start["group"])
        self._register.learn(group, [])
        self._attempt = group.number
        plan = group.plan_of(self._own_id, start["coordinator"])
        self._queue.put_nowait(events.Begin(plan, start["restarts"]))

    # ---- Called by the generation ------------------------------------------------------------------------------------

    def _send(self, message: dict[str, Any], index: int | None) -> None:
        """Nothing: only a launcher that leads asks others."""

    def succeeded(self) -> bool:
        return False

    def tell_failure(self, failure: Failure) -> bool:
        self.tell("failed", dataclasses.asdict(failure))
        return not self.is_lost

    def tell_stop(self, signum: int, grace: float, reason: str) -> None:
        """Nothing: the launcher that leads hears of the failure, and that processes have ended."""

    def tell(self, what: str, value: Any) -> None:
        self._link.send({what: value, "attempt": self._attempt})
