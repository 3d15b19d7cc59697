"""Programs of several processes that a test watches from outside: their signals, exit statuses and last words.

A test that runs in every process, and passes in all of them, has the mark `jax_processes` instead.

def body(scale):                              # at the top level of a test module; runs in every process
    ...

with Processes(body, 2, arguments=[3]) as program:
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
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from pytest_jax_ring.processes import ProcessGroup

_HERE = pathlib.Path(__file__).resolve()


class Result(NamedTuple):
    """The outcome of a process. returncode is None if the process was still running at the timeout."""

    returncode: int | None
    stdout: str
    stderr: str


class Processes(ProcessGroup):
    """The processes of one program.

    Args:
      body: a function at the top level of a module, which each process imports after `jax.distributed.initialize`;
        or the source of a program.
      num_processes: the number of processes.
      devices_each: the number of CPU devices of each process.
      arguments: arguments of the function; must be serializable as JSON.
      environment: environment variables for all processes, added to those of this process.
      distributed: further arguments of `jax.distributed.initialize`; None if the body calls it, with
        coordinator_address, num_processes and process_id from the dictionary `watched.distributed`.
    """

    def __init__(
        self,
        body: Callable | str,
        num_processes: int,
        devices_each: int = 1,
        *,
        arguments: Sequence = (),
        environment: Mapping[str, str] | None = None,
        distributed: Mapping | None = {},
    ) -> None:
        super().__init__()
        named = {} if isinstance(body, str) else {"file": inspect.getsourcefile(body), "function": body.__name__}
        for process in range(num_processes):
            task = {
                **(named or {"source": body}),
                "arguments": list(arguments),
                "devices": devices_each,
                "initialize": distributed is not None,
                "distributed": {
                    "coordinator_address": self.address,
                    "num_processes": num_processes,
                    "process_id": process,
                    **(distributed or {}),
                },
            }
            self.start([str(_HERE), json.dumps(task)], environment or {}, stdout="stdout", stderr="stderr")

    def wait(self, timeout: float = 120.0) -> list[Result]:
        """Waits up to `timeout` seconds for all processes; does not kill those that are still running."""
        until = time.monotonic() + timeout
        for process in self.popen:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
        return [self.result(process) for process in range(len(self.popen))]

    def result(self, process: int) -> Result:
        """The output of a process so far, and its exit status if it has exited."""
        written = (self.file(process, name).read_text(errors="replace") for name in ("stdout", "stderr"))
        return Result(self.popen[process].poll(), *written)

    def wait_until(self, process: int, text: str | tuple[str, ...], timeout: float = 240.0) -> None:
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


def as_text(results: Sequence[Result]) -> str:
    """The output of all processes; each line is prefixed with the process index."""
    lines = []
    for process, result in enumerate(results):
        status = "is still running" if result.returncode is None else f"returned {result.returncode}"
        written = [*result.stdout.splitlines(), *result.stderr.splitlines()]
        lines += [f"[{process}] {line}" for line in (status, *written)]
    return "\n".join(lines)


# Arguments of jax.distributed.initialize, for programs that call it in their body.
distributed: dict = {}


def _main(task: dict) -> None:
    """Entry point of each process."""
    # Gloo writes to stdout, in pieces and from several threads, so keep a test's lines apart from its output.
    sys.stdout = open(os.dup(1), "w", buffering=1)  # noqa: SIM115
    os.dup2(2, 1)
    import jax

    sys.path.insert(0, str(_HERE.parent))
    import watched

    watched.distributed.update(task["distributed"])
    jax.config.update("jax_num_cpu_devices", task["devices"])
    if task["initialize"]:
        jax.distributed.initialize(**task["distributed"])
    if "source" in task:
        exec(compile(task["source"], "<body>", "exec"), {"__name__": "__main__"})
        return
    path = pathlib.Path(task["file"])
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    getattr(module, task["function"])(*task["arguments"])


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
