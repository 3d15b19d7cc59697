"""A rank: pytest in a process that runs one test as a member of a job."""

import faulthandler
import json
import os
import pathlib
import signal
import sys
from typing import Any

import pytest

from pytest_jax_ring.faults import Fault, expect
from pytest_jax_ring.processes import load_file

VARIABLE = "JAX_RING_PYTEST_RANK"  # a JSON object, see ranks.py
STACKS_SIGNAL = signal.SIGUSR1


def prepare() -> None:
    """Before JAX is imported: makes `jax.distributed.initialize` join the job, whose service is not in rank 0.

    Raises:
      pytest.UsageError: if it is too late.
    """
    worker = load_file("worker.py")
    worker.die_with_parent(json.loads(os.environ[VARIABLE])["parent"])
    if "jax" in sys.modules:
        raise pytest.UsageError(
            "jax_processes: a pytest plugin has imported JAX before pytest_jax_ring was loaded. Import JAX in "
            "conftest.py or later."
        )
    worker.patch_initialize()


class Rank:
    """A rank's hooks: joins the job after the conftest files, and writes reports to a file."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._task = json.loads(os.environ[VARIABLE])
        self._reports = open(self._task["reports"], "w", buffering=1)  # noqa: SIM115  # open to the end
        path = pathlib.Path(self._task["stacks"])
        self._stacks = open(path.with_suffix(".new"), "w")  # noqa: SIM115
        faulthandler.register(STACKS_SIGNAL, self._stacks, all_threads=True)
        os.rename(self._stacks.name, path)  # now others may ask for them
        for name, value in self._task["options"].items():
            if hasattr(config.option, name):
                setattr(config.option, name, value)
        config.args = config.args[-1:]  # the test, without the files and folders of the command line

    def _write(self, kind: str, content: Any) -> None:
        self._reports.write(json.dumps([kind, content], default=repr) + "\n")

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self) -> None:
        """After conftest files, which may configure JAX, before test modules, which may use devices."""
        # This process's output is the test's. Pytest's own would only mix with it.
        if reporter := self._config.pluginmanager.get_plugin("terminalreporter"):
            reporter._tw._file = open(os.devnull, "w")  # noqa: SIM115
        import jax

        jax.config.update("jax_num_cpu_devices", self._task["devices"])
        jax.distributed.initialize()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self):
        try:
            return (yield)
        finally:
            # Nobody reads this process's summary, and plugins would import more for it than the test needs.
            if self._config.pluginmanager.has_plugin("terminalreporter"):
                self._config.pluginmanager.unregister(name="terminalreporter")

    def pytest_runtest_setup(self) -> None:
        expect([Fault(*fault) for fault in self._task["faults"]], lambda fault: self._write("fault", str(fault)))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self):
        """Has ranks fail or pass, and leaves it to the parent process whether that was expected of all together."""
        report = yield
        if hasattr(report, "wasxfail") and report.skipped:
            report.outcome = "failed"
        elif str(report.longrepr).startswith("[XPASS(strict)]"):
            report.outcome = "passed"
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self._config.hook
        self._write("report", hook.pytest_report_to_serializable(config=self._config, report=report))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write("error", str(report.longrepr))

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo) -> None:
        """By pytest.exit() too."""
        self._write("exit", [str(excinfo.value), getattr(excinfo.value, "returncode", None)])

    def pytest_internalerror(self, excrepr: Any, excinfo: pytest.ExceptionInfo) -> None:
        self._write("error", str(excrepr))
        self._note_blame(excinfo.value)

    def pytest_exception_interact(self, call: pytest.CallInfo) -> None:
        if call.excinfo is not None:
            self._note_blame(call.excinfo.value)

    def _note_blame(self, error: BaseException) -> None:
        """While the exception, which names a failure by number, is here."""
        if load_file("worker.py").blamed_process(error) is not None:
            self._write("blames another", None)
