"""How a process of `jax_ring.launch` talks to its launcher: membership in generations, and failures that it reports.

The launcher listens on a Unix socket, whose name is in `JAX_RING_CONTROL`. Both ends send JSON objects, one per line.
`worker.py` loads this file by its path before JAX may be imported, so it uses the standard library only.
"""

import hashlib
import json
import os
import select
import socket
import threading
from typing import Any, NamedTuple, Self

CONTROL_VARIABLE = "JAX_RING_CONTROL"
PROCESS_VARIABLE = "JAX_RING_LAUNCHED"  # the launcher's number of a process; a process started in its place has another
GENERATION_VARIABLE = "JAX_RING_GENERATION"
JOIN_VARIABLE = "JAX_RING_JOIN"
RESTART_VARIABLE = "JAX_RING_RESTART"
KEPT_NAME = "jax_ring_kept"  # of the files that commits are kept in
KEPT_VARIABLE = "JAX_RING_KEPT"  # the slot of a process, and the descriptors of the files of all slots
# How long a failing process waits for the launcher to take its report.
_REPORT_SECONDS = 2.0
_MESSAGE_LENGTH = 8000  # of a report, in characters; more would not fit into a line that the launcher reads


class Member(NamedTuple):
    """A process's place in a generation.

    Attributes:
      generation: the number of the generation. The first is 0.
      coordinator: the address of its coordination service, host:port. Empty for a spare.
      num_processes: the number of its members.
      process_id: the index of this process; -1 for a spare, which waits for the next generation.
    """

    generation: int
    coordinator: str
    num_processes: int
    process_id: int

    def variables(self) -> dict[str, str]:
        """The environment variables from which `jax.distributed.initialize()` takes its arguments in this process."""
        return {
            "JAX_COORDINATOR_ADDRESS": self.coordinator,
            "JAX_COORDINATOR_BIND_ADDRESS": self.coordinator,
            "JAX_NUM_PROCESSES": str(self.num_processes),
            "JAX_PROCESS_ID": str(self.process_id),
            GENERATION_VARIABLE: str(self.generation),
        }


def memory_prefix(socket_name: str | None = None) -> str:
    """With what the names of shared memory begin in the processes of a launcher, which removes what they leave behind.

    socket_name: of the launcher; that of this process by default. Without a launcher the prefix is empty.
    """
    name = os.environ.get(CONTROL_VARIABLE, "") if socket_name is None else socket_name
    return hashlib.sha256(name.encode()).hexdigest()[:16] if name else ""


class RefusedError(RuntimeError):
    """The launcher has refused what this process asked for, which is the fault of others."""


def encode(message: dict[str, Any]) -> bytes:
    """A message as a line."""
    return json.dumps(message).encode() + b"\n"


class Control:
    """A process's connection to its launcher. Several threads may use it."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()  # of the connection and of what follows
        self._received = bytearray()
        self._change_pending = False

    @classmethod
    def connect(cls) -> Self:
        """Connects to the launcher that has started this process.

        Raises:
          RuntimeError: if this process was not started by a launcher, or the launcher has ended.
        """
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
        """Closes the connection. The launcher takes no notice."""
        self._connection.close()

    def enlist(self, *, min_processes: int, multiple_of: int | None = None) -> None:
        """Makes this job elastic: from now on, the death of a process changes the members and does not end the job.

        Every process may call it; all must give the same numbers.

        Args:
          min_processes: the job ends when fewer than this are left, and no more are being started.
          multiple_of: a number of shards, which the number of members must divide. Processes that are left over are
            spares. None allows any number of members.

        Raises:
          RuntimeError: if the launcher refuses, with its reason.
        """
        with self._lock:
            self._send({"do": "enlist", "min_processes": min_processes, "multiple_of": multiple_of})
            self._reply()

    def next_generation(self, after: int, reason: str) -> Member:
        """Tells the launcher that this process has left a generation, and waits until it is in a later one.

        It sets the environment variables from which `jax.distributed.initialize()` takes its arguments, and
        `JAX_RING_GENERATION`, unless this process becomes a spare.

        Args:
          after: the generation that this process has left; -1 if it was in none.
          reason: why, for the launcher's messages.

        Raises:
          RuntimeError: if there will be no generation with this process, with the launcher's reason.
        """
        with self._lock:
            self._send({"do": "next_generation", "after": after, "reason": reason})
            member = Member(*self._reply()["member"])
            self._change_pending = False  # what came before the reply was about the last generation
        if member.process_id >= 0:
            os.environ.update(member.variables())
        return member

    def change_pending(self) -> bool:
        """Whether the launcher wants the members to leave at their next commit. Never blocks.

        It does when a process waits to join, and when a member has died. An error may tell of the latter earlier.

        Raises:
          RuntimeError: if the launcher has ended.
        """
        if self._lock.acquire(blocking=False):  # else another thread waits for a reply
            try:
                while b"\n" in self._received or select.select([self._connection], [], [], 0)[0]:
                    self._receive()
            finally:
                self._lock.release()
        return self._change_pending

    @classmethod
    def report_failure(cls, error_type: str, message: str, caused_by: int | None) -> None:
        """Reports an exception that is about to end this process.

        It needs no connection, waits until the launcher has it, but no longer than 2 s, and never raises an error.

        Args:
          error_type: the exception's type.
          message: its text.
          caused_by: the process whose fault it is, by its index in this generation; -1 if it is not known which;
            None if it is this process's own.
        """
        try:
            own = cls.connect()  # another thread may hold a connection while it waits for a generation
        except RuntimeError:
            return
        try:
            own._connection.settimeout(_REPORT_SECONDS)
            own._send(
                {"do": "report", "type": error_type, "message": message[:_MESSAGE_LENGTH], "caused_by": caused_by}
            )
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
        if "error" in message:
            raise RefusedError(f"jax_ring.launch: {message['error']}")
        return message

    def _receive(self) -> dict[str, Any] | None:
        """Waits for a message. Returns it if it is a reply; takes note of the others."""
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


def socket_address(name: str) -> str:
    """The address for a name in `JAX_RING_CONTROL`. One that begins with @ is of Linux's abstract namespace."""
    return "\0" + name[1:] if name.startswith("@") else name
