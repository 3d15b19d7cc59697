"""How a process talks to its launcher: generations, and failures.

The launcher listens on a Unix socket named in `JAX_RING_CONTROL`. A connection has one request and one answer, lines of
JSON. `worker.py` loads this file by path before JAX may be imported, so it uses only the standard library.
"""

import contextlib
import hmac
import json
import os
import pathlib
import socket
import struct
import time
from typing import Any, NoReturn

CONTROL_VARIABLE = "JAX_RING_CONTROL"
PROCESS_VARIABLE = "JAX_RING_LAUNCHED"  # the launcher's number of a process, never used again
GENERATION_VARIABLE = "JAX_RING_GENERATION"
RESTART_VARIABLE = "JAX_RING_RESTART"
HOSTS_VARIABLE = "JAX_RING_HOSTS"  # the index of each host's first process
MEMORY_VARIABLE = "JAX_RING_MEMORY"  # the prefix of names of shared memory
SECRET_VARIABLE = "JAX_RING_SECRET"  # of a job, for its launchers, or for its processes without one
KEY_NAME = "jax_ring_key"  # names the file with the key of a job
KEY_VARIABLE = "JAX_RING_KEY"  # its descriptor
COMMIT_VARIABLE = "JAX_RING_COMMIT"  # the number of the newest commit that launchers know of, before a generation
KEPT_NAME = "jax_ring_kept"  # names the files that hold commits
KEPT_VARIABLE = "JAX_RING_KEPT"  # the slot of a process, and the file descriptors of all slots
# Begins a file with a commit: whether it is whole, its generation, and its number.
KEPT_MARK = struct.Struct("<?xxxxxxxqq")
WATCH_VARIABLE = "JAX_RING_WATCH"  # whether a program without steps notes executions
# How long a failing process waits for the launcher to take its report.
_REPORT_SECONDS = 2.0
_POLL_SECONDS = 0.01
_MESSAGE_LENGTH = 8000  # characters in a report; more would not fit into a line that the launcher reads
_FEWEST_BYTES = 16  # of a secret
_KEY_BYTES = 32


def checked_secret(text: bytes, source: str) -> bytes:
    """A secret without blanks at its ends. Raises ValueError if it is too short. source: where it is from."""
    if len(secret := text.strip()) < _FEWEST_BYTES:
        raise ValueError(
            f"the secret of {source} has {len(secret)} characters, and at least {_FEWEST_BYTES} are needed. Make one "
            "with: python -c 'import secrets; print(secrets.token_hex())'"
        )
    return secret


def derived(key: bytes, purpose: str) -> bytes:
    """Another key, from which nobody learns this one."""
    return hmac.digest(key, purpose.encode(), "sha256")


def key_of_job(secret: bytes) -> bytes:
    """What the processes of a job share; empty without a secret."""
    return derived(secret, "processes") if secret else b""


def own_key() -> bytes:
    """The key of this process's job: from its launcher, or from the secret in its environment.

    Raises ValueError if that secret is too short.
    """
    file = os.environ.get(KEY_VARIABLE, "")
    with contextlib.suppress(OSError, ValueError):
        # A program started by a process of the launcher inherits the variable, but another file has this number.
        if os.readlink(f"/proc/self/fd/{file}").startswith(f"/memfd:{KEY_NAME} "):
            return os.pread(int(file), _KEY_BYTES, 0)
    secret = os.environb.get(os.fsencode(SECRET_VARIABLE))
    return key_of_job(checked_secret(secret, SECRET_VARIABLE)) if secret is not None else b""


def memory_prefix() -> str:
    """The prefix of shared memory names in a launcher's processes, which it cleans up; empty without one."""
    return os.environ.get(MEMORY_VARIABLE, "")


def memory_prefix_for(key: bytes, name: str) -> str:
    """That prefix, for a name of the job that the launchers of all its hosts know: all its processes name the memory.

    key: of the job, without which nobody knows the prefix.
    """
    return derived(key, f"prefix {name}").hex()[:16]


