"""Checks that all processes make the same calls, by comparing descriptions in the key-value store."""

import itertools
from collections.abc import Iterator, Sequence

import jax

from jax_ring import _compat, runtime
from jax_ring.distributed import discovery


def check_agreement(function: str, description: str) -> None:
    """Checks that all processes describe their k-th call of this function alike.

    For a mesh of all devices of several processes, where each must trace the same calls in the same order. Elsewhere it
    does nothing. Raises ValueError if descriptions differ, or a process traces no k-th call within the deadline.
    """
    processes = range(jax.process_count())
    if len(processes) == 1 or jax.sharding.get_abstract_mesh().size != jax.device_count():
        return
    key = f"jax_ring/call/{discovery.next_number('jax_ring/call')}"
    compare(function, description, key, processes)


def compare(function: str, description: str, key: str, processes: Sequence[int]) -> None:
    """Raises ValueError unless these processes publish the same description under this key before the deadline."""
    for other, value in gather(function, description.encode(), key, processes):
        theirs = value.decode()
        if theirs != description:
            pairs = itertools.zip_longest(description.splitlines(), theirs.splitlines(), fillvalue="nothing")
            differences = [f"{a.strip()!r} here, {b.strip()!r} there" for a, b in pairs if a != b]
            raise ValueError(
                f"{function}: process {jax.process_index()} (here) and process {other} (there) were given different "
                f"data: {'; '.join(differences[:3])}. All processes must have the same parameters, dtypes and options."
            )


def gather(function: str, value: bytes, key: str, processes: Sequence[int]) -> Iterator[tuple[int, bytes]]:
    """Publishes a value, and yields (process, value) as they come; raises ValueError if one is late."""
    publish, fetch = _compat.key_value_store(runtime.timeout())
    process = jax.process_index()
    publish(f"{key}/{process}", value)
    for other in processes:
        try:
            theirs = fetch(f"{key}/{other}")
        except Exception as error:
            raise ValueError(
                f"{function}: process {other} did not reach this call within {runtime.timeout():g} s; process "
                f"{process} did. All processes must make the same calls in the same order. "
                f"{runtime.TIMEOUT_VARIABLE} sets the time limit."
            ) from error
        yield other, theirs
