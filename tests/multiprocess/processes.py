"""Starts programs of several processes under jax.distributed on this machine, and collects their results.

def body(scale):                              # at the top level of a test module; runs in every process
    ...

run(body, 2, devices_each=4, arguments=[3])   # waits; fails with the output of all processes unless all return 0

with Processes(body, 2) as program:           # for processes that are stopped, killed or fail
    program.wait_until(1, "ready")
    program.popen[1].send_signal(signal.SIGSTOP)
    results = program.wait(timeout=30)
"""

import contextlib
import glob
import importlib.util
import inspect
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Self

_HERE = pathlib.Path(__file__).resolve()


def job_token() -> str:
    """The text that the names of this job's shared memory begin with; other jobs may run beside it."""
    from jax_ring import _compat

    return _compat.distributed_client().key_value_try_get("jax_ring/token")


def segments(token: str) -> list[str]:
    """The shared memory of a job that has a name, and is left behind if the job ends now."""
    return glob.glob(f"/dev/shm/jax_ring-{token}*")


class Result(NamedTuple):
    """The outcome of a process. returncode is None if the process was still running at the timeout."""

    returncode: int | None
    stdout: str
    stderr: str


class Processes:
    """The processes of one program. Leaving the `with` block kills all of them.

    Args:
      body: a function at the top level of a module, which each process imports after `jax.distributed.initialize`;
        or the source of a program.
      num_processes: the number of processes.
      devices_each: the number of CPU devices of each process.
      arguments: arguments of the function; must be serializable as JSON.
      environment: environment variables for all processes, added to those of this process.
      environment_of: environment variables for each process.
      distributed: further arguments of `jax.distributed.initialize`; None if the body calls it, with
        coordinator_address, num_processes and process_id from the dictionary `processes.distributed`.

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
                "PYTHONUNBUFFERED": "1",  # keeps the output of killed processes
                **(environment or {}),
                **(environment_of or [{}] * num_processes)[process],
            }
            with open(self._file(process, "stdout"), "w") as stdout, open(self._file(process, "stderr"), "w") as stderr:
                self.popen.append(
                    subprocess.Popen(
                        [sys.executable, "-P", str(_HERE), json.dumps(task)],  # -P: import the installed package
                        env={**os.environ, **variables},
                        stdin=subprocess.DEVNULL,
                        stdout=stdout,
                        stderr=stderr,
                        start_new_session=True,  # killpg reaches the children of the process as well
                    )
                )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception) -> None:
        self.kill()
        self._folder.cleanup()

    def kill(self) -> None:
        """Kills all processes that are still running, including stopped ones."""
        for process in self.popen:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def wait(self, timeout: float = 120.0) -> list[Result]:
        """Waits up to `timeout` seconds for all processes; does not kill those that are still running."""
        until = time.monotonic() + timeout
        for process in self.popen:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
        return [self.result(process) for process in range(len(self.popen))]

    def result(self, process: int) -> Result:
        """The output of a process so far, and its exit status if it has exited."""
        written = (self._file(process, name).read_text(errors="replace") for name in ("stdout", "stderr"))
        return Result(self.popen[process].poll(), *written)

    def wait_until(self, process: int, text: str | tuple[str, ...], timeout: float = 60.0) -> None:
        """Waits until a process has written a line to stdout that starts with `text`, or one of them, and its end.

        Raises:
          AssertionError: if it does not within `timeout` seconds, or exits first.
        """
        texts = "|".join(map(re.escape, (text,) if isinstance(text, str) else text))
        line = re.compile(rf"^({texts}).*\n", re.MULTILINE)
        until = time.monotonic() + timeout
        while not line.search(self.result(process).stdout):
            if time.monotonic() > until or self.popen[process].poll() is not None:
                results = [self.result(i) for i in range(len(self.popen))]
                if line.search(results[process].stdout):
                    return
                raise AssertionError(f"process {process} has not written {text!r}\n{as_text(results)}")
            time.sleep(0.02)

    def _file(self, process: int, name: str) -> pathlib.Path:
        return pathlib.Path(self._folder.name, f"{process}.{name}")


def run(body: Callable | str, num_processes: int, devices_each: int = 1, *, timeout=120.0, **options) -> list[Result]:
    """Runs a program to completion, and returns the results. See `Processes` for the other arguments.

    Raises:
      AssertionError: if a process does not return 0 within `timeout` seconds; shows the output of all processes.
    """
    with Processes(body, num_processes, devices_each, **options) as program:
        results = program.wait(timeout)
        program.kill()
    assert all(result.returncode == 0 for result in results), "\n" + as_text(results)
    return results


def as_text(results: Sequence[Result]) -> str:
    """The output of all processes; each line is prefixed with the process index."""
    lines = []
    for process, result in enumerate(results):
        status = "is still running" if result.returncode is None else f"returned {result.returncode}"
        written = [*result.stdout.splitlines(), *result.stderr.splitlines()]
        lines += [f"[{process}] {line}" for line in (status, *written)]
    return "\n".join(lines)


# The arguments of jax.distributed.initialize, for programs that call it in their body.
distributed: dict = {}


def _main(task: dict) -> None:
    """Entry point of each process."""
    # Gloo writes to stdout, in pieces and from several threads. A line of a test is whole only apart from them.
    sys.stdout = open(os.dup(1), "w", buffering=1)  # noqa: SIM115
    os.dup2(2, 1)
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
