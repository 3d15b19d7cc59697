"""How a process talks to its launcher: generations, and failures.

The launcher listens on a Unix socket named in `JAX_RING_CONTROL`; messages are JSON objects, one per line. `worker.py`
loads this file by path before JAX may be imported, so it uses only the standard library.
"""

import hashlib
import json
import os
import pathlib
import select
import socket
import struct
import threading
from typing import Any, NoReturn, Self

CONTROL_VARIABLE = "JAX_RING_CONTROL"
PROCESS_VARIABLE = "JAX_RING_LAUNCHED"  # the launcher's number of a process, never used again
GENERATION_VARIABLE = "JAX_RING_GENERATION"
RESTART_VARIABLE = "JAX_RING_RESTART"
HOSTS_VARIABLE = "JAX_RING_HOSTS"  # the index of each host's first process
MEMORY_VARIABLE = "JAX_RING_MEMORY"  # the prefix of names of shared memory
KEPT_NAME = "jax_ring_kept"  # names the files that hold commits
KEPT_VARIABLE = "JAX_RING_KEPT"  # the slot of a process, and the file descriptors of all slots
# Begins a file with a commit: whether it is whole, its generation, and its number.
KEPT_MARK = struct.Struct("<?xxxxxxxqq")
WATCH_VARIABLE = "JAX_RING_WATCH"  # whether a program without steps notes executions
# How long a failing process waits for the launcher to take its report.
_REPORT_SECONDS = 2.0
_MESSAGE_LENGTH = 8000  # characters in a report; more would not fit into a line that the launcher reads


def memory_prefix() -> str:
    """The prefix of shared memory names in a launcher's processes, which it cleans up; empty without one."""
    return os.environ.get(MEMORY_VARIABLE, "")


def memory_prefix_for(name: str) -> str:
    """That prefix, for a name of the job that the launchers of all its hosts know: one process names the memory."""
    return hashlib.sha256(name.encode()).hexdigest()[:16]


def remove_memory(prefix: str) -> None:
    """Removes names of shared memory of processes killed while they connect."""
    for path in pathlib.Path("/dev/shm").glob(f"jax_ring-{prefix}*"):
        path.unlink(missing_ok=True)


class RefusedError(RuntimeError):
    """The launcher has refused a request, by others' fault."""


def encode(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


class Control:
    """A process's connection to its launcher, for several threads."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()  # protects the connection and the fields below
        self._received = bytearray()
        self._change_pending = False

    @classmethod
    def connect(cls) -> Self:
        """Connects to this process's launcher. Raises RuntimeError without one, or when it has ended."""
        name, number = os.environ.get(CONTROL_VARIABLE), os.environ.get(PROCESS_VARIABLE)
        if not name or not number:
            raise RuntimeError(
                f"this process was not started by jax_ring's launcher: {CONTROL_VARIABLE} is not set. Start the "
                "program with: python -m jax_ring.launch -n 4 script.py"
            )
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(socket_address(name))
            connection.sendall(encode({"process": int(number)}))
        except OSError as error:
            connection.close()
            raise RuntimeError(
                f"the launcher at {CONTROL_VARIABLE}={name} does not answer ({error}). It has ended, or this process "
                "has inherited the variable from a job that has ended."
            ) from error
        return cls(connection)

    def close(self) -> None:
        """Closes the connection, unnoticed by the launcher."""
        self._connection.close()

    def enlist(self, *, min_processes: int, multiple_of: int | None = None) -> None:
        """Makes this job elastic, with the `Needs` of all its processes.

        Raises ValueError if the job never has so many processes, and RuntimeError with the launcher's reason if it
        refuses.
        """
        with self._lock:
            self._send({"do": "enlist", "min_processes": min_processes, "multiple_of": multiple_of})
            self._reply()

    def leave(self, reason: str) -> NoReturn:
        """Tells the launcher that this process leaves its generation, and waits for its end, which the launcher brings.

        Raises RuntimeError if the launcher has ended.
        """
        with self._lock:
            self._send({"do": "leave", "reason": reason})
            while True:
                self._receive()

    def change_pending(self) -> bool:
        """Whether members should leave at their next commit. Raises RuntimeError if the launcher has ended."""
        if self._lock.acquire(blocking=False):  # else another thread waits for a reply
            try:
                while b"\n" in self._received or select.select([self._connection], [], [], 0)[0]:
                    self._receive()
            finally:
                self._lock.release()
        return self._change_pending

    @classmethod
    def report_failure(cls, error_type: str, message: str, caused_by: int | None) -> None:
        """Reports the exception that ends this process.

        It needs no connection, waits up to 2 s for the launcher, and raises nothing.

        caused_by: the index of the process at fault; -1 if unknown, None for this one.
        """
        cls._tell({"do": "report", "type": error_type, "message": message[:_MESSAGE_LENGTH], "caused_by": caused_by})

    @classmethod
    def tell_initialize(cls) -> None:
        """Says that this process begins to wait for the others in `jax.distributed.initialize`.

        As `report_failure`, but without an answer, for which it would have to wait.
        """
        cls._tell({"do": "initialize"}, awaits_reply=False)

    @classmethod
    def _tell(cls, message: dict[str, Any], *, awaits_reply: bool = True) -> None:
        try:
            own = cls.connect()  # a separate one: another thread may hold its own while it waits for a generation
        except RuntimeError:
            return
        try:
            own._connection.settimeout(_REPORT_SECONDS)
            own._send(message)
            if awaits_reply:
                own._reply()
        except (RuntimeError, OSError):
            pass
        finally:
            own.close()

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._connection.sendall(encode(message))
        except OSError as error:
            raise RuntimeError(f"the launcher has ended: {error}") from error

    def _reply(self) -> dict[str, Any]:
        while (message := self._receive()) is None:
            pass
        if "argument_error" in message:
            raise ValueError(message["argument_error"])
        if "error" in message:
            raise RefusedError(f"jax_ring.launch: {message['error']}")
        return message

    def _receive(self) -> dict[str, Any] | None:
        """Waits for a reply, noting other messages."""
        while b"\n" not in self._received:
            try:
                chunk = self._connection.recv(1 << 16)
            except ConnectionError:
                chunk = b""
            if not chunk:
                raise RuntimeError("the launcher has ended: it has closed its connection to this process")
            self._received += chunk
        line, _, rest = bytes(self._received).partition(b"\n")
        self._received[:] = rest
        message = json.loads(line)
        if "change_pending" in message:
            self._change_pending = message["change_pending"]
            return None
        return message


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


def is_own_user(connection: socket.socket) -> bool:
    """Whether the process at the other end of a Unix socket is of this process's user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", credentials)[1] == os.geteuid()


def socket_address(name: str) -> str:
    """The address for a name in `JAX_RING_CONTROL`: @ stands for Linux's abstract namespace."""
    return "\0" + name.removeprefix("@")
