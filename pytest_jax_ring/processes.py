"""Processes of a test: output goes to files, and none outlives it."""

import contextlib
import importlib.util
import os
import pathlib
import signal
import socket
import stat
import subprocess
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Self


def load_file(name: str) -> types.ModuleType:
    """Loads a file of jax_ring/launcher without the package."""
    package = importlib.util.find_spec("jax_ring")
    assert package is not None
    assert package.submodule_search_locations is not None
    for folder in package.submodule_search_locations:
        path = pathlib.Path(folder, "launcher", name)
        if path.exists():
            spec = importlib.util.spec_from_file_location(f"_jax_ring_{path.stem}", path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
    raise ImportError(f"jax_ring has no launcher/{name} in {list(package.submodule_search_locations)}")


class ProcessGroup:
    """Processes numbered from 0, killed when the `with` block ends.

    Attributes:
      popen: by number.
      address: for a coordination service of theirs, and no other.
    """

    def __init__(self) -> None:
        self.popen: list[subprocess.Popen] = []
        # It is removed, and they are killed, also when this process is killed.
        self._folder = load_file("coordinator/folder.py").SocketFolder()
        self._holder = socket.socket()
        # The service's socket sets this option too, so it can still bind a port that is bound here without listening.
        self._holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._holder.bind(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._holder.getsockname()[1]}"

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], stdout: str, stderr: str) -> None:
        """Starts a process with this one's Python.

        environment: variables beside this process's. stdout, stderr: names for `file`, maybe the same.
        """
        number = len(self.popen)
        # The process is no worker of pytest-xdist, even if this one is.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
        variables = {
            "JAX_PLATFORMS": "cpu",
            "PYTHONUNBUFFERED": "1",  # keeps the output of killed processes
            **environment,
        }
        with open(self.file(number, stdout), "ab") as output, open(self.file(number, stderr), "ab") as errors:
            self.popen.append(
                subprocess.Popen(
                    [sys.executable, "-P", *arguments],  # -P: import the installed package
                    env=inherited | variables, stdin=subprocess.DEVNULL, stdout=output, stderr=errors,
                    start_new_session=True,  # so that killpg also reaches its children
                )
            )  # fmt: skip
        self._folder.kill_with_it(self.popen[-1].pid)

    def file(self, number: int, name: str) -> pathlib.Path:
        """A file that lasts until the block's end."""
        return pathlib.Path(self._folder.socket(f"{number}.{name}"))

    def read(self, number: int, name: str) -> str:
        """The text of a file; nothing if the process has put in its place what is none, as a pipe without a writer."""
        with contextlib.suppress(OSError):
            file = os.open(self.file(number, name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with open(file, errors="replace") as text:
                if stat.S_ISREG(os.fstat(file).st_mode):
                    return text.read()
        return ""

    def kill(self) -> None:
        """Kills all running processes, stopped ones and children included."""
        for process in self.popen:
            kill_session(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()
        self._holder.close()
        self._folder.close()


def kill_session(process: subprocess.Popen) -> None:
    """Kills and awaits a process with a session of its own, and its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
