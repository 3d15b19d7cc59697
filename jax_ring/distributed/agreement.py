"""What processes tell each other on the host, and the error where they are about to do different things."""

import itertools
from collections.abc import Callable, Iterator, Sequence

import jax

from jax_ring import _compat, runtime

_calls = itertools.count()

Exchange = tuple[Callable, Callable]  # publish(key, bytes), and fetch(key), which waits


def check_agreement(function: str, description: str) -> None:
    """Checks that all processes describe their k-th call of this function alike.

    It is for programs of several processes under a mesh of all their devices, where each has to trace the same calls
    in the same order; it does nothing elsewhere, since then no process knows who else takes part.

    Raises:
      ValueError: if the descriptions differ, or another process does not trace a k-th call within the deadline.
    """
    processes = range(jax.process_count())
    if len(processes) == 1 or jax.sharding.get_abstract_mesh().size != jax.device_count():
        return
    exchange = _compat.key_value_store(runtime.timeout())
    compare(function, description, exchange, f"jax_ring/call/{next(_calls)}", jax.process_index(), processes)


def compare(
    function: str, description: str, exchange: Exchange, key: str, process: int, processes: Sequence[int]
) -> None:
    """Compares the description of this process with those that the others give under the same key."""
    for other, value in gather(function, description.encode(), exchange, key, process, processes):
        theirs = value.decode()
        if theirs != description:
            pairs = itertools.zip_longest(description.splitlines(), theirs.splitlines(), fillvalue="nothing")
            differences = [f"{a.strip()!r} here, {b.strip()!r} there" for a, b in pairs if a != b]
            raise ValueError(
                f"{function}: process {process}, here, and process {other} were given different data: "
                f"{'; '.join(differences[:3])}. All processes must have the same parameters, dtypes and options."
            )


def gather(
    function: str, value: bytes, exchange: Exchange, key: str, process: int, processes: Sequence[int]
) -> Iterator[tuple[int, bytes]]:
    """Gives the others the value of this process, and waits for those of all: (process, value), as they are asked for.

    Raises:
      ValueError: if a process does not come to a call with this key within the deadline.
    """
    publish, fetch = exchange
    publish(f"{key}/{process}", value)
    for other in processes:
        try:
            theirs = fetch(f"{key}/{other}")
        except Exception as error:
            raise ValueError(
                f"{function}: process {other} has not come to this call within {runtime.timeout():g} s, and process "
                f"{process} has. All processes must make the same calls in the same order; "
                f"{runtime.TIMEOUT_VARIABLE} is the time they have for it."
            ) from error
        yield other, theirs
