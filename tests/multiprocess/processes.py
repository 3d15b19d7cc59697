"""Programs of several processes: starts them under jax.distributed on this machine, and collects how each one ended.

def body(scale):                              # at the top of a test's module; runs in every process
    ...

run(body, 2, devices_each=4, arguments=[3])   # waits, and fails with everybody's output unless all return

with Processes(body, 2) as program:           # for what does not end well
    program.wait_until(1, "ready")
    program.popen[1].send_signal(signal.SIGSTOP)
    results = program.wait(timeout=30)
"""

import contextlib
import importlib.util
import inspect
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Self

_HERE = pathlib.Path(__file__).resolve()


class Result(NamedTuple):
    """How a process ended. returncode: as in `subprocess`, and None if it was still running when the time was up."""

    returncode: int | None
    stdout: str
    stderr: str


class Processes:
    """The processes of one program, which are all killed when the `with` block is left.

    Args:
      body: a function at the top of a module, which is imported in each process after `jax.distributed` has been
        initialized; or the source of a program.
      num_processes: how many there are.
      devices_each: the CPU devices of each.
      arguments: of the function; anything that JSON can hold.
      environment: variables for all of them, in addition to those of this process.
      environment_of: variables for each of them, in turn.
      distributed: further arguments of `jax.distributed.initialize`; None to leave that to the body, which finds
        coordinator_address, num_processes and process_id in the dictionary `processes.distributed`.

    Attributes:
      popen: the processes, by process index.
    """

    def __init__(
        self,
        body: Callable | str,
        num_processes: int,
        devices_each: int = 1,
        *,
        arguments: Sequence = (),
        environment: Mapping[str, str] | None = None,
        environment_of: Sequence[Mapping[str, str]] | None = None,
        distributed: Mapping | None = {},
    ) -> None:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            port = unused.getsockname()[1]
        named = {} if isinstance(body, str) else {"file": inspect.getsourcefile(body), "function": body.__name__}
        self.popen: list[subprocess.Popen] = []
        self._folder = tempfile.TemporaryDirectory(prefix="processes-")
        for process in range(num_processes):
            task = {
                **(named or {"source": body}),
                "arguments": list(arguments),
                "devices": devices_each,
                "initialize": distributed is not None,
                "distributed": {
                    "coordinator_address": f"127.0.0.1:{port}",
                    "num_processes": num_processes,
                    "process_id": process,
                    **(distributed or {}),
                },
            }
            variables = {
                "JAX_PLATFORMS": "cpu",
                "PYTHONUNBUFFERED": "1",  # what a process wrote before it was killed is wanted as well
                **(environment or {}),
                **(environment_of or [{}] * num_processes)[process],
            }
            with open(self._file(process, "stdout"), "w") as stdout, open(self._file(process, "stderr"), "w") as stderr:
                self.popen.append(
                    subprocess.Popen(
                        [sys.executable, "-P", str(_HERE), json.dumps(task)],  # -P: the installed package
                        env={**os.environ, **variables},
                        stdin=subprocess.DEVNULL,
                        stdout=stdout,
                        stderr=stderr,
                        start_new_session=True,  # so that what a process starts ends with it
                    )
                )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception) -> None:
        self.kill()
        self._folder.cleanup()

    def kill(self) -> None:
        """Kills those that are still running, stopped ones too."""
        for process in self.popen:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def wait(self, timeout: float = 120.0) -> list[Result]:
        """How each process ended, once all have, or once `timeout` seconds are over; those that run then go on."""
        until = time.monotonic() + timeout
        for process in self.popen:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
        return [self.result(process) for process in range(len(self.popen))]

    def result(self, process: int) -> Result:
        """What one process has written until now, and how it ended if it did."""
        written = (self._file(process, name).read_text(errors="replace") for name in ("stdout", "stderr"))
        return Result(self.popen[process].poll(), *written)

    def wait_until(self, process: int, text: str, timeout: float = 60.0) -> None:
        """Waits until a process has written `text` to stdout.

        Raises:
          AssertionError: if it has not after `timeout` seconds, or ends without.
        """
        until = time.monotonic() + timeout
        while text not in self.result(process).stdout:
            if time.monotonic() > until or self.popen[process].poll() is not None:
                everybody = [self.result(i) for i in range(len(self.popen))]
                if text in everybody[process].stdout:
                    return
                raise AssertionError(f"process {process} has not written {text!r}\n{in_words(everybody)}")
            time.sleep(0.02)

    def _file(self, process: int, name: str) -> pathlib.Path:
        return pathlib.Path(self._folder.name, f"{process}.{name}")


def run(body: Callable | str, num_processes: int, devices_each: int = 1, *, timeout=120.0, **options) -> list[Result]:
    """Runs a program to its end, and returns what each process wrote. See `Processes` for the other arguments.

    Raises:
      AssertionError: unless every process returns 0 within `timeout` seconds; with the output of all of them.
    """
    with Processes(body, num_processes, devices_each, **options) as program:
        results = program.wait(timeout)
        program.kill()
    assert all(result.returncode == 0 for result in results), "\n" + in_words(results)
    return results


def in_words(results: Sequence[Result]) -> str:
    """Everybody's output, each line after the index of its process."""
    lines = []
    for process, result in enumerate(results):
        ended = "is still running" if result.returncode is None else f"returned {result.returncode}"
        written = [*result.stdout.splitlines(), *result.stderr.splitlines()]
        lines += [f"[{process}] {line}" for line in (ended, *written)]
    return "\n".join(lines)


# In a program that leaves the initialization to its body: the arguments for it.
distributed: dict = {}


def _main(task: dict) -> None:
    """What each process does."""
    import jax

    sys.path[:0] = [str(_HERE.parent), str(_HERE.parent.parent)]
    import processes

    processes.distributed.update(task["distributed"])
    jax.config.update("jax_num_cpu_devices", task["devices"])
    if task["initialize"]:
        jax.distributed.initialize(**task["distributed"])
    if "source" in task:
        exec(compile(task["source"], "<body>", "exec"), {"__name__": "__main__"})
        return
    path = pathlib.Path(task["file"])
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    getattr(module, task["function"])(*task["arguments"])


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
