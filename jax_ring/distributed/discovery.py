"""What processes tell each other through the key-value store of `jax.distributed`: hosts, GPUs, and what they call."""

import collections
import contextlib
import functools
import itertools
import json
import os
import pathlib
import secrets
import socket
import threading
import time
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import jax

from jax_ring import _compat, runtime
from jax_ring.distributed import exit_notice, store
from jax_ring.launcher.schema import escaped, read

HOST_VARIABLE = "JAX_RING_HOST_ID"

T = TypeVar("T")  # what a process has published


class _Host(NamedTuple):
    """The host of a process, as it publishes it."""

    id: str  # equal where processes share memory
    memory: str  # identifies the process's shared memory; empty if unknown
    name: str  # for messages


class Identity(NamedTuple):
    """A GPU or MIG slice, as all processes of a host see it."""

    bus_id: str  # its PCI address, shared by slices
    uuid: str  # differs between slices

    def shares_gpu_with(self, other: "Identity") -> bool:
        return self.bus_id == other.bus_id or self.uuid == other.uuid


class Gpus(NamedTuple):
    """What a process tells of GPUs."""

    own: tuple[Identity, ...] = ()  # its JAX devices, by id
    # pairs of visible GPUs, the first without peer access to the second
    severed: tuple[tuple[Identity, Identity], ...] = ()
    why_not: str = ""  # why it can serve no GPUs, or ""


class _Membership:
    """This process in one distributed runtime; construction publishes its host, without blocking.

    What the others publish is here once it has come.
    """

    def __init__(self) -> None:
        self.process = _compat.distributed_process()
        self.store = store.current()
        self.hosts = {self.process: _Host(_own_host(), _own_memory(), socket.gethostname())}
        self.gpus: dict[int, Gpus] = {}
        # Of what the processes do alike, by name. A runtime begins anew, because its other processes may be new.
        self.counts: dict[str, itertools.count] = collections.defaultdict(itertools.count)
        self.store.put(_key("host", self.process), json.dumps(self.hosts[self.process]).encode())
        runtime.join_processes(self.process, *self.store.memory, self.store.put, self.store.get)
        exit_notice.join(self.store)

    def publish_gpus(self) -> Gpus:
        """Publishes this process's GPUs once, without blocking."""
        with _lock:
            if self.process not in self.gpus:
                gpus = gpus_here()
                self.store.put(_key("GPUs", self.process), json.dumps(gpus).encode())
                self.gpus[self.process] = gpus
            return self.gpus[self.process]


_lock = threading.Lock()
_joined = functools.lru_cache(maxsize=1)(lambda client: _Membership())  # each runtime has another client
_has_plugins = False  # whether JAX has loaded its plugins and may use GPUs


def _membership() -> _Membership:
    """Raises RuntimeError, with advice, if there is no runtime."""
    with _lock:
        return _joined(_compat.distributed_client())


def publish() -> None:
    """Publishes this process's host, for which others may wait, once per runtime.

    With GPU kernels and loaded plugins also its GPUs, which earlier might start CUDA before `CUDA_VISIBLE_DEVICES` is
    set.
    """
    if _compat.is_distributed():
        membership = _membership()
        if _has_plugins and runtime.cuda_kernels is not None:
            membership.publish_gpus()


def host_of(process: int) -> str:
    """The host id of a process; equal ids share memory.

    It is `JAX_RING_HOST_ID` of that process, if set. Otherwise it consists of the kernel's boot id, the file system at
    /dev/shm, which containers may or may not share, and the user, since only a segment's owner can read it. Without a
    boot id, each process is a host. Raises RuntimeError if the process publishes none within the deadline, or has this
    one's `JAX_RING_HOST_ID` but not its memory.
    """
    if jax.process_count() == 1:
        return ""
    membership = _membership()
    if process not in membership.hosts:
        advice = "A process does so when it has imported jax_ring and called jax.distributed.initialize()"
        membership.hosts[process] = _fetch("host", _Host, process, advice, runtime.timeout())
    host, own = membership.hosts[process], membership.hosts[membership.process]
    if host.id == own.id and own.memory and host.memory and own.memory != host.memory:
        raise RuntimeError(
            f"processes {membership.process} and {process} both have {HOST_VARIABLE}={host.id!r}, so they claim to "
            f"share a host, and they do not share memory: /dev/shm is {own.memory!r} in process {membership.process} "
            f"and {host.memory!r} in process {process} (boot id, device, inode and user). They run in different "
            f"containers, on different machines, or as different users. Give them different values of {HOST_VARIABLE}, "
            "or let the containers share /dev/shm (docker run --ipc, or one pod with a memory volume there)."
        )
    return host.id


