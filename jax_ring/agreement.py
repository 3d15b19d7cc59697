"""Makes processes that are about to exchange data of different layouts an error, while they trace."""

import itertools
from collections.abc import Callable

import jax

from jax_ring import _compat, runtime

_calls = itertools.count()


def check_agreement(function: str, description: str) -> None:
    """Checks that all processes describe their k-th call of this function alike.

    It is for programs of several processes under a mesh of all their devices, where each has to trace the same calls
    in the same order; it does nothing elsewhere, since then no process knows who else takes part.

    Raises:
      ValueError: if the descriptions differ, or another process does not trace a k-th call within the deadline.
    """
    processes = jax.process_count()
    if processes == 1 or jax.sharding.get_abstract_mesh().size != jax.device_count():
        return
    exchange = _compat.key_value_store(runtime.timeout())
    compare(function, description, exchange, f"jax_ring/call/{next(_calls)}", jax.process_index(), processes)


def compare(
    function: str, description: str, exchange: tuple[Callable, Callable], key: str, process: int, num_processes: int
) -> None:
    """Publishes the description of this process under `key`, waits for those of the others, and compares.

    exchange: publish(key, bytes), and fetch(key), which waits.
    """
    publish, fetch = exchange
    publish(f"{key}/{process}", description.encode())
    for other in range(num_processes):
        try:
            theirs = fetch(f"{key}/{other}").decode()
        except Exception as error:
            raise ValueError(
                f"{function}: process {other} has not traced this reduction within {runtime.timeout():g} s, and "
                f"process {process} has. All processes must trace the same reductions in the same order; "
                f"{runtime.TIMEOUT_VARIABLE} is the time they have for it."
            ) from error
        if theirs != description:
            pairs = itertools.zip_longest(description.splitlines(), theirs.splitlines(), fillvalue="nothing")
            differences = [f"{a.strip()!r} here, {b.strip()!r} there" for a, b in pairs if a != b]
            raise ValueError(
                f"{function}: process {process}, here, and process {other} are about to reduce different data: "
                f"{'; '.join(differences[:3])}. All processes must have the same parameters, dtypes and options."
            )
