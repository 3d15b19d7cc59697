"""JAX's key-value store, in which anybody may write who reaches its port. Only values of this job are believed.

Each has a code by the job's key, and by its own: so nobody else can change it, and it is worth nothing under another
key. A key names the process that writes, and is used once in a runtime, so that no value can be shown again.
"""

import functools
import hmac
import secrets
import threading
from typing import Any

import jax

from jax_ring import _compat, foreign_errors, runtime
from jax_ring.launcher import protocol

_CODE_BYTES = 32
_ADVICE = "use a network of your own, or JAX's mutual TLS"


class ForeignValueError(RuntimeError):
    """A value is not of a process of this job."""


class Store:
    """The store of one runtime of `jax.distributed`.

    Attributes:
      memory: what the names of the processes' shared memory begin with, and the key from which they follow.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        # The first process to publish a token wins. Whoever reads the store knows it; with the job's key it names
        # shared resources, which other programs must not be able to guess.
        token = _compat.publish_once(client, "jax_ring/token", secrets.token_hex(16).encode()).decode(errors="replace")
        key = protocol.own_key()
        self.memory = protocol.memory_label(key, token), protocol.memory_key(key, token)
        # The launcher's prefix is of this generation alone: what an earlier one has written is worth nothing.
        purpose = f"store {protocol.memory_prefix()} {token}"
        self._key, self._without_secret = protocol.derived(key, purpose), protocol.derived(b"", purpose)

    def put(self, key: str, value: bytes, *, replaces: bool = False) -> None:
        """Publishes a value of this process. replaces: an earlier one, which a stranger may show again.

        Raises ForeignValueError if the key has a value, and JAX's error if the store is out of reach.
        """
        try:
            _compat.put_bytes(self._client, key, _code(self._key, key, value) + value, replaces)
        except jax.errors.JaxRuntimeError as error:
            if not foreign_errors.KEY_EXISTS.search(str(error)):
                raise
            raise ForeignValueError(
                f"{key} has a value in JAX's coordination service before this process has written it. It has called "
                f"jax.distributed.initialize a second time with one service, or somebody else writes there: {_ADVICE}."
            ) from error

    def get(self, key: str, seconds: float | None = None) -> bytes:
        """Waits for a value, by default until the deadline.

        Raises JAX's error if none comes, and ForeignValueError if it is not of this job.
        """
        found = _compat.get_bytes(self._client, key, runtime.timeout() if seconds is None else seconds)
        code, value = found[:_CODE_BYTES], found[_CODE_BYTES:]
        if hmac.compare_digest(code, _code(self._key, key, value)):
            return value
        if hmac.compare_digest(code, _code(self._without_secret, key, value)):
            why = "the process that wrote it has no secret, and this one has"
        elif self._key == self._without_secret:
            why = "this process has no secret, and who wrote it may have one"
        else:
            why = "who wrote it has another secret, or none"
        raise ForeignValueError(
            f"the value of {key} in JAX's coordination service, which begins with {found[:40]!r}, has no code of this "
            f"job: {why}. Processes get the secret from jax_ring's launcher, and programs that they start do not; "
            f"without it set {protocol.SECRET_VARIABLE} to one value in all, or in none. If it is the same, somebody "
            f"else writes there: {_ADVICE}."
        )

    def peek(self, key: str) -> bytes | None:
        """A value, if it is there and of this job: for texts of errors, which are raised without it as well."""
        try:
            return self.get(key, 0)
        except (jax.errors.JaxRuntimeError, ForeignValueError):
            return None


def _code(key: bytes, name: str, value: bytes) -> bytes:
    return hmac.digest(protocol.derived(key, name), value, "sha256")


_lock = threading.Lock()
_opened = functools.lru_cache(maxsize=1)(Store)  # each runtime has another client


def current() -> Store:
    """The store of this process's runtime. Raises RuntimeError, with advice, if there is none."""
    with _lock:
        return _opened(_compat.distributed_client())