def host_names(processes: Iterable[int]) -> dict[int, str]:
    """The names of the hosts of processes whose `host_of` is known."""
    hosts = _membership().hosts
    return {process: escaped(hosts[process].name) for process in processes}


def gpus_of(processes: Iterable[int]) -> dict[int, Gpus]:
    """The GPUs of each of these processes.

    It publishes its own and waits for the others, unless it can serve none: then no process will. Raises RuntimeError
    if a process does not publish its GPUs; one deadline holds for all.
    """
    if jax.process_count() == 1:
        return {process: gpus_here() for process in processes}
    membership = _membership()
    own = membership.publish_gpus()
    if own.why_not:
        return {membership.process: own}
    until = time.monotonic() + runtime.timeout()
    for process in processes:
        if process not in membership.gpus:
            advice = "A process does so when JAX has started its GPU backend and it has imported jax_ring"
            left = max(0.001, until - time.monotonic())
            membership.gpus[process] = _fetch("GPUs", Gpus, process, advice, left)
    return {process: membership.gpus[process] for process in processes}


def _key(what: str, process: int) -> str:
    return f"jax_ring/{what.lower()}/{process}"


def _fetch(what: str, kind: type[T], process: int, advice: str, timeout: float) -> T:
    """What a process has published. Raises RuntimeError if that does not come, or is something else."""
    try:
        data = store.current().get(_key(what, process), timeout)
    except jax.errors.JaxRuntimeError as error:
        raise RuntimeError(
            f"process {process} did not publish its {what} within {runtime.timeout():g} s. {advice}; every process "
            f"must get that far. {runtime.TIMEOUT_VARIABLE} sets the time limit."
        ) from error
    try:
        return read(data, kind)
    except ValueError as error:
        raise RuntimeError(f"process {process} has published something else than its {what}: {data!r:.200}") from error


def next_number(name: str) -> int:
    """How often this process has asked for a number of that name, by which the processes match what they do alike."""
    return next(_membership().counts[name])


def _own_host() -> str:
    return os.environ.get(HOST_VARIABLE) or _own_memory() or secrets.token_hex(16)


def _own_memory() -> str:
    try:
        boot_id = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        shared_memory = os.stat("/dev/shm")
    except OSError:
        return ""
    return f"{boot_id}/{shared_memory.st_dev}:{shared_memory.st_ino}/{os.geteuid()}"


def publish_with_plugins() -> None:
    """Publishes GPUs too, once JAX is about to use them."""
    global _has_plugins
    _has_plugins = True
    publish()


# ---- The GPUs of this process ----------------------------------------------------------------------------------------


def gpus_here() -> Gpus:
    """The GPUs of this process, without starting a JAX backend or a CUDA context."""
    return _gpus_of(runtime.cuda_kernels, _compat.visible_gpus())


@functools.lru_cache(maxsize=1)
def _gpus_of(kernels: types.ModuleType | None, visible: tuple[int, ...] | None) -> Gpus:
    if kernels is None:
        return Gpus(why_not=f"jax_ring was built without its CUDA kernels: {runtime.why_no_cuda}")
    try:
        seen = [Identity(*identity) for identity in kernels.identities()]
        severed = kernels.unreachable(list(range(len(seen))))
    except RuntimeError as error:
        return Gpus(why_not=f"the CUDA runtime cannot list the GPUs: {error}")
    # JAX numbers the devices of a process in the order of their CUDA ordinals.
    ordinals = range(len(seen)) if visible is None else sorted(i for i in visible if i < len(seen))
    return Gpus(tuple(seen[i] for i in ordinals), tuple((seen[a], seen[b]) for a, b in severed if a != b))


# ---- Hosts of devices that are only compiled for ---------------------------------------------------------------------


# Pairs of process and host, or None. A user context is part of the keys of JAX's caches, so a program lowered with
# other hosts is never reused. JAX does not allow creating a context while other threads trace.
assumed = jax.make_user_context(None)


