"""Which processes share a host, and what else they tell each other in the key-value store of `jax.distributed`."""

import itertools
import os
import pathlib
import secrets
import threading
from collections.abc import Iterable
from typing import NamedTuple

import jax

from jax_ring import _compat, runtime

HOST_VARIABLE = "JAX_RING_HOST_ID"


class _Member(NamedTuple):
    """What a process tells of itself: its host, and how many distributed runtimes it has been in before this one."""

    host: str
    num_runtimes: int

    def in_words(self) -> bytes:
        return f"{self.num_runtimes} {self.host}".encode()

    @classmethod
    def from_words(cls, words: bytes) -> "_Member":
        num_runtimes, host = words.decode().split(" ", 1)
        return cls(host, int(num_runtimes))


class _Meeting:
    """What this process shares with the others of one distributed runtime. To make one tells them; it waits for none.

    Attributes:
      client: of the runtime. It is kept, so that that of a later runtime is known to be another one.
      members: those that are known, by process.
    """

    def __init__(self, client) -> None:
        self.client = client
        process = _compat.distributed_process()
        self.members = {process: _Member(_own_host(), next(_runtimes))}
        publish, fetch = _compat.key_value_store(runtime.timeout())
        publish(_key(process), self.members[process].in_words())
        # Whoever comes first makes the token. It is a secret among the processes: what they share is named by it.
        token = _compat.publish_once("jax_ring/token", secrets.token_hex(16))
        runtime.join_processes(process, token, publish, fetch)


_runtimes = itertools.count()
_lock = threading.Lock()
_meeting: _Meeting | None = None


def meet() -> _Meeting | None:
    """Tells the other processes on which host this one is, once in each distributed runtime; None if there is none.

    To be called as soon as there may be one, since others may be waiting for the answer.
    """
    global _meeting
    with _lock:
        if not _compat.is_distributed():
            _meeting = None
        elif _meeting is None or _meeting.client is not _compat.distributed_client():
            _meeting = _Meeting(_compat.distributed_client())
        return _meeting


def _met() -> _Meeting:
    _compat.distributed_client()  # which says so if there is none
    meeting = meet()
    assert meeting is not None
    return meeting


def host_of(process: int) -> str:
    """What tells the host of a process from others, in the sense that processes of one host can share memory.

    It is what `JAX_RING_HOST_ID` says there. Otherwise it consists of the boot id of the kernel; of the file system
    that is mounted at /dev/shm, which containers of one machine may or may not have in common; and of the user, since
    segments are readable by their owner alone. Where the kernel has no boot id, each process is a host of its own.

    Raises:
      RuntimeError: if the process has not told within the deadline.
    """
    if jax.process_count() == 1:
        return ""
    return _member(process).host


def history_of(processes: Iterable[int]) -> str:
    """What tells this distributed runtime from earlier ones that some of the processes were in; "" in their first one.

    It is the same in all of them. XLA numbers the executions of a program from the first one in the life of a process,
    and goes by the program's text. Programs that contain this are numbered alike where a process was started later
    than others, or failed where they did not.
    """
    before = [_member(process).num_runtimes for process in sorted(set(processes))]
    return "@" + ",".join(map(str, before)) if any(before) else ""


def _member(process: int) -> _Member:
    members = _met().members
    if process not in members:
        _, fetch = _compat.key_value_store(runtime.timeout())
        try:
            members[process] = _Member.from_words(fetch(_key(process)))
        except jax.errors.JaxRuntimeError as error:
            raise RuntimeError(
                f"process {process} has not said within {runtime.timeout():g} s on which host it is. It does when it "
                "imports jax_ring after jax.distributed.initialize(), or else when it traces its first collective of "
                f"jax_ring: all processes must get there. {runtime.TIMEOUT_VARIABLE} is the time they have for it."
            ) from error
    return members[process]


def _key(process: int) -> str:
    return f"jax_ring/host/{process}"


def _own_host() -> str:
    if named := os.environ.get(HOST_VARIABLE):
        return named
    try:
        boot_id = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        shared_memory = os.stat("/dev/shm")
    except OSError:
        return secrets.token_hex(16)
    return f"{boot_id}/{shared_memory.st_dev}:{shared_memory.st_ino}/{os.geteuid()}"


# What is told now need not be waited for later.
meet()
