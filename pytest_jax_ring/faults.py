"""Faults on purpose: a rank that is killed, stopped or delayed at a named point of a test."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """What happens to a rank at a point. Made by `kill`, `stop` and `delay`.

    Attributes:
      kind: "kill", "stop" or "delay".
      rank: the rank to which it happens.
      at: the name of the point.
      seconds: of a delay.
    """

    kind: str
    rank: int
    at: str
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.kind} of rank {self.rank} at {self.at!r}"


def kill(rank: int, *, at: str) -> Fault:
    """The rank dies by SIGKILL at the point. Its own test is then neither passed nor failed."""
    return Fault("kill", rank, at)


def stop(rank: int, *, at: str) -> Fault:
    """The rank stops by SIGSTOP at the point, like a process that hangs, until the other ranks have ended."""
    return Fault("stop", rank, at)


def delay(rank: int, seconds: float, *, at: str) -> Fault:
    """The rank sleeps at the point."""
    return Fault("delay", rank, at, seconds)


class Points:
    """The faults of this rank that are still to come.

    Args:
      rank: this process's rank.
      faults: those of the test, of all ranks.
      note: is called with a fault before it happens, so that the parent process knows of it.
    """

    def __init__(self, rank: int, faults: Sequence[Fault], note: Callable[[Fault], None]) -> None:
        self._left = [fault for fault in faults if fault.rank == rank]
        self._note = note

    def reach(self, name: str) -> None:
        for fault in [fault for fault in self._left if fault.at == name]:
            self._left.remove(fault)
            self._note(fault)
            if fault.kind == "delay":
                time.sleep(fault.seconds)
            else:
                os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)


_points: Points | None = None


def set_points(points: Points | None) -> None:
    """The points of the test that begins, or None after it."""
    global _points
    _points = points


def fault_point(name: str) -> None:
    """Names a point of the program. A fault that a test has put there happens, once; otherwise nothing does.

    Args:
      name: as in `kill(rank, at=name)`. In a loop it can contain the step: `fault_point(f"step {step}")`.
    """
    if _points is not None:
        _points.reach(name)


def check_faults(faults: object, num_processes: int) -> Sequence[Fault]:
    """The faults of a mark.

    Raises:
      TypeError: if they are not a sequence of `Fault`.
      ValueError: if there is no such rank, or if two of them are to end the same one.
    """
    if not isinstance(faults, Sequence) or not all(isinstance(fault, Fault) for fault in faults):
        raise TypeError(f"faults must be a list of pytest_jax_ring.kill(...), stop(...) or delay(...), got {faults!r}")
    for fault in faults:
        if not 0 <= fault.rank < num_processes:
            raise ValueError(f"{fault}, but the ranks are 0 to {num_processes - 1}")
    ended = [fault.rank for fault in faults if fault.kind != "delay"]
    if len(set(ended)) < len(ended):
        raise ValueError(f"a rank can be killed or stopped once, got {', '.join(map(str, faults))}")
    return faults
