"""Environment variables of launched processes, and ports for coordinators."""

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping, Sequence

from jax_ring.launcher import protocol
from jax_ring.launcher.watching.page import VARIABLE


@contextlib.contextmanager
def reserved_port(host: str = "127.0.0.1") -> Iterator[int]:
    """A TCP port for a coordinator alone."""
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    with socket.socket(family) as holder:
        # The coordinator's socket sets this option too, so it can still bind a port that is bound here without
        # listening.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind((host, 0))
        yield holder.getsockname()[1]


def kept_files(slots: int) -> tuple[int, ...]:
    """Two files in memory for each slot, for the commits of an elastic job. They are gone when nobody has them open."""
    return tuple(os.memfd_create(protocol.KEPT_NAME) for _ in range(2 * slots))


def variables(
    member: protocol.Member,
    *,
    slot: int,
    devices: int | None,
    restart: int,
    number: int,
    socket_name: str,
    memory: str,
    kept: Sequence[int],
    page: int,
    watches: bool = False,
    hosts: Sequence[int] = (),
    joins: bool = False,
    outer: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """A process's whole environment.

    Args:
      member: its place in the generation that it starts in.
      slot: its place on this host, which decides its devices.
      devices: the number of its devices, or None.
      restart: how often the job has been started again.
      number: the launcher's number of the process.
      socket_name: of the launcher, for `protocol.Control`.
      memory: the prefix of names of shared memory.
      kept: the files that all processes inherit for their commits.
      page: the file in which it notes its steps.
      watches: whether executions are noted in a program that has no steps.
      hosts: the index of each host's first process, if hosts come and go.
      joins: whether it takes the place of another process of an elastic job.
      outer: the environment of the launcher.
    """
    result = dict(outer)
    for name in (protocol.JOIN_VARIABLE, protocol.WATCH_VARIABLE, protocol.HOSTS_VARIABLE):
        result.pop(name, None)
    result |= member.variables()
    result |= {
        protocol.CONTROL_VARIABLE: socket_name,
        protocol.PROCESS_VARIABLE: str(number),
        protocol.MEMORY_VARIABLE: memory,
        protocol.RESTART_VARIABLE: str(restart),
        protocol.KEPT_VARIABLE: ",".join(map(str, (slot, *kept))),
        VARIABLE: str(page),
    }
    if watches:
        result[protocol.WATCH_VARIABLE] = "1"
    if hosts:
        result[protocol.HOSTS_VARIABLE] = ",".join(map(str, hosts))
    if joins:
        result[protocol.JOIN_VARIABLE] = "1"
    if (ids := _device_ids(slot, devices, outer)) is not None:
        result["JAX_LOCAL_DEVICE_IDS"] = ids
    if devices is not None:
        result["JAX_NUM_CPU_DEVICES"] = str(devices)
    return result


def _device_ids(slot: int, devices: int | None, outer: Mapping[str, str]) -> str | None:
    """A process's GPUs, as indices; None for the user's choice."""
    given = outer.get("JAX_LOCAL_DEVICE_IDS")
    count = devices or 1
    own = range(slot * count, (slot + 1) * count)
    if given is not None and protocol.CONTROL_VARIABLE in outer:
        # This launcher runs in a process of another launcher, which has set the variable. Divide its GPUs again.
        inherited = given.split(",")
        if own.stop <= len(inherited):
            return ",".join(inherited[i] for i in own)
    elif given is not None and devices is None:
        return None
    return ",".join(map(str, own))
