"""Makes processes that are about to exchange data of different layouts an error, while they trace."""

import itertools
from typing import Protocol

import jax

from jax_ring import _compat, runtime


class Store(Protocol):
    """JAX's key-value store, which all processes of a program share."""

    def key_value_set(self, key: str, value: str) -> None: ...

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str: ...


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
    store = _compat.key_value_store()
    compare(function, description, store, f"jax_ring/{next(_calls)}", jax.process_index(), processes)


def compare(function: str, description: str, store: Store, key: str, process: int, num_processes: int) -> None:
    """Publishes the description of this process under `key`, waits for those of the others, and compares."""
    store.key_value_set(f"{key}/{process}", description)
    for other in range(num_processes):
        try:
            theirs = store.blocking_key_value_get(f"{key}/{other}", round(runtime.timeout() * 1e3))
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
