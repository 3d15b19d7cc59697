"""The secret of a job: where it is, and how both launchers of a connection prove that they have it.

The proof comes before anything else that they say. Who connects is the first to prove it, so that one who only reaches
a port gets nothing from which it could guess a secret.
"""

import asyncio
import errno
import hmac
import os
import pathlib
import secrets
import stat

from jax_ring.launcher import protocol

_MOST_BYTES = 4096  # of a file with a secret
_GREETING = b"jaxring1"  # with the version of what follows
_WITH, _WITHOUT = b"s", b"i"  # whether there is a secret
_NONCE_BYTES = _PROOF_BYTES = 32


class OtherSecretError(ConnectionError):
    """The other launcher has another secret, or one of the two has none. The text goes after its name."""


def of_file(path: pathlib.Path) -> bytes:
    """The secret in a file that is this user's alone. Raises ValueError if it is not."""
    try:  # a pipe would be waited for, a terminal would become that of this process
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        why = "it is a link; give the file itself" if error.errno == errno.ELOOP else error.strerror
        raise ValueError(f"cannot read {path}: {why}") from None
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError(f"{path} is no regular file")
        if found.st_uid != os.geteuid():
            raise ValueError(f"{path} belongs to user {found.st_uid}, and this is user {os.geteuid()}")
        if found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            mode = stat.S_IMODE(found.st_mode)
            raise ValueError(f"{path} has mode {mode:04o}, so that others may use it: chmod 600 {path}")
        return protocol.checked_secret(os.read(file, _MOST_BYTES), str(path))
    finally:
        os.close(file)


async def prove(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, *, listens: bool
) -> tuple[bytes, bytes]:
    """Proves to the launcher at the other end that this one has its secret, and has it prove the same.

    secret: empty for none, which everybody has.

    Returns keys for what is sent and what is received. Raises OtherSecretError, ConnectionError if the other end is
    gone, and ValueError if it is no launcher.
    """

    async def read(count: int) -> bytes:
        try:
            return await reader.readexactly(count)
        except asyncio.IncompleteReadError as error:
            raise ConnectionError("the other end is gone") from error

    mode, own = _WITH if secret else _WITHOUT, secrets.token_bytes(_NONCE_BYTES)
    writer.write(_GREETING + mode + own)
    if (greeting := await read(len(_GREETING))) != _GREETING:
        raise ValueError(f"{greeting!r} is no greeting of a launcher of this version")
    others_mode, other = await read(1), await read(_NONCE_BYTES)
    if others_mode != mode:
        facts = ["has a secret", "was started with --insecure"]
        theirs, ours = facts if others_mode == _WITH else facts[::-1]
        raise OtherSecretError(f"{theirs}, and this one {ours}: give all launchers of a job the same secret")
    nonces = other + own if listens else own + other

    def derived(purpose: bytes) -> bytes:  # a purpose of one side is none of the other
        return hmac.digest(secret, purpose + nonces, "sha256")

    connects, listener = derived(b"proof of who connects"), derived(b"proof of who listens")
    if listens:
        is_right = hmac.compare_digest(await read(_PROOF_BYTES), connects)
        writer.write(listener if is_right else bytes(_PROOF_BYTES))
    else:
        writer.write(connects)
        is_right = hmac.compare_digest(await read(_PROOF_BYTES), listener)
    if not is_right:
        sources = f"({protocol.SECRET_VARIABLE}, or --secret-file)"
        raise OtherSecretError(f"has another secret than this one {sources}: give all launchers of a job the same")
    keys = derived(b"messages of who connects"), derived(b"messages of who listens")
    return (keys[1], keys[0]) if listens else keys
