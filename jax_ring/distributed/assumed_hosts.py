"""`assume_hosts()`: which processes share a host, for devices that are only compiled for."""

import contextlib
from collections.abc import Iterator, Mapping

import jax

from jax_ring import _compat

# Pairs of process and host, or None. A user context is part of the keys of JAX's caches, so a program lowered with
# other hosts is never reused. JAX does not allow creating a context while other threads trace.
_assumed = jax.make_user_context(None)


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
    with _assumed(tuple(sorted(hosts.items()))):
        yield


def assumed() -> tuple | None:
    """What is assumed in this thread."""
    return _assumed.value


def assuming(hosts: tuple | None) -> contextlib.AbstractContextManager:
    """A context with another thread's assumption."""
    return _assumed(hosts)


def assumed_host_of(process: int) -> int | str:
    """The host of a process whose devices are not there; raises ValueError if `assume_hosts()` does not name it."""
    if (pairs := assumed()) is None:
        return process
    hosts = dict(pairs)
    if process not in hosts:
        raise ValueError(
            f"assume_hosts: the mesh has a device of process {process}, and the mapping names only the processes "
            f"{', '.join(map(str, hosts))}. Add process {process}."
        )
    return hosts[process]
