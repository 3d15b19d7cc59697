"""What a host starts: its part of a generation, the variables of its processes, and addresses for coordinators."""

import asyncio
import contextlib
import fcntl
import ipaddress
import os
import socket
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from jax_ring.launcher import protocol
from jax_ring.launcher.arguments import Options
from jax_ring.launcher.coordinator.server import is_found_at_a_socket, without_proxy

_SEALABLE = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING


def joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@contextlib.contextmanager
def reserved_address(host: str = "127.0.0.1") -> Iterator[str]:
    """host:port for a coordinator alone."""
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    with socket.socket(family) as holder:
        # The coordinator's socket sets this option too, so it can still bind a port that is bound here without
        # listening.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind((host, 0))
        yield joined(host, holder.getsockname()[1])


@contextlib.contextmanager
def coordinator_address(host: str, path: str) -> Iterator[str]:
    """The address of a coordinator alone: at a host that others reach; else a Unix socket, if possible."""
    if host or not is_found_at_a_socket():
        with reserved_address(host or "127.0.0.1") as address:
            yield address
    else:
        yield f"unix:{path}"


def why_unreachable(server: asyncio.Server, host: str) -> str | None:
    """Why other hosts do not reach a server that listens at a name of this host, if so.

    Debian has 127.0.1.1 for a host's own name.
    """
    addresses = [each.getsockname()[0] for each in server.sockets]
    if host == "localhost" or not all(ipaddress.ip_address(each).is_loopback for each in addresses):
        return None
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host)
        return None
    return f"listens at {addresses[0]}, which {host} is on this host: others cannot reach it. See /etc/hosts"


def kept_files(slots: int) -> tuple[int, ...]:
    """Two files in memory for each slot, for the commits of an elastic job. They are gone when nobody has them open.

    They never shrink: what a process has in memory of them stays there, whatever others do.
    """
    files = tuple(os.memfd_create(protocol.KEPT_NAME, _SEALABLE) for _ in range(2 * slots))
    for file in files:
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    return files


def key_file(key: bytes) -> int:
    """A file in memory with a key, which nobody can change: processes inherit it, and no other user reads it."""
    file = os.memfd_create(protocol.KEY_NAME, _SEALABLE)
    os.write(file, key)
    fcntl.fcntl(
        file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    )
    return file


class Plan(NamedTuple):
    """This host's part of a generation."""

    job: str  # random, known to the launchers of all hosts
    number: int  # of the generation, from 0
    slots: tuple[int, ...]  # the places used on this host, which decide the devices
    first: int  # index of this host's first process
    num_processes: int  # of all hosts
    coordinator: str  # host:port of the coordination service, or unix:/path
    hosts: tuple[int, ...] = (0,)  # the index of each host's first process


def variables(
    options: Options, plan: Plan, own: Mapping[str, str], *, slot: int, rank: int, outer: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """A process's whole environment.

    own: variables for this process alone. outer: the environment of the launcher.
    """
    result = {name: value for name, value in outer.items() if name != protocol.WATCH_VARIABLE}
    result |= {
        "JAX_COORDINATOR_ADDRESS": plan.coordinator,
        "JAX_NUM_PROCESSES": str(plan.num_processes),
        "JAX_PROCESS_ID": str(rank),
        protocol.GENERATION_VARIABLE: str(plan.number),
        protocol.RESTART_VARIABLE: str(plan.number),
        protocol.HOSTS_VARIABLE: ",".join(map(str, plan.hosts)),
        **without_proxy(plan.coordinator, outer),
        **own,
    }
    if options.watch is not None:
        result[protocol.WATCH_VARIABLE] = "1"
    if (ids := _device_ids(slot, options.devices, outer)) is not None:
        result["JAX_LOCAL_DEVICE_IDS"] = ids
    if options.devices is not None:
        result["JAX_NUM_CPU_DEVICES"] = str(options.devices)
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