@contextlib.contextmanager
def assume_hosts(hosts: Mapping[int, int | str]) -> Iterator[None]:
    """States which processes share a host, for devices of `jax.experimental.topologies`.

    Without it each of their processes counts as a host of its own; hosts of real devices are known.

        with jax_ring.assume_hosts({process: process // 8 for process in range(16)}):  # two hosts of 8 processes
            compiled = jax.jit(step).lower(params, batch).compile()

    It affects programs lowered in this thread within the block, and replaces an outer one.

    Args:
      hosts: a number or name for each process of the mesh; equal ones share a host.

    Raises:
      TypeError: if `hosts` is not a mapping from integers to integers or strings.
      ValueError: if it is empty, or a process is negative.
      RuntimeError: in a function that is being traced, and lowered later.
    """
    if not isinstance(hosts, Mapping):
        raise TypeError(f"assume_hosts: pass a mapping from process to host, as in {{0: 0, 1: 0}}; got {hosts!r}")
    for process, host in hosts.items():
        if type(process) is not int or type(host) not in (int, str):
            raise TypeError(f"assume_hosts: a process is an int, and a host an int or a str, got {process!r}: {host!r}")
        if process < 0:
            raise ValueError(f"assume_hosts: processes are numbered from 0, got {process}")
    if not hosts:
        raise ValueError("assume_hosts: the mapping names no process")
    if _compat.is_tracing():
        raise RuntimeError(
            "assume_hosts() was entered in a function that is being traced. It affects lowering, which happens after "
            "tracing: use it around lower() of the outermost jitted function."
        )
    with assumed(tuple(sorted(hosts.items()))):
        yield


def assumed_host_of(process: int) -> int | str:
    """The host of a process whose devices are not there; raises ValueError if `assume_hosts()` does not name it."""
    if (pairs := assumed.value) is None:
        return process
    hosts = dict(pairs)
    if process not in hosts:
        raise ValueError(
            f"assume_hosts: the mesh has a device of process {process}, and the mapping names only the processes "
            f"{', '.join(map(str, hosts))}. Add process {process}."
        )
    return hosts[process]


# ---- Whether processes agree -----------------------------------------------------------------------------------------


def check_agreement(function: str, description: str) -> None:
    """Checks that all processes describe their k-th call of this function alike.

    For a mesh of all devices of several processes, where each must trace the same calls in the same order. Elsewhere it
    does nothing. Raises ValueError if descriptions differ, or a process traces no k-th call within the deadline.
    """
    processes = range(jax.process_count())
    if len(processes) == 1 or jax.sharding.get_abstract_mesh().size != jax.device_count():
        return
    key = f"jax_ring/call/{next_number('jax_ring/call')}"
    compare(function, description, key, processes)


def compare(function: str, description: str, key: str, processes: Sequence[int]) -> None:
    """Raises ValueError unless these processes publish the same description under this key before the deadline."""
    for other, value in gather(function, description.encode(), key, processes):
        theirs = value.decode(errors="replace")
        if theirs != description:
            pairs = itertools.zip_longest(description.splitlines(), theirs.splitlines(), fillvalue="nothing")
            differences = [f"{a.strip()!r} here, {b.strip()!r} there" for a, b in pairs if a != b]
            raise ValueError(
                f"{function}: process {jax.process_index()} (here) and process {other} (there) were given different "
                f"data: {'; '.join(differences[:3])}. All processes must have the same parameters, dtypes and options."
            )


def gather(function: str, value: bytes, key: str, processes: Sequence[int]) -> Iterator[tuple[int, bytes]]:
    """Publishes a value, and yields (process, value) as they come; raises ValueError if one is late."""
    of_job, process = store.current(), jax.process_index()
    of_job.put(f"{key}/{process}", value)
    for other in processes:
        try:
            theirs = of_job.get(f"{key}/{other}")
        except jax.errors.JaxRuntimeError as error:
            raise ValueError(
                f"{function}: process {other} did not reach this call within {runtime.timeout():g} s; process "
                f"{process} did. All processes must make the same calls in the same order. "
                f"{runtime.TIMEOUT_VARIABLE} sets the time limit."
            ) from error
        yield other, theirs
