"""What the processes of one job know of each other: their shared memory, and values that they exchange."""

import glob
import itertools
import json

import jax

_EXCHANGES = itertools.count()


def client():
    """JAX's client of the coordination service."""
    from jax_ring import _compat

    return _compat.distributed_client()


def job_token() -> str:
    """The text that the names of this job's shared memory begin with; other jobs may run beside it."""
    from jax_ring.launcher import protocol

    return protocol.memory_label(protocol.own_key(), client().key_value_try_get("jax_ring/token"))


def segments(token: str) -> list[str]:
    """The shared memory of a job that has a name, and is left behind if the job ends now."""
    return glob.glob(f"/dev/shm/jax_ring-{token}*")


def of_all_processes(value) -> list:
    """The values of all processes, in their order. All must call it; the values must be serializable as JSON."""
    key = f"exchange {next(_EXCHANGES)}"
    client().key_value_set(f"{key} of {jax.process_index()}", json.dumps(value))
    texts = [client().blocking_key_value_get(f"{key} of {i}", 120_000) for i in range(jax.process_count())]
    return [json.loads(text) for text in texts]


def merged(own: dict) -> dict:
    """The dictionaries of all processes as one. All must call it."""
    return {key: value for part in of_all_processes(own) for key, value in part.items()}
