"""The command line of `jax_ring.launch`."""

import argparse
import dataclasses
import importlib.util
import os
import pathlib
import sys
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Options:
    """What to run, and how; times in seconds.

    Attributes:
      command: script or module, with arguments.
      is_module: whether `command` is a module.
      min_processes: of this host, without which the job ends.
      processes: of this host.
      devices: of each process, if given.
      max_restarts: of processes.
      backoff: before the first restart, then doubled.
      grace: for processes after a signal to the launcher.
      failure_grace: for them after another has failed.
      leave_timeout: for members of an elastic job to leave a generation after the first.
      log_dir: for a file of output per process, if given.
      watch: for a step, or an execution of a program that is not edited; None without.
      on_stuck: what to do after that, if given: "report", or "end" the job as well.
      nnodes: the number of hosts.
      node_rank: this host's index.
      coordinator: host:port where host 0's launcher listens to the others.
      node_timeout: for hosts to find each other, at the start and after a failure.
    """

    command: tuple[str, ...]
    is_module: bool = False
    min_processes: int = 1
    processes: int = 1
    devices: int | None = None
    max_restarts: int = 0
    backoff: float = 1.0
    grace: float = 10.0
    # After a failure the other processes only have to run their own SIGTERM handlers.
    failure_grace: float = 1.0
    leave_timeout: float = 5.0
    log_dir: pathlib.Path | None = None
    watch: float | None = None
    on_stuck: str | None = None
    nnodes: int = 1
    node_rank: int = 0
    coordinator: tuple[str, int] = ("127.0.0.1", 0)
    node_timeout: float = 300.0


def parse(arguments: Sequence[str] | None, description: str) -> Options:
    """Parses the command line; exits with status 2 and a message if wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m jax_ring.launch", description=description, allow_abbrev=False,
        usage="%(prog)s [options] -n N (script | -m module) [arguments]",
    )  # fmt: skip

    def add_seconds(name: str, text: str) -> None:
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=float, default=getattr(Options, name), metavar="SECONDS",
            help=f"{text} (default: %(default)g)",
        )  # fmt: skip

    parser.add_argument(
        "-n", "--processes", required=True, metavar="N | MIN:MAX",
        help="number of processes on this host. After a restart, MIN of them are enough where some fail repeatedly",
    )  # fmt: skip
    parser.add_argument(
        "--devices", type=int, help="devices per process: CPU devices, or GPUs that no other process uses (default: 1)"
    )
    parser.add_argument("-m", "--module", action="store_true", help="run a module, as `python -m` does")
    parser.add_argument(
        "--max-restarts", type=int, default=0, metavar="COUNT",
        help="how often to start the processes again after a failure (default: %(default)s). The script finds the "
        "number of the restart in JAX_RING_RESTART",
    )  # fmt: skip
    add_seconds("backoff", "the wait before the first restart; it doubles with each, up to 60 s")
    add_seconds("grace", "time that processes have to exit after a signal to the launcher, before they are killed")
    add_seconds("failure_grace", "time that the other processes have to exit after one has failed")
    add_seconds(
        "leave_timeout",
        "time that a process of an elastic job has to notice that the members change, after another has noticed",
    )
    parser.add_argument(
        "--log-dir", type=pathlib.Path, metavar="FOLDER", help="also write each process's output to files in FOLDER"
    )
    parser.add_argument(
        "--watch", type=float, metavar="SECONDS",
        help="report which processes are stuck, and where, when a program that one has launched has not completed "
        "after SECONDS; steps of jax_ring.watch, where the script has it",
    )  # fmt: skip
    parser.add_argument(
        "--on-stuck", choices=("report", "end"),
        help="what to do then: report alone, or end the job as a failure, from which --max-restarts and elastic jobs "
        "go on (default: report, or what the script gives jax_ring.watch)",
    )  # fmt: skip
    parser.add_argument("--nnodes", type=int, default=1, metavar="COUNT", help="number of hosts (default: %(default)s)")
    parser.add_argument("--node-rank", type=int, default=0, metavar="INDEX", help="index of this host, from 0")
    parser.add_argument(
        "--coordinator", metavar="HOST:PORT", help="where host 0 can be reached, and a port for its launcher"
    )
    add_seconds("node_timeout", "time that the launchers of all hosts have to find each other")
    parser.add_argument("script", help="a Python file; a module after -m")
    rest = parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    rest.required = False  # else argparse lists them among the missing ones
    given = parser.parse_args(arguments)

    fewest, most = _process_counts(parser, given.processes)
    for flag in ("devices", "nnodes"):
        value = getattr(given, flag)
        if value is not None and value < 1:
            parser.error(f"--{flag} must be at least 1, got {value}")
    if given.max_restarts < 0:
        parser.error(f"--max-restarts must be at least 0, got {given.max_restarts}")
    for flag in ("grace", "failure_grace", "leave_timeout", "backoff", "node_timeout"):
        if not getattr(given, flag) >= 0:
            parser.error(f"--{flag.replace('_', '-')} must be a number of seconds, got {getattr(given, flag)}")
    if given.watch is not None and not given.watch > 0:
        parser.error(f"--watch must be a positive number of seconds, got {given.watch}")
    _check_program(parser, given.script, given.module)
    as_given = (
        "devices", "max_restarts", "backoff", "grace", "failure_grace", "leave_timeout", "log_dir", "watch",
        "on_stuck", "nnodes", "node_rank", "node_timeout",
    )  # fmt: skip
    return Options(
        command=(given.script, *given.arguments), is_module=given.module, min_processes=fewest, processes=most,
        coordinator=_coordinator(parser, given), **{name: getattr(given, name) for name in as_given},
    )  # fmt: skip


def _process_counts(parser: argparse.ArgumentParser, text: str) -> tuple[int, int]:
    fewest, _, most = text.rpartition(":")
    try:
        counts = int(fewest or most), int(most)
    except ValueError:
        parser.error(f"-n must be a number or MIN:MAX, as in 3:4; got {text}")
    if min(counts) < 1:
        parser.error(f"-n must be at least 1, got {text}")
    if counts[0] > counts[1]:
        parser.error(f"-n MIN:MAX needs MIN <= MAX, got {text}")
    return counts


def _coordinator(parser: argparse.ArgumentParser, given: argparse.Namespace) -> tuple[str, int]:
    if given.nnodes == 1 and given.node_rank == 0:
        if given.coordinator:
            parser.error("--coordinator is for several hosts: give --nnodes as well")
        return ("127.0.0.1", 0)
    if not 0 <= given.node_rank < given.nnodes:
        parser.error(f"--node-rank must be from 0 to {given.nnodes - 1} with --nnodes {given.nnodes}")
    host, _, port = (given.coordinator or "").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        parser.error(f"--nnodes {given.nnodes} needs --coordinator HOST:PORT, got {given.coordinator}")
    return (host.strip("[]"), int(port))


def _check_program(parser: argparse.ArgumentParser, script: str, is_module: bool) -> None:
    if not is_module:
        if not pathlib.Path(script).is_file():
            parser.error(f"there is no file {script!r} in {os.getcwd()}; options of the launcher go before the script")
        return
    # Only the top-level name: looking further would import the package.
    first = script.partition(".")[0]
    original = list(sys.path)
    sys.path.insert(0, os.getcwd())
    try:
        found = importlib.util.find_spec(first)
    except (ImportError, ValueError):
        found = None
    finally:
        sys.path[:] = original
    if found is None:
        parser.error(f"there is no module {script!r} in {os.getcwd()} or on Python's path")
