"""A folder for Unix sockets that no other user can reach, and that is gone after its process, however that ends.

The pytest plugin loads this file by path, so it imports nothing of the package.
"""

import contextlib
import os
import pathlib
import shutil
import stat
import string
import subprocess
import sys
import tempfile

_LONGEST = 107  # bytes of a Unix socket's path
_LONGEST_NAME = len("/jax_ring-12345678/coordinator-1234567")
# gRPC takes a path as part of a URI, where other characters have a meaning.
_PLAIN = frozenset(string.ascii_letters + string.digits + "/._+-")
# Waits for the end of its input. What is sent to all processes of a job or service must not end it before.
_REMOVER = """
import os, signal, sys
for each in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
    signal.signal(each, signal.SIG_IGN)
for each in sys.stdin.read().split():
    try: os.killpg(int(each), signal.SIGKILL)
    except OSError: pass
for each in os.listdir(sys.argv[1]):
    os.unlink(sys.argv[1] + "/" + each)
os.rmdir(sys.argv[1])
"""

# Of root on every system. In a namespace of users, all that it does not have look alike, the host's root for example:
# another folder that seems to be his may be anybody's.
_OF_ROOT = frozenset(map(pathlib.Path, ("/", "/dev", "/dev/shm", "/tmp", "/var", "/var/tmp")))

_REMOVER_SECONDS = 5.0  # for it to remove what its process could not


class NoPlaceError(OSError):
    """There is no place for the sockets of a job."""


class SocketFolder:
    """A folder that a small process removes when this one has ended; `close` removes it at once."""

    def __init__(self) -> None:
        """Raises NoPlaceError."""
        self._path = _new()
        try:
            self._remover = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _REMOVER, self._path],
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        except BaseException:
            shutil.rmtree(self._path, ignore_errors=True)
            raise

    def socket(self, name: str) -> str:
        """The path for a socket in it."""
        return f"{self._path}/{name}"

    def kill_with_it(self, group: int) -> None:
        """Has a group of processes killed if this process ends before `close`."""
        assert self._remover.stdin is not None
        self._remover.stdin.write(f"{group}\n".encode())
        self._remover.stdin.flush()

    def close(self) -> None:
        shutil.rmtree(self._path, ignore_errors=True)  # not where this process has no file left to look into it
        if not os.path.exists(self._path):
            self._remover.kill()
        assert self._remover.stdin is not None
        self._remover.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._remover.wait(_REMOVER_SECONDS)


def _new() -> str:
    """A new folder of mode 0700. Not in XDG_RUNTIME_DIR: that goes at logout, and a job may stay."""
    why_not = {}
    try:
        own = [os.path.realpath(tempfile.gettempdir())]
    except OSError as error:  # no folder can be written to
        own, why_not["TMPDIR"] = [], str(error)
    places = dict.fromkeys([*own, "/tmp", "/dev/shm"])
    for place in places:
        if (reason := _why_not(place)) is None:
            try:
                path = tempfile.mkdtemp(prefix="jax_ring-", dir=place)
                os.chmod(path, 0o700)  # whatever the umask has taken
                return path
            except OSError as error:
                reason = str(error)
        why_not[place] = reason
    reasons = "; ".join(f"{place}: {reason}" for place, reason in why_not.items())
    raise NoPlaceError(f"there is no place for the sockets of a job: {reasons}. Set TMPDIR to a short path of your own")


def _why_not(place: str) -> str | None:
    """Why a folder for sockets cannot be in a place, if so: in particular, somebody else could put another there."""
    if len(place) + _LONGEST_NAME > _LONGEST:
        return f"with more than {_LONGEST - _LONGEST_NAME} characters, it is too long for the path of a socket"
    if not set(place) <= _PLAIN:
        return "its name has characters that gRPC does not take"
    for folder in (pathlib.Path(place), *pathlib.Path(place).parents):
        try:
            found = folder.stat()
        except OSError as error:
            return str(error)
        if found.st_uid not in trusted_users(folder):
            return f"{folder} is of another user"
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not found.st_mode & stat.S_ISVTX:
            return f"other users may write to {folder}"
    return None


def trusted_users(folder: pathlib.Path) -> set[int]:
    """Who may own a folder that files of a job are in: this user, root, and root of the host outside of a namespace."""
    trusted = {0, os.geteuid()}
    with contextlib.suppress(OSError, ValueError):
        is_whole = pathlib.Path("/proc/self/uid_map").read_text().split() == ["0", "0", str(2**32 - 1)]
        if folder in _OF_ROOT and not is_whole:
            trusted.add(int(pathlib.Path("/proc/sys/kernel/overflowuid").read_text()))
    return trusted
