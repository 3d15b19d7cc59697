"""`python -m tests.chaos --minutes 10`, from the source tree: faults at random, and a table of how they ended.

Each trial runs one scenario with a seed, which `--repeat` repeats. It ends as expected, or it is counted as
unexpected: a hang, wrong bits, something left behind, or another end; its output is kept in a file. The exit status is
1 then. `--results FILE` adds a line of JSON for each trial, and goes on after the last seed there; `--table FILE ...`
prints the table of such files.
"""

import argparse
import collections
import functools
import importlib.metadata
import json
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

import any_fault  # noqa: E402
import faults  # noqa: E402
import launched_jobs  # noqa: E402
import networks  # noqa: E402
import scipy.stats  # noqa: E402
from trial import FALSE_ALARM, Outcome, Trial, Unexpected  # noqa: E402

_MODULES = (faults, launched_jobs, networks, any_fault)
SCENARIOS = {f.__name__: f for module in _MODULES for f in module.SCENARIOS}
_PRIVATE = "JAX_RING_CHAOS_PRIVATE"
UNEXPECTED = "UNEXPECTED: "


class Row:
    """What has come of one scenario, or of one kind of fault.

    failed: faults that have not ended as expected.
    """

    def __init__(self) -> None:
        self.trials = self.faults = self.calls = self.failed = 0
        self.ends: collections.Counter[str] = collections.Counter()
        self.seconds: list[float] = []

    def add(self, outcome: Outcome) -> None:
        self.trials += 1
        self.faults += outcome.faults
        self.calls += outcome.calls
        self.ends[outcome.ended] += 1
        self.seconds += outcome.seconds
        self.failed += outcome.faults if outcome.ended.startswith(UNEXPECTED) else 0

    @property
    def bound(self) -> str:
        """With 95 % probability more faults than this end as expected, in percent (Clopper and Pearson)."""
        good = self.faults - self.failed
        return f"{100 * scipy.stats.beta.ppf(0.05, good, self.failed + 1):.1f}" if good else ""


class Results:
    """The rows of many trials.

    Attributes:
      unexpected: trials by the kind of an end that was not expected.
      minutes: of all trials.
      where: machines, versions and commits.
    """

    def __init__(self) -> None:
        self.rows: collections.defaultdict[str, Row] = collections.defaultdict(Row)
        self.unexpected: collections.Counter[str] = collections.Counter()
        self.minutes = 0.0
        self.where: dict[str, None] = {}

    def add(self, line: dict) -> None:
        """A trial, as a line of `--results` has it."""
        for name, *outcome in line["outcomes"]:
            self.rows[name].add(Outcome(*outcome))
        self.unexpected.update([line["unexpected"]] if line["unexpected"] else [])
        self.minutes += line["seconds"] / 60
        self.where[line["where"]] = None


def main() -> int:
    arguments = _parse()
    results = Results()
    if arguments.table:
        for path in arguments.table:
            for line in path.read_text().splitlines():
                results.add(json.loads(line))
        print(table(results))
        return 0
    if arguments.private and os.environ.get(_PRIVATE) != "1":
        return _run_with_own_shared_memory()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
    names = arguments.scenario or list(SCENARIOS)
    seed, began = _first_seed(arguments), time.monotonic()
    for number in range(arguments.trials):
        if time.monotonic() - began > 60 * arguments.minutes:
            break
        name = names[number % len(names)]
        this = seed + number if arguments.seed_of_scenario is None else arguments.seed_of_scenario
        try:
            line = _tried(name, Trial(this, arguments.hosts), arguments.output)
        except KeyboardInterrupt:  # the table so far
            break
        results.add(line)
        if arguments.verbose:
            print(f"{name} {this}: {line['seconds']:.1f} s", flush=True)
        if arguments.results:
            with open(arguments.results, "a") as file:
                file.write(json.dumps(line) + "\n")
    print(table(results))
    return 1 if results.unexpected else 0


def _first_seed(arguments: argparse.Namespace) -> int:
    if arguments.seed is not None:
        return arguments.seed
    if arguments.results and arguments.results.exists():
        return 1 + max((json.loads(line)["seed"] for line in arguments.results.read_text().splitlines()), default=-1)
    return 0 if arguments.results else int(time.time())


