"""Starts a test's ranks, waits for them, and makes one outcome."""

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import pytest

from pytest_jax_ring import rank
from pytest_jax_ring.faults import Fault, check_faults
from pytest_jax_ring.processes import ProcessGroup, kill_session, load_file

DEFAULT_TIMEOUT = 300.0  # seconds
# How long before pytest-timeout to stop: it would end this process without the stacks of the ranks.
_BEFORE_PYTEST_TIMEOUT = 20.0
# After a rank has failed, the others have this long to notice it themselves.
_GRACE = 10.0
# On a loaded machine, a rank starts writing its stacks within this time, and then ends.
_STACKS_BEGIN = 15.0
_STACKS_END = 2.0
# The ranks get this process's options, but for these: it selects and reports the tests.
_OPTIONS_OF_RANKS = {
    "keyword": "", "markexpr": "", "deselect": None, "lf": False, "failedfirst": False, "newfirst": False,
    "stepwise": False, "stepwise_skip": False, "stepwise_reset": False, "usepdb": False, "trace": False,
    "capture": "no", "tbstyle": "auto", "xmlpath": None, "pastebin": None, "basetemp": None, "cacheclear": False,
    "cacheshow": True,  # so that pytest writes nothing to its cache
}  # fmt: skip


class RanksFailed(Exception):
    """The text that pytest shows for a traceback."""


