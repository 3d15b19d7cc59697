"""The command line of `jax_ring.launch`."""

import argparse
import dataclasses
import importlib.util
import os
import pathlib
import secrets
import sys
from collections.abc import Sequence

from jax_ring.launcher import protocol
from jax_ring.launcher.hosts import secret

_MOST_DEVICES = 4096  # their indices fit into a variable


@dataclasses.dataclass(frozen=True)
class Options:
    """What to run, and how: the options of the command line, with times in seconds."""

    command: tuple[str, ...]  # script or module, with arguments
    is_module: bool = False
    min_processes: int = 1  # of this host, without which the job ends
    processes: int = 1  # started on this host
    devices: int | None = None  # of each process; None for one GPU, and for as many CPU devices as JAX makes
    max_restarts: int = 0  # of all processes, after failures
    backoff: float = 1.0  # before the first restart; doubled for each later one
    grace: float = 10.0  # for processes to exit after a signal, or after an exception of their own
    failure_grace: float = 1.0  # for the others to exit after one has failed: they only run their SIGTERM handlers
    leave_timeout: float = 5.0  # for the processes of an elastic job to leave when hosts change, once one has
    log_dir: pathlib.Path | None = None  # for a file per process with its output
    watch: float | None = None  # after which a program or step is stuck; None to watch what the script says alone
    on_stuck: str | None = None  # "report" or "end"; None for what the script says
    nnodes: int = 1  # the largest number of hosts
    min_nodes: int = 1  # how many are enough
    hosts_change: bool = False  # whether hosts may come and go, by --nnodes MIN:MAX
    node_rank: int | None = 0  # index of this host; None if hosts may come and go and it has none
    # where launchers listen to the others, in the order in which they may lead: (host, port)
    coordinators: tuple[tuple[str, int], ...] = ()
    node_timeout: float = 300.0  # for launchers to find each other
    join_timeout: float = 30.0  # for more than `min_nodes` hosts to be there at the start
    heartbeat_timeout: float = 20.0  # of silence, after which launchers give each other up
    secret: bytes = dataclasses.field(default=b"", repr=False)  # of the job, with other launchers; empty for none


def parse(arguments: Sequence[str] | None, description: str) -> Options:
    """Parses the command line; exits with status 2 and a message if wrong."""
    parser = _parser(description)
    given = parser.parse_args(arguments)
    fewest, most = _counts(parser, "-n", given.processes)
    min_nodes, nnodes = _counts(parser, "--nnodes", given.nnodes)
    _check_numbers(parser, given)
    hosts_change = ":" in given.nnodes
    if fewest < most and (nnodes > 1 or hosts_change):
        parser.error(
            f"-n MIN:MAX is for one host; with --nnodes {given.nnodes} give -n {most}. To go on without lost hosts "
            "give --nnodes MIN:MAX"
        )
    _check_program(parser, given.script, given.module)
    options = {name: value for name, value in vars(given).items() if name in Options.__annotations__}
    options |= {
        "command": (given.script, *given.arguments), "is_module": given.module,
        "min_processes": fewest, "processes": most,
        "min_nodes": min_nodes, "nnodes": nnodes, "hosts_change": hosts_change,
        "node_rank": given.node_rank if hosts_change else given.node_rank or 0,
        "coordinators": (coordinators := _coordinators(parser, given, nnodes, hosts_change)),
        "secret": _secret(parser, given, bool(coordinators)),
    }  # fmt: skip
    return Options(**options)


