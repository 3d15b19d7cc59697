"""Finds out which processes share a host, through the key-value store of `jax.distributed`."""

import collections
import itertools
import os
import pathlib
import secrets
import threading

import jax

from jax_ring import _compat, runtime

HOST_VARIABLE = "JAX_RING_HOST_ID"


class _Membership:
    """This process as a member of one distributed runtime. Construction publishes its host and does not block.

    Attributes:
      client: the client of the runtime, kept to recognise a later runtime by its other client.
      hosts: the known host ids, by process.
      lowerings: counters of the modules lowered so far, by module name. They restart with each runtime, because the
        other processes of a later runtime may have just been started.
    """

    def __init__(self, client) -> None:
        self.client = client
        process = _compat.distributed_process()
        self.hosts = {process: _own_host()}
        self.lowerings: dict[str, itertools.count] = collections.defaultdict(itertools.count)
        put, get = _compat.key_value_store(runtime.timeout())
        put(_key(process), self.hosts[process].encode())
        # The first process to publish a token wins. Shared resources are named by it, so other programs must not
        # be able to guess it.
        token = _compat.publish_once("jax_ring/token", secrets.token_hex(16))
        runtime.join_processes(process, token, put, get)


_lock = threading.Lock()
_membership: _Membership | None = None


def publish() -> _Membership | None:
    """Publishes the host of this process, once per distributed runtime; returns None if there is no runtime.

    Call it as soon as `jax.distributed` may be initialized, since other processes may be waiting for the host.
    """
    global _membership
    with _lock:
        if not _compat.is_distributed():
            _membership = None
        elif _membership is None or _membership.client is not _compat.distributed_client():
            _membership = _Membership(_compat.distributed_client())
        return _membership


def _current_membership() -> _Membership:
    _compat.distributed_client()  # raises an error with advice if there is no runtime
    membership = publish()
    assert membership is not None
    return membership


def host_of(process: int) -> str:
    """The host id of a process. Processes with equal ids can share memory.

    The id is the value of `JAX_RING_HOST_ID` in that process, if set. Otherwise it is made of the boot id of the
    kernel; the file system mounted at /dev/shm, which containers of one machine may or may not share; and the user,
    since only the owner can read a segment. Without a boot id, each process is a host of its own.

    Raises:
      RuntimeError: if the process does not publish its host within the deadline.
    """
    if jax.process_count() == 1:
        return ""
    hosts = _current_membership().hosts
    if process not in hosts:
        _, get = _compat.key_value_store(runtime.timeout())
        try:
            hosts[process] = get(_key(process)).decode()
        except jax.errors.JaxRuntimeError as error:
            raise RuntimeError(
                f"process {process} did not publish its host within {runtime.timeout():g} s. A process does so when it "
                "imports jax_ring after jax.distributed.initialize(), or else when it traces its first jax_ring "
                f"collective; every process must get that far. {runtime.TIMEOUT_VARIABLE} sets the time limit."
            ) from error
    return hosts[process]


def next_lowering(module: str) -> int:
    """The number of modules of that name that this process has lowered before, in programs of several processes."""
    return next(_current_membership().lowerings[module])


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


# At import, so that other processes rarely have to wait for this one.
publish()