@dataclass(frozen=True)
class Job:
    num_processes: int
    devices: int = 1
    timeout: float | None = None
    environment: Mapping[str, str] | Sequence[Mapping[str, str]] = field(default_factory=dict)
    faults: Sequence[Fault] = ()

    def __post_init__(self) -> None:
        for name in ("num_processes", "devices"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if self.timeout is not None and not (isinstance(self.timeout, int | float) and self.timeout > 0):
            raise ValueError(f"timeout must be a positive number of seconds, got {self.timeout!r}")
        environments = self.environments()
        if len(environments) != self.num_processes or not all(
            isinstance(each, Mapping) and all(isinstance(text, str | os.PathLike) for text in [*each, *each.values()])
            for each in environments
        ):
            raise ValueError(
                f"environment must be one mapping of strings, or one for each of the {self.num_processes} processes, "
                f"got {self.environment!r}"
            )
        check_faults(self.faults, self.num_processes)

    def environments(self) -> Sequence[Mapping[str, str]]:
        """By rank."""
        one = self.environment
        return one if isinstance(one, Sequence) else [one] * self.num_processes


def run_in_ranks(item: pytest.Item, mark: pytest.Mark) -> None:
    """Replaces an item's run: the ranks, without fixtures here."""

    def runtest() -> None:
        try:
            job = Job(*mark.args, **mark.kwargs)
        except (TypeError, ValueError) as error:
            raise RanksFailed(f"wrong arguments of the mark jax_processes: {error}") from None
        with _Ranks(item, job) as ranks:
            ranks.wait()
            ranks.judge(item)

    def repr_failure(error: pytest.ExceptionInfo, *arguments: Any, **options: Any) -> Any:
        return str(error.value) if isinstance(error.value, RanksFailed) else original(error, *arguments, **options)

    original = item.repr_failure
    item.setup = item.teardown = lambda: None  # type: ignore[method-assign]
    item.runtest = runtest  # type: ignore[method-assign]
    item.repr_failure = repr_failure  # type: ignore[assignment]


class _Ranks(ProcessGroup):
    """A test's ranks, and their service."""

    def __init__(self, item: pytest.Item, job: Job) -> None:
        super().__init__()
        self._job = job
        self._limit = _limit_of(item, job)
        self._ended: dict[int, float] = {}  # when, by rank
        self._protocol, self._schema = map(load_file, ("protocol.py", "schema.py"))
        self._memory = secrets.token_hex(8)
        # The launcher's service runs in a process of its own and survives the death of any rank.
        server = load_file("coordinator/server.py")
        assert server.__file__ is not None
        if server.is_found_at_a_socket():
            self.address = f"unix:{self._folder.socket('coordinator')}"
        with open(self.file(0, "service"), "wb") as errors:
            self._service = subprocess.Popen(
                [sys.executable, "-P", server.__file__, self.address, str(job.num_processes)],
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True,
            )  # fmt: skip
        memory = {self._protocol.MEMORY_VARIABLE: self._memory}
        try:
            for number in range(job.num_processes):
                self._start_rank(item, number, {**server.without_proxy(self.address), **memory})
        except BaseException:
            self.__exit__()
            raise

    def _start_rank(self, item: pytest.Item, number: int, variables: Mapping[str, str]) -> None:
        config = item.config
        task = {
            "devices": self._job.devices,
            "faults": [astuple(fault) for fault in self._job.faults if fault.rank == number],
            "reports": str(self.file(number, "reports")),
            "stacks": str(self.file(number, "stacks")),
            "parent": os.getpid(),
            "options": _options_for_ranks(config),
        }
        variables = {
            **variables,
            "JAX_COORDINATOR_ADDRESS": self.address,
            "JAX_NUM_PROCESSES": str(self._job.num_processes),
            "JAX_PROCESS_ID": str(number),
            "TF_CPP_MIN_LOG_LEVEL": "2",
            **self._job.environments()[number],
            rank.VARIABLE: json.dumps(task),
        }
        if os.getcwd() in sys.path or "" in sys.path:  # as with python -m pytest
            variables["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
        # The same command line, as no other has the same plugins, settings and options. rank.py leaves one test of it.
        arguments = [str(argument) for argument in config.invocation_params.args if argument != "--"]
        arguments += [f"--rootdir={config.rootpath}", "-s"]
        if config.inipath is not None:
            arguments += ["-c", str(config.inipath)]
        if hasattr(config.option, "numprocesses"):  # of pytest-xdist
            arguments += ["-n", "0"]
        if hasattr(config.option, "no_cov"):  # ranks of pytest-cov would delete each other's files
            arguments.append("--no-cov")
        # From here: pytest refuses an argument whose folders have a bracket in their names.
        arguments.append(f"./{os.path.relpath(item.path)}::{item.nodeid.partition('::')[2]}")
        self.start(["-m", "pytest", *arguments], variables, stdout="output", stderr="output")

    def __exit__(self, *exception: object) -> None:
        kill_session(self._service)
        assert self._service.stdin is not None
        self._service.stdin.close()
        super().__exit__()
        self._protocol.remove_memory(self._memory)

    def wait(self) -> None:
        """Until all ranks have ended, except those stopped on purpose, or time is up."""
        stopped = {fault.rank for fault in self._job.faults if fault.kind == "stop"}
        until = time.monotonic() + self._limit
        while True:
            now = time.monotonic()
            for number, process in enumerate(self.popen):
                if number not in self._ended and process.poll() is not None:
                    self._ended[number] = now
                    if self._failed(number):
                        until = min(until, now + _GRACE)
            if not set(range(len(self.popen))) - set(self._ended) - stopped:
                return
            if self._service.poll() is not None:  # by the environment's settings of mutual TLS
                text = self.read(0, "service")
                raise RanksFailed(f"the coordination service of the ranks has ended:\n{text}")
            if now >= until:
                return self._ask_for_stacks(stopped)
            time.sleep(0.01)

    def _failed(self, number: int) -> bool:
        return self.popen[number].poll() != 0 and not self._is_killed_on_purpose(number)

    def _is_killed_on_purpose(self, number: int) -> bool:
        planned = any(fault.kind == "kill" and fault.rank == number for fault in self._job.faults)
        return planned and self.popen[number].poll() == -signal.SIGKILL

    def _ask_for_stacks(self, stopped: set[int]) -> None:
        # The signal would end a rank without a handler for it.
        running = {
            number for number in range(len(self.popen)) if number not in self._ended and self._has_started(number)
        }
        for number in running:
            os.kill(self.popen[number].pid, rank.STACKS_SIGNAL)
        files = [self.file(number, "stacks") for number in running - stopped]
        until = time.monotonic() + _STACKS_BEGIN
        while time.monotonic() < until and not all(file.stat().st_size for file in files):
            time.sleep(0.01)
        time.sleep(_STACKS_END)

    def _has_started(self, number: int) -> bool:
        return self.file(number, "stacks").exists()

    def judge(self, item: pytest.Item) -> None:
        """Raises what ranks have found, first the one that failed first and by itself."""
        outcomes = [self._outcome(item, number) for number in range(len(self.popen))]
        failed = [outcome for outcome in outcomes if outcome.failure is not None]
        if failed:
            failed.sort(
                key=lambda outcome: (outcome.blames_another, outcome.is_running and outcome.has_finished, outcome.when)
            )
            if failed[0].expected is not None:
                pytest.xfail(failed[0].expected)
            for outcome in outcomes:
                if outcome.output.strip():
                    item.add_report_section("call", f"output of rank {outcome.rank}", outcome.output)
            raise RanksFailed(
                "\n\n".join(
                    [
                        failed[0].text(),
                        # If ranks hang, show all stacks: no single rank is the cause.
                        *(outcome.text() if outcome.is_running else outcome.summary() for outcome in failed[1:]),
                    ]
                )
            )
        reached = {fault for outcome in outcomes for fault in outcome.faults}
        if missed := [str(fault) for fault in self._job.faults if str(fault) not in reached]:
            raise RanksFailed(
                f"did not happen: {', '.join(missed)}. The rank did not come to a pytest_jax_ring.fault_point of that "
                "name."
            )
        skipped = [outcome.skipped for outcome in outcomes if outcome.skipped is not None]
        if skipped and len(skipped) == len(outcomes):
            pytest.skip(skipped[0])
        if skipped:
            raise RanksFailed(f"{len(skipped)} of {len(outcomes)} ranks skipped the test: {skipped[0]}")

    def _outcome(self, item: pytest.Item, number: int) -> "_Outcome":
        size, output = len(self.popen), self.read(number, "output")
        outcome = _Outcome(number, size, output, when=self._ended.get(number, float("inf")))
        passed = False
        for line in self.read(number, "reports").splitlines():
            try:
                kind, content = self._schema.read(line, tuple[str, Any])
            except ValueError:
                continue  # the last line of a killed rank
            if kind == "fault":
                outcome.faults.append(content)
            elif kind == "error":
                outcome.failure = content
            elif kind == "blames another":
                outcome.blames_another = True
            elif kind == "exit":
                pytest.exit(*content)
            else:
                report = item.config.hook.pytest_report_from_serializable(config=item.config, data=content)
                passed |= report.when == "call" and report.passed
                if report.failed and outcome.failure is None:
                    outcome.failure, outcome.when = report.longreprtext, report.stop
                    outcome.expected = getattr(report, "wasxfail", None)
                outcome.has_finished |= report.when == "teardown"
                if report.skipped:  # (file, line, reason)
                    outcome.skipped = str(report.longrepr[2])
        if outcome.failure is not None or self._is_killed_on_purpose(number):
            return outcome
        if number not in self._ended and not any(text.startswith("stop") for text in outcome.faults):
            outcome.is_running = True
            stacks = self.read(number, "stacks") if self._has_started(number) else output
            where = "still running" if self._has_started(number) else "still starting"
            if outcome.has_finished:
                where = "has finished the test, but its process has not ended"
            outcome.failure = f"{where} after {self._limit:g} s\n{stacks}"
        elif number in self._ended and not passed and outcome.skipped is None:
            outcome.failure = f"ended with status {self.popen[number].poll()} before the test had ended:\n{output}"
        elif number in self._ended and self.popen[number].poll() != 0:
            outcome.failure = f"passed, then ended with status {self.popen[number].poll()}:\n{output}"
        return outcome


@dataclass
class _Outcome:
    rank: int
    size: int
    output: str
    when: float
    failure: str | None = None
    expected: str | None = None  # why the failure is
    skipped: str | None = None
    blames_another: bool = False
    is_running: bool = False
    has_finished: bool = False
    faults: list[str] = field(default_factory=list)

    def text(self) -> str:
        """The error in one line, then all that is known."""
        assert self.failure is not None
        first, _, rest = self.failure.partition("\n")
        return f"{self.summary()}\n\n{rest if self.summary().endswith(first) else self.failure}"

    def summary(self) -> str:
        """The error in one line, for a rank that failed after another."""
        assert self.failure is not None
        lines = self.failure.strip().splitlines()
        errors = [line[1:].strip() for line in lines if line.startswith("E ")]
        return f"rank {self.rank} of {self.size}: {(errors or lines)[0]}"


def _limit_of(item: pytest.Item, job: Job) -> float:
    """Seconds: the mark's, pytest-timeout's, or the default."""
    if job.timeout is not None:
        return job.timeout
    mark = item.get_closest_marker("timeout")
    seconds = mark.args[0] if mark and mark.args else mark.kwargs.get("timeout") if mark else None
    if seconds is None and item.config.pluginmanager.hasplugin("timeout"):
        seconds = item.config.getoption("timeout", None) or item.config.getini("timeout")
    seconds = float(seconds) if seconds else 0.0
    return max(seconds - _BEFORE_PYTEST_TIMEOUT, seconds / 2) if seconds > 0 else DEFAULT_TIMEOUT


def _options_for_ranks(config: pytest.Config) -> dict[str, Any]:
    """Values that all ranks must share, even if each would compute its own, such as a random seed."""
    simple = (bool, int, float, str, type(None))
    shared = {name: value for name, value in vars(config.option).items() if type(value) in simple}
    return shared | _OPTIONS_OF_RANKS