def _tried(name: str, trial: Trial, folder: pathlib.Path) -> dict:
    """Runs a scenario; returns the line for its results."""
    at, seed, unexpected = time.monotonic(), trial.seed, None
    try:
        outcome = trial.run(SCENARIOS[name])
    except Unexpected as error:
        unexpected = error.kind
        name_of_part, num_faults = trial.part or (name, 1)
        trial.outcomes.append((name_of_part, Outcome(f"{UNEXPECTED}{unexpected}", num_faults)))
        path = folder / f"chaos-{name}-{seed}.txt"
        path.write_text("\n".join([f"{name}, --repeat {seed}, {name_of_part}", *trial.notes, str(error), ""]))
        print(f"{name}, --repeat {seed}, {name_of_part}: {unexpected}, see {path}", flush=True)
    else:
        trial.outcomes.append((trial.part[0] if trial.part else name, outcome))
    return {
        "scenario": name, "seed": seed, "seconds": round(time.monotonic() - at, 1), "unexpected": unexpected,
        "outcomes": [(name, *outcome) for name, outcome in trial.outcomes], "where": _where(),
    }  # fmt: skip


def table(results: Results) -> str:
    """The table, in Markdown."""
    calls = any(row.calls for row in results.rows.values())
    lines = [
        f"{results.minutes:.0f} minutes; {'; '.join(results.where)}.",
        "",
        f"| | times | faults | {'calls checked | ' if calls else ''}ended | % at least | seconds, median | 99 % |",
        f"|---|--:|--:|{'--:|' if calls else ''}---|--:|--:|--:|",
    ]
    total = Row()
    for name, row in sorted(results.rows.items()):
        ends = ", ".join(f"{end} ({n})" if len(row.ends) > 1 else end for end, n in row.ends.most_common())
        lines.append(_line(name.replace("_", " "), row, ends, calls))
        for what in ("trials", "faults", "calls", "failed", "seconds"):
            setattr(total, what, getattr(total, what) + getattr(row, what))
    found = ", ".join(f"{results.unexpected[kind]} {kind}" for kind in ("wrong bits", "hang", "leftover", "other end"))
    alarms = sum(row.ends[FALSE_ALARM] for row in results.rows.values())
    lines.append(_line("**all**", total, f"unexpected: {found}; {alarms} false alarms", calls))
    return "\n".join(lines)


def _line(title: str, row: Row, ends: str, has_calls: bool) -> str:
    seconds = sorted(row.seconds)
    median = f"{statistics.median(seconds):.1f}" if seconds else ""
    late = f"{seconds[int(0.99 * len(seconds))]:.1f}" if seconds else ""
    calls = f"{row.calls:,} | " if has_calls else ""
    return f"| {title} | {row.trials} | {row.faults} | {calls}{ends} | {row.bound} | {median} | {late} |"


@functools.cache
def _where() -> str:
    git = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=HERE, capture_output=True, text=True)
    versions = f"Python {platform.python_version()}, JAX {importlib.metadata.version('jax')}"
    return f"{_processor()}, {os.cpu_count()} cores, {versions}, commit {git.stdout.strip() or 'unknown'}"


def _processor() -> str:
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _run_with_own_shared_memory() -> int:
    """Runs this program with a small /dev/shm of its own, which it may fill without harm to others."""
    mount = 'mount --make-rprivate / && mount -t tmpfs -o size=256m tmpfs /dev/shm && exec "$@"'
    command = ["unshare", "--mount", "sh", "-ec", mount, "sh", sys.executable, "-m", "tests.chaos", *sys.argv[1:]]
    return subprocess.run(command, env={**os.environ, _PRIVATE: "1"}).returncode


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="how long to start new trials (default: 10)")
    parser.add_argument("--trials", type=int, default=10**9, help="at most so many trials")
    parser.add_argument("--seed", type=int, help="the first seed (default: after those of --results, or the time)")
    parser.add_argument("--repeat", type=int, dest="seed_of_scenario", help="the seed of all trials, to repeat one")
    parser.add_argument("--scenario", action="append", choices=list(SCENARIOS), help="only this one; may be repeated")
    parser.add_argument(
        "--hosts", type=int, choices=list(any_fault.PROCESSES), help="of any_fault (default: both in turn, by seed)"
    )
    parser.add_argument("--private", action="store_true", help="with a small /dev/shm of its own; needs root")
    parser.add_argument(
        "--output", type=pathlib.Path, default=pathlib.Path(), help="where to keep the output of trials"
    )
    parser.add_argument("--results", type=pathlib.Path, help="a file to which a line is added for each trial")
    parser.add_argument("--table", type=pathlib.Path, nargs="+", help="only print the table of such files")
    parser.add_argument("--verbose", action="store_true", help="name each trial, with its seconds")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
