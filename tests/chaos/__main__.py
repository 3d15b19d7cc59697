"""`python -m tests.chaos --minutes 10`, from the source tree: faults at random, and a table of how they ended.

Each trial runs one scenario with a seed, which `--seed` repeats. It ends as expected, or it is counted as unexpected: a
hang, wrong bits, something left behind, or another end; its output is kept in a file. The exit status is 1 then.
"""

import argparse
import collections
import os
import pathlib
import platform
import signal
import statistics
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "support")]

import coming_hosts  # noqa: E402
import faults  # noqa: E402
import launched_jobs  # noqa: E402
import networks  # noqa: E402
from trial import Outcome, Trial, Unexpected  # noqa: E402

SCENARIOS = {f.__name__: f for module in (faults, launched_jobs, networks, coming_hosts) for f in module.SCENARIOS}
_PRIVATE = "JAX_RING_CHAOS_PRIVATE"


class Row:
    """What has come of one scenario."""

    def __init__(self) -> None:
        self.trials = self.faults = self.calls = 0
        self.ends: collections.Counter[str] = collections.Counter()
        self.seconds: list[float] = []

    def add(self, outcome: Outcome) -> None:
        self.trials += 1
        self.faults += outcome.faults
        self.calls += outcome.calls
        self.ends[outcome.ended] += 1
        self.seconds += outcome.seconds


def main() -> int:
    arguments = _parse()
    if arguments.private and os.environ.get(_PRIVATE) != "1":
        return _run_with_own_shared_memory()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
    names = arguments.scenario or list(SCENARIOS)
    rows = {name: Row() for name in names}
    unexpected: collections.Counter[str] = collections.Counter()
    began = time.monotonic()
    number = 0
    while time.monotonic() - began < 60 * arguments.minutes and number < arguments.trials:
        name, seed = names[number % len(names)], arguments.seed + number
        if arguments.seed_of_scenario is not None:
            seed = arguments.seed_of_scenario
        number += 1
        at = time.monotonic()
        try:
            rows[name].add(Trial(seed).run(SCENARIOS[name]))
        except Unexpected as error:
            rows[name].add(Outcome(f"UNEXPECTED: {error.kind}", 1))
            unexpected[error.kind] += 1
            path = arguments.output / f"chaos-{name}-{seed}.txt"
            path.write_text(f"{name}, --repeat {seed}\n{error}\n")
            print(f"{name}, --repeat {seed}: {error.kind}, see {path}", flush=True)
        except KeyboardInterrupt:  # the table so far
            break
        if arguments.verbose:
            print(f"{name} {seed}: {time.monotonic() - at:.1f} s", flush=True)
    minutes = (time.monotonic() - began) / 60
    print(table(rows, unexpected, minutes, arguments.seed))
    return 1 if unexpected else 0


def table(rows: dict[str, Row], unexpected: collections.Counter, minutes: float, seed: int) -> str:
    """The table, in Markdown."""
    lines = [
        f"{minutes:.0f} minutes, seed {seed}, {_processor()}, {os.cpu_count()} cores, load {os.getloadavg()[1]:.1f}, "
        f"Python {platform.python_version()}, JAX {_version('jax')}.",
        "",
        "| scenario | trials | faults | calls checked | ended | seconds, median | worst |",
        "|---|--:|--:|--:|---|--:|--:|",
    ]
    for name, row in rows.items():
        ends = ", ".join(f"{end} ({n})" if len(row.ends) > 1 else end for end, n in row.ends.most_common())
        median = f"{statistics.median(row.seconds):.1f}" if row.seconds else ""
        worst = f"{max(row.seconds):.1f}" if row.seconds else ""
        title = name.replace("_", " ")
        lines.append(f"| {title} | {row.trials} | {row.faults} | {row.calls:,} | {ends} | {median} | {worst} |")
    everything = [sum(getattr(row, name) for row in rows.values()) for name in ("trials", "faults", "calls")]
    found = ", ".join(f"{unexpected[kind]} {kind}" for kind in ("wrong bits", "hang", "leftover", "other end"))
    lines.append(f"| **all** | {everything[0]} | {everything[1]} | {everything[2]:,} | unexpected: {found} | | |")
    return "\n".join(lines)


def _processor() -> str:
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(package: str) -> str:
    import importlib.metadata

    return importlib.metadata.version(package)


def _run_with_own_shared_memory() -> int:
    """Runs this program with a small /dev/shm of its own, which it may fill without harm to others."""
    mount = 'mount --make-rprivate / && mount -t tmpfs -o size=256m tmpfs /dev/shm && exec "$@"'
    command = ["unshare", "--mount", "sh", "-ec", mount, "sh", sys.executable, "-m", "tests.chaos", *sys.argv[1:]]
    return subprocess.run(command, env={**os.environ, _PRIVATE: "1"}).returncode


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="how long to start new trials (default: 10)")
    parser.add_argument("--trials", type=int, default=10**9, help="at most so many trials")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="the first seed (default: the time)")
    parser.add_argument("--repeat", type=int, dest="seed_of_scenario", help="the seed of all trials, to repeat one")
    parser.add_argument("--scenario", action="append", choices=list(SCENARIOS), help="only this one; may be repeated")
    parser.add_argument("--private", action="store_true", help="with a small /dev/shm of its own; needs root")
    parser.add_argument(
        "--output", type=pathlib.Path, default=pathlib.Path(), help="where to keep the output of trials"
    )
    parser.add_argument("--verbose", action="store_true", help="name each trial, with its seconds")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
