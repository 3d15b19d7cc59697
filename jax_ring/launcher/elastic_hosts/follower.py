"""The side of a launcher that another one leads."""

import asyncio
import dataclasses
import signal
from typing import Any

from jax_ring.launcher import events
from jax_ring.launcher.elastic_hosts.evidence import Evidence
from jax_ring.launcher.elastic_hosts.groups import Group, Register
from jax_ring.launcher.failures import Failure
from jax_ring.launcher.multi_host.links import Link
from jax_ring.launcher.shared import Remote


class Follower(Remote):
    """Agrees to what the leader proposes, and queues what it wants of the processes.

    Attributes:
      is_lost: whether the leader is gone.
      address: that of the leader.
    """

    def __init__(
        self, link: Link, address: str, own_id: str, leader_id: str, register: Register, evidence: Evidence,
        queue: asyncio.Queue[events.Event],
    ) -> None:  # fmt: skip
        self._link, self._leader, self._register, self._queue = link, leader_id, register, queue
        self._own_id, self._evidence = own_id, evidence
        self.is_lost, self.address = False, address
        self._number = self._index = -1
        self._has_told_success = False
        self._receiving = asyncio.create_task(self._receive())

    async def close(self) -> None:
        self._receiving.cancel()
        await self._link.close()

    def tell_gone(self, gone: list[str]) -> None:
        self._link.send({"gone": gone})

    def tell_stopped(self, why: Failure | None) -> None:
        """Tells the leader that this host's processes have ended."""
        self._tell("stopped", str(why))

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
            elif "stop" in message:
                number, signum, grace, reason = message["stop"]
                if number == self._number:
                    self._queue.put_nowait(events.RemoteStop(signum, grace, reason))
            elif message.get("pending") == self._number:
                self._queue.put_nowait(events.RemotePending())
            elif "end" in message:
                self._queue.put_nowait(events.RemoteEnd(*message["end"]))
                return
            elif "error" in message:
                reason = f"{self.address} has refused this host: {message['error']}"
                self._queue.put_nowait(events.RemoteEnd(2, reason))
                return
        self.is_lost = True
        self._link.abort()
        self._evidence.lost(self._leader, self._link.heard, self._link.acknowledged)
        how = "is silent" if self._link.is_silent else "has ended, or cannot be reached"
        reason = f"the launcher that leads, at {self.address}, {how}"
        self._queue.put_nowait(events.RemoteStop(signal.SIGTERM, 0.0, reason))

    def _start(self, start: dict[str, Any]) -> None:
        group = Group.of_message(start["group"])
        self._register.learn(group, [])
        self._number, self._has_told_success = group.number, False
        own = self._index = group.ids.index(self._own_id)
        firsts, total = [], 0
        for host in group.hosts:
            firsts.append(total)
            total += host.processes
        begin = events.RemoteBegin(
            group.number - 1, group.hosts[own].processes, own, tuple(firsts), total, start["coordinator"],
            start["restarts"],
        )  # fmt: skip
        self._queue.put_nowait(begin)

    # Called by the attempt:

    def tell_failure(self, failure: Failure) -> bool:
        renamed = dataclasses.replace(failure, name=f"{failure.name} of host {self._index}")
        self._tell("failed", dataclasses.asdict(renamed))
        return not self.is_lost

    def tell_success(self) -> None:
        if not self._has_told_success:
            self._has_told_success = True
            self._tell("succeeded", True)

    def tell_left(self, is_all: bool, reason: str) -> None:
        self._tell("left", [is_all, reason])

    def tell_enlisted(self, min_processes: int, multiple_of: int | None) -> None:
        self._tell("enlisted", [min_processes, multiple_of])

    def _tell(self, what: str, value: Any) -> None:
        self._link.send({what: value, "number": self._number})
