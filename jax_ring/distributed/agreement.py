"""Checks that all processes make the same calls, by comparing descriptions in the key-value store."""

import itertools
from collections.abc import Callable, Iterator, Sequence

import jax

from jax_ring import _compat, runtime
from jax_ring.distributed import discovery

Exchange = tuple[Callable, Callable]  # publish(key, bytes), and fetch(key), which blocks


def check_agreement(function: str, description: str) -> None:
    """Checks that all processes describe their k-th call of this function alike.

    For programs of several processes under a mesh of all their devices, where each process must trace the same calls
    in the same order. Elsewhere it does nothing, since a process cannot know which others take part.

    Raises:
      ValueError: if the descriptions differ, or another process does not trace a k-th call within the deadline.
    """
    processes = range(jax.process_count())
    if len(processes) == 1 or jax.sharding.get_abstract_mesh().size != jax.device_count():
        return
    exchange = _compat.key_value_store(runtime.timeout())
    key = f"jax_ring/call/{discovery.next_comparison('call')}"
    compare(function, description, exchange, key, jax.process_index(), processes)


def compare(
    function: str, description: str, exchange: Exchange, key: str, process: int, processes: Sequence[int]
) -> None:
    """Compares the description of this process with those that the others publish under the same key.

    Raises:
      ValueError: if two descriptions differ, or a process does not publish one within the deadline.
    """
    for other, value in gather(function, description.encode(), exchange, key, process, processes):
        theirs = value.decode()
        if theirs != description:
            pairs = itertools.zip_longest(description.splitlines(), theirs.splitlines(), fillvalue="nothing")
            differences = [f"{a.strip()!r} here, {b.strip()!r} there" for a, b in pairs if a != b]
            raise ValueError(
                f"{function}: process {process} (here) and process {other} (there) were given different data: "
                f"{'; '.join(differences[:3])}. All processes must have the same parameters, dtypes and options."
            )


def gather(
    function: str, value: bytes, exchange: Exchange, key: str, process: int, processes: Sequence[int]
) -> Iterator[tuple[int, bytes]]:
    """Publishes the value of this process, and yields (process, value) for each process as its value is fetched.

    Raises:
      ValueError: if a process does not publish a value under this key within the deadline.
    """
    publish, fetch = exchange
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