def _parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jax_ring.launch", description=description, allow_abbrev=False,
        usage="%(prog)s [options] -n N (script | -m module) [arguments]",
    )  # fmt: skip

    parser.add_argument(
        "-n", "--processes", required=True, metavar="N | MIN:MAX",
        help="number of processes on this host. After a restart, MIN of them are enough where some fail repeatedly, "
        "in a job of one host",
    )  # fmt: skip
    parser.add_argument(
        "--devices", type=int, help="devices per process: CPU devices, or GPUs that no other process uses (default: 1)"
    )
    parser.add_argument("-m", "--module", action="store_true", help="run a module, as `python -m` does")
    parser.add_argument(
        "--max-restarts", type=int, default=0, metavar="COUNT",
        help="how often to start the processes again after a failure (default: %(default)s); an elastic job then goes "
        "on with those that are left. The script finds how often they were started again in JAX_RING_RESTART",
    )  # fmt: skip
    _add_seconds(parser, "backoff", "the wait before the first restart; it doubles with each, up to 60 s")
    _add_seconds(
        parser,
        "grace",
        "time that processes have to exit after a signal to the launcher, or an exception of their own, before they "
        "are killed",
    )
    _add_seconds(parser, "failure_grace", "time that the other processes have to exit after one has failed")
    _add_seconds(
        parser,
        "leave_timeout",
        "time that the processes of an elastic job have to leave when hosts come, after one has left",
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
    _add_hosts(parser)
    parser.add_argument("script", help="a Python file; a module after -m")
    rest = parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    rest.required = False  # else argparse lists them among the missing ones
    return parser


def _add_hosts(parser: argparse.ArgumentParser) -> None:
    """The options for several hosts."""
    parser.add_argument(
        "--nnodes", default="1", metavar="COUNT | MIN:MAX",
        help="number of hosts (default: %(default)s); with MIN hosts may come and go, as long as MIN are there",
    )  # fmt: skip
    parser.add_argument(
        "--node-rank", type=int, metavar="INDEX", help="index of this host, from 0; with MIN:MAX it may be left out"
    )
    parser.add_argument(
        "--coordinator", metavar="HOST:PORT[,...]",
        help="where host 0 can be reached, and a port for its launcher; with MIN:MAX several hosts, in the order in "
        "which their launchers may lead",
    )  # fmt: skip
    parser.add_argument(
        "--secret-file", type=pathlib.Path, metavar="FILE",
        help=f"a file of mode 0600 with the secret that all launchers of the job share (default: that in "
        f"{protocol.SECRET_VARIABLE})",
    )  # fmt: skip
    parser.add_argument(
        "--insecure", action="store_true",
        help="several hosts without a secret: whoever reaches the port of a launcher takes part",
    )  # fmt: skip
    _add_seconds(parser, "node_timeout", "time that the launchers of all hosts have to find each other")
    _add_seconds(parser, "join_timeout", "with MIN:MAX, time that more than MIN hosts have to be there at the start")
    _add_seconds(
        parser, "heartbeat_timeout", "after so long a silence, or a stop of a process, others go on without it"
    )


def _add_seconds(parser: argparse.ArgumentParser, name: str, text: str) -> None:
    parser.add_argument(
        f"--{name.replace('_', '-')}", type=float, default=getattr(Options, name), metavar="SECONDS",
        help=f"{text} (default: %(default)g)",
    )  # fmt: skip


def _check_numbers(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    if given.devices is not None and not 1 <= given.devices <= _MOST_DEVICES:
        parser.error(f"--devices must be from 1 to {_MOST_DEVICES}, got {given.devices}")
    if given.max_restarts < 0:
        parser.error(f"--max-restarts must be at least 0, got {given.max_restarts}")
    for flag in ("grace", "failure_grace", "leave_timeout", "backoff", "node_timeout", "join_timeout"):
        if not getattr(given, flag) >= 0:
            parser.error(f"--{flag.replace('_', '-')} must be a number of seconds, got {getattr(given, flag)}")
    if given.watch is not None and not given.watch > 0:
        parser.error(f"--watch must be a positive number of seconds, got {given.watch}")
    if not given.heartbeat_timeout > 0:
        parser.error(f"--heartbeat-timeout must be a positive number of seconds, got {given.heartbeat_timeout}")


def _counts(parser: argparse.ArgumentParser, flag: str, text: str) -> tuple[int, int]:
    fewest, _, most = text.rpartition(":")
    try:
        counts = int(fewest or most), int(most)
    except ValueError:
        parser.error(f"{flag} must be a number or MIN:MAX, as in 3:4; got {text}")
    if min(counts) < 1:
        parser.error(f"{flag} must be at least 1, got {text}")
    if counts[0] > counts[1]:
        parser.error(f"{flag} MIN:MAX needs MIN <= MAX, got {text}")
    return counts


def _coordinators(
    parser: argparse.ArgumentParser, given: argparse.Namespace, nnodes: int, hosts_change: bool
) -> tuple[tuple[str, int], ...]:
    if nnodes == 1 and not hosts_change and not given.node_rank:
        if given.coordinator:
            parser.error("--coordinator is for several hosts: give --nnodes as well")
        return ()
    if given.node_rank is not None and not 0 <= given.node_rank < nnodes:
        parser.error(f"--node-rank must be from 0 to {nnodes - 1} with --nnodes {given.nnodes}, got {given.node_rank}")
    addresses = []
    for text in (given.coordinator or "").split(","):
        host, _, port = text.strip().rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            parser.error(f"--nnodes {given.nnodes} needs --coordinator HOST:PORT, got {given.coordinator}")
        try:
            host.encode("idna")  # as it is looked up
        except UnicodeError as error:
            parser.error(f"--coordinator: {host!r} is no name of a host: {error}")
        addresses.append((host.strip("[]"), int(port)))
    if len(addresses) > 1 and not hosts_change:
        parser.error(
            f"--coordinator takes several addresses with --nnodes MIN:MAX, where another launcher may lead; got "
            f"{given.coordinator} and --nnodes {given.nnodes}"
        )
    if len(set(addresses)) < len(addresses):
        parser.error(f"--coordinator has an address twice: {given.coordinator}")
    return tuple(addresses)


def _secret(parser: argparse.ArgumentParser, given: argparse.Namespace, has_others: bool) -> bytes:
    """The secret of the job. It is taken out of the environment, which processes inherit."""
    text, file = os.environb.pop(os.fsencode(protocol.SECRET_VARIABLE), None), given.secret_file
    if given.insecure and (not has_others or file is not None or text is not None):
        other = protocol.SECRET_VARIABLE if file is None else "--secret-file"
        parser.error(f"--insecure is for several hosts{f', and not beside {other}' if has_others else ''}")
    try:
        if file is not None:
            return secret.of_file(file)
        if text is not None:
            return protocol.checked_secret(text, protocol.SECRET_VARIABLE)
    except ValueError as error:
        parser.error(str(error))
    if has_others and not given.insecure:
        parser.error(
            f"--nnodes {given.nnodes} needs a secret that the launchers of all hosts have: set "
            f"{protocol.SECRET_VARIABLE}, or give --secret-file FILE of mode 0600; or give --insecure, with which "
            "whoever reaches the port takes part. Make one with: python -c 'import secrets; print(secrets.token_hex())'"
        )
    return b"" if given.insecure else secrets.token_bytes()


def _check_program(parser: argparse.ArgumentParser, script: str, is_module: bool) -> None:
    if not is_module:
        if not any(path.is_file() for path in (pathlib.Path(script), pathlib.Path(script, "__main__.py"))):
            parser.error(f"there is no file {script!r} in {os.getcwd()}; options of the launcher go before the script")
        return
    # Only the top-level name: looking further would import the package.
    first = script.partition(".")[0]
    sys.path.insert(0, os.getcwd())
    try:
        found = importlib.util.find_spec(first)
    except (ImportError, ValueError):
        found = None
    finally:
        del sys.path[0]
    if found is None:
        parser.error(f"there is no module {script!r} in {os.getcwd()} or on Python's path")