def memory_label(key: bytes, token: str) -> str:
    """The beginning of the names of this job's shared memory, after `jax_ring-`: everybody on the machine may see it.

    token: published by the first of the job's processes.
    """
    return memory_prefix() + derived(key, f"label {token}").hex()[:16]


def memory_key(key: bytes, token: str) -> bytes:
    """The key from which these names follow. It is in none of them."""
    return derived(key, f"memory {token}")[:16]


def remove_memory(prefix: str) -> list[OSError]:
    """Removes names of shared memory of processes killed while they connect; returns why it could not, for each."""
    errors = []
    for path in pathlib.Path("/dev/shm").glob(f"jax_ring-{prefix}*"):
        try:
            path.unlink(missing_ok=True)
        except OSError as error:  # another user's, for example
            errors.append(error)
    return errors


class RefusedError(RuntimeError):
    """The launcher has refused a request, by others' fault."""


def ask(do: str, *values: Any, awaits_answer: bool = True, seconds: float | None = None) -> None:
    """Asks this process's launcher for something, from any thread, and waits until it has done it.

    do, values: one of `attempt.REQUESTS`.

    Raises RuntimeError without a launcher, when it has ended, or with its reason if it refuses; ValueError if the
    script is at fault.
    """
    path, number = os.environ.get(CONTROL_VARIABLE), os.environ.get(PROCESS_VARIABLE)
    if not path or not number:
        raise RuntimeError(
            f"this process was not started by jax_ring's launcher: {CONTROL_VARIABLE} is not set. Start the "
            "program with: python -m jax_ring.launch -n 4 script.py"
        )
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(seconds)
        try:
            _connect(connection, path, seconds)
            connection.sendall(json.dumps([int(number), do, values]).encode() + b"\n")
            line = connection.makefile("rb").readline() if awaits_answer else b"{}"
        except OSError as error:
            raise RuntimeError(
                f"the launcher at {CONTROL_VARIABLE}={path} does not answer ({error}). It has ended, or this process "
                "has inherited the variable from a job that has ended."
            ) from error
    if not line:
        raise RuntimeError("the launcher has ended: it has closed its connection to this process")
    if (answer := json.loads(line)).get("is_argument"):
        raise ValueError(answer["error"])
    if "error" in answer:
        raise RefusedError(f"jax_ring.launch: {answer['error']}")


def _connect(connection: socket.socket, path: str, seconds: float | None) -> None:
    """Connects to a launcher, which may have to accept others first."""
    until = time.monotonic() + (seconds or 0.0)
    while True:
        try:
            return connection.connect(path)
        except BlockingIOError:  # with a limit of time, a socket does not wait for that by itself
            if time.monotonic() >= until:
                raise
            time.sleep(_POLL_SECONDS)


def leave(reason: str) -> NoReturn:
    """Tells the launcher that this process leaves its generation, and waits for its end, which the launcher brings."""
    ask("leave", reason)
    while True:
        time.sleep(60.0)


def report_failure(error_type: str, message: str, caused_by: int | None) -> None:
    """Reports the exception that ends this process. It waits up to 2 s for the launcher, and raises nothing.

    caused_by: the index of the process at fault; -1 if unknown, None for this one.
    """
    with contextlib.suppress(RuntimeError):
        ask("report", error_type, message[:_MESSAGE_LENGTH], caused_by, seconds=_REPORT_SECONDS)


def tell_initialize() -> None:
    """Says that this process begins to wait for the others in `jax.distributed.initialize`, and raises nothing."""
    with contextlib.suppress(RuntimeError):
        ask("initialize", awaits_answer=False, seconds=_REPORT_SECONDS)


def write_mark(file: int, is_whole: bool, generation: int, number: int) -> None:
    """Marks the file of a commit; one that is not whole is read by nobody."""
    os.pwrite(file, KEPT_MARK.pack(is_whole, generation, number), 0)


def read_mark(file: int) -> tuple[int, int] | None:
    """The generation and the number of the commit in a file; None if none is whole."""
    data = os.pread(file, KEPT_MARK.size, 0)
    if len(data) < KEPT_MARK.size:
        return None
    is_whole, generation, number = KEPT_MARK.unpack(data)
    return (generation, number) if is_whole else None
