"""Which processes share a host, and what else they tell each other in the key-value store of `jax.distributed`."""

import collections
import itertools
import os
import pathlib
import secrets
import threading

import jax

from jax_ring import _compat, runtime

HOST_VARIABLE = "JAX_RING_HOST_ID"


class _Meeting:
    """What this process shares with the others of one distributed runtime. To make one tells them; it waits for none.

    Attributes:
      client: of the runtime. It is kept, so that that of a later runtime is known to be another one.
      hosts: those that are known, by process.
      lowerings: how many modules of each name have been lowered. Counted anew in each runtime, because other processes
        of a later one may have been started for it.
    """

    def __init__(self, client) -> None:
        self.client = client
        process = _compat.distributed_process()
        self.hosts = {process: _own_host()}
        self.lowerings: dict[str, itertools.count] = collections.defaultdict(itertools.count)
        publish, fetch = _compat.key_value_store(runtime.timeout())
        publish(_key(process), self.hosts[process].encode())
        # Whoever comes first makes the token. It is a secret among the processes: what they share is named by it.
        token = _compat.publish_once("jax_ring/token", secrets.token_hex(16))
        runtime.join_processes(process, token, publish, fetch)


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
    hosts = _met().hosts
    if process not in hosts:
        _, fetch = _compat.key_value_store(runtime.timeout())
        try:
            hosts[process] = fetch(_key(process)).decode()
        except jax.errors.JaxRuntimeError as error:
            raise RuntimeError(
                f"process {process} has not said within {runtime.timeout():g} s on which host it is. It does when it "
                "imports jax_ring after jax.distributed.initialize(), or else when it traces its first collective of "
                f"jax_ring: all processes must get there. {runtime.TIMEOUT_VARIABLE} is the time they have for it."
            ) from error
    return hosts[process]


def next_lowering(module: str) -> int:
    """How many modules of that name this process has lowered before, for programs of several processes."""
    return next(_met().lowerings[module])


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
