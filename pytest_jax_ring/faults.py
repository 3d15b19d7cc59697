"""Faults on purpose: a rank that is killed, stopped or delayed at a named point of a test."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """What happens to a rank at a point, by `kill`, `stop` or `delay`.

        @pytest.mark.jax_processes(3, faults=[kill(1, at="step 2"), delay(2, 0.5, at="step 3")])

    Attributes:
      kind: "kill", "stop" or "delay".
      at: the point's name.
      seconds: of a delay.
    """

    kind: str
    rank: int
    at: str
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.kind} of rank {self.rank} at {self.at!r}"


def kill(rank: int, *, at: str) -> Fault:
    """The rank dies by SIGKILL at the point.

        @pytest.mark.jax_processes(3, faults=[kill(1, at="step 2")])

    Its own test neither passes nor fails.
    """
    return Fault("kill", rank, at)


def stop(rank: int, *, at: str) -> Fault:
    """The rank stops by SIGSTOP at the point, like a hanging process.

        @pytest.mark.jax_processes(3, faults=[stop(1, at="step 2")])

    It is killed when the others have ended.
    """
    return Fault("stop", rank, at)


def delay(rank: int, seconds: float, *, at: str) -> Fault:
    """The rank sleeps at the point.

        @pytest.mark.jax_processes(3, faults=[delay(1, 0.5, at="step 2")])

    Then it goes on.
    """
    return Fault("delay", rank, at, seconds)


# Of this rank, each with the function to call before it happens.
_still_to_come: list[tuple[Fault, Callable[[Fault], None]]] = []


def expect(faults: Sequence[Fault], note: Callable[[Fault], None]) -> None:
    """Makes faults happen to this process. note: called with each before it does, for the parent process."""
    _still_to_come.extend((fault, note) for fault in faults)


def fault_point(name: str) -> None:
    """Names a point, where a test's fault happens, once.

        for step in range(10):
            fault_point(f"step {step}")
            train_step()

    Args:
      name: as in `kill(rank, at=name)`, with the step in loops: `fault_point(f"step {step}")`.
    """
    for fault, note in [each for each in _still_to_come if each[0].at == name]:
        _still_to_come.remove((fault, note))
        note(fault)
        if fault.kind == "delay":
            time.sleep(fault.seconds)
        else:
            os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)


def check_faults(faults: object, num_processes: int) -> None:
    """Raises TypeError or ValueError unless these are faults that can all happen."""
    if not isinstance(faults, Sequence) or not all(isinstance(fault, Fault) for fault in faults):
        raise TypeError(f"faults must be a list of pytest_jax_ring.kill(...), stop(...) or delay(...), got {faults!r}")
    for fault in faults:
        if fault.kind not in ("kill", "stop", "delay") or not isinstance(fault.rank, int) or not fault.seconds >= 0:
            raise ValueError(f"a fault kills, stops or delays (by 0 s or more) a rank given by number, got {fault!r}")
        if not 0 <= fault.rank < num_processes:
            raise ValueError(f"{fault}, but the ranks are 0 to {num_processes - 1}")
    ended = [fault.rank for fault in faults if fault.kind != "delay"]
    if len(set(ended)) < len(ended):
        raise ValueError(f"a rank can be killed or stopped once, got {', '.join(map(str, faults))}")
