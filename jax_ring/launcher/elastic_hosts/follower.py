"""The side of a launcher that another one leads."""

import asyncio
import signal
from typing import Any

from jax_ring.launcher import events
from jax_ring.launcher.elastic_hosts.groups import Evidence, Group, Register
from jax_ring.launcher.multi_host.links import Led, Link


class Follower(Led):
    """Agrees to what the leader proposes, and queues what it wants of the processes."""

    def __init__(
        self,
        link: Link,
        address: str,
        own_id: str,
        leader_id: str,
        register: Register,
        evidence: Evidence,
        queue: asyncio.Queue[events.Event],
    ) -> None:
        super().__init__(address, queue)
        self._link, self._leader_id, self._register = link, leader_id, register
        self._own_id, self._evidence = own_id, evidence
        self._receiving = asyncio.create_task(self._receive())

    def tell_gone(self, gone: list[str]) -> None:
        self._link.send({"gone": gone})

    async def _receive(self) -> None:
        while (message := await self._link.receive()) is not None:
            if "propose" in message:
                group = Group.of_message(message["propose"])
                self._register.learn(self._register.started, [group])
                self._link.send({"accepted": group.number})
            elif "started" in message:
                self._register.learn(Group.of_message(message["started"]), [])
            elif "start" in message:
                self._start(message["start"])
            elif self._take(message):
                return
        self.is_lost = True
        self._link.abort()
        self._evidence.lost(self._leader_id, self._link.heard, self._link.acknowledged)
        how = "is silent" if self._link.is_silent else "has ended, or cannot be reached"
        reason = f"the launcher that leads, at {self._leader}, {how}"
        self._queue.put_nowait(events.RemoteStop(signal.SIGTERM, 0.0, reason))

    def _start(self, start: dict[str, Any]) -> None:
        group = Group.of_message(start["group"])
        self._register.learn(group, [])
        self._attempt = group.number
        plan = group.plan_of(self._own_id, start["coordinator"])
        self._queue.put_nowait(events.RemoteBegin(plan, start["restarts"]))

    def tell(self, what: str, value: Any) -> None:
        if what == "enlisted":
            self._register.enlisted = value  # for the leader after this one
        super().tell(what, value)
