"""Makes the tables of the README, of the site and of the lab book from all files in benchmarks/results.

    python benchmarks/tables.py

writes each between its marks, `<!-- table: NAME -->` and `<!-- end -->`. A ratio is `lax.psum`'s time over ring_psum's
in the same run, of medians. A cell has the lowest and the highest of all runs and numbers of devices. The about.json of
a folder has what its files do not say: the processor, the commit, and whether it was an earlier engine.
"""

import argparse
import json
import math
import pathlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import scaling
from harness import intervals
from harness.report import SMALL, size_name

ROOT = pathlib.Path(__file__).parents[1]
LAB_BOOK = ROOT / "benchmarks/LAB_BOOK.md"
PAGES = (ROOT / "README.md", ROOT / "docs/index.md", ROOT / "docs/performance.md", LAB_BOOK)
TIMES, TO = "\N{MULTIPLICATION SIGN}", "\N{EN DASH}"
SIZES = tuple(1 << n for n in (12, 16, 18, 20, 22, 24))
EVERY = "all of today's engine"
AIMS = (60, 80, 90, 90, 90)  # percent of the limit, for all sizes but the first


class Run(NamedTuple):
    """A file of results."""

    kind: str  # the benchmark
    machine: dict
    rows: list[dict]

    @property
    def is_usual(self) -> bool:
        """Today's engine, on all cores, with the fastest instruction set of the processor."""
        return not (self.machine.get("engine") or self.machine.get("forced_isa")) and not self.has_fewer_cores

    @property
    def has_fewer_cores(self) -> bool:
        return self.machine.get("usable_cores", self.machine["cores"]) < self.machine["cores"]

    @property
    def label(self) -> str:
        parts = [self.machine["processor"], f"JAX {'.'.join(self.machine['jax'].split('.')[:2])}"]
        parts += [self.machine["forced_isa"]] if self.machine.get("forced_isa") else []
        cores = self.machine.get("usable_cores", self.machine["cores"])
        parts += [f"{cores} core{'s' * (cores > 1)}"] if self.has_fewer_cores or cores > 2 else []
        return ", ".join([*parts, *([self.machine["engine"]] if self.machine.get("engine") else [])])


def load(folder: pathlib.Path = ROOT / "benchmarks/results") -> list[Run]:
    """The runs on CPUs, those of today's engine first."""
    runs = []
    for path in sorted(folder.glob("cpu-*/*-*.json")):
        about = path.with_name("about.json")
        file = json.loads(path.read_text())
        machine = file["machine"] | (json.loads(about.read_text()) if about.exists() else {})
        runs.append(Run(path.name.split("-")[0], machine, file["rows"]))
    return sorted(runs, key=lambda run: (not run.is_usual, "engine" in run.machine, run.label))


class Ratio(NamedTuple):
    ranks: int
    size: int
    value: intervals.Interval


def ratio_of(numerator: dict, denominator: dict) -> intervals.Interval:
    """A ratio of two figures of a run, without an interval where their samples are not there."""
    if numerator.get("samples") and len(numerator["samples"]) == len(denominator.get("samples", [])):
        return intervals.ratio(numerator["samples"], denominator["samples"])
    value = numerator["median"] / max(denominator["median"], 1e-3)
    return intervals.Interval(value, value, value)


def ratios(run: Run, figure: str, dtype: str) -> Iterator[Ratio]:
    """`lax.psum`'s time over ring_psum's, by ranks and size, of a file of allreduce.py or loops.py."""
    rows = {(row["ranks"], row["bytes"], row.get("implementation")): row for row in run.rows if row["dtype"] == dtype}
    for (ranks, size, name), row in rows.items():
        if "reported" in row:  # the lowest and the highest of other people's runs
            for value in row["reported"].get(figure, []):
                yield Ratio(ranks, size, intervals.Interval(value, value, value))
        elif figure == "turn":
            yield Ratio(ranks, size, intervals.Interval(row["speedup"], *row["speedup_interval"]))
        elif name == "ring_psum" and (lax := rows.get((ranks, size, "lax.psum"))) and row.get(figure):
            yield Ratio(ranks, size, ratio_of(lax[figure], row[figure]))


def number(value: float) -> str:
    return f"{value:.2f}" if value < 2 else f"{value:.1f}" if value < 10 else f"{value:.0f}"


def span(values: Iterable[float], unit: str = TIMES) -> str:
    """The lowest and the highest."""
    values = list(values)
    texts = dict.fromkeys(number(value) for value in (min(values), max(values))) if values else ()
    return TO.join(texts) + unit * bool(values)


def table(titles: list[str], rows: Iterable[list[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join("|".join(["", *(f" {cell} " if cell else " " for cell in cells), ""]) for cells in lines)


def by_label(runs: list[Run], kind: str, *extra: str) -> dict[str, list[Run]]:
    """The runs of a kind by label, and all usual ones together, if these are more than one label."""
    groups = defaultdict(list)
    for run in runs:
        if run.kind in (kind, *extra):
            groups[run.label].append(run)
    usual = [run for several in groups.values() for run in several if run.is_usual]
    return ({EVERY: usual} if len({run.label for run in usual}) > 1 else {}) | groups


def number_of_runs(found: list[Ratio]) -> str:
    """How often each ratio was measured."""
    counts = defaultdict(int)
    for ratio in found:
        counts[ratio.ranks, ratio.size] += 1
    return TO.join(dict.fromkeys(str(n) for n in (min(counts.values()), max(counts.values()))))


def ratio_table(runs: list[Run], kind: str, figure: str, dtypes: Iterable[str], sizes: tuple[int, ...] = SIZES) -> str:
    """A line for each machine and type, with the lowest of all ratios, and how often each was measured."""
    lines = []
    for dtype in dtypes:
        for label, several in by_label(runs, kind).items():
            found = [ratio for run in several for ratio in ratios(run, figure, dtype) if ratio.size in sizes]
            if not found:
                continue
            lowest = min(found, key=lambda ratio: ratio.value.value)
            worst = lowest.value
            lines.append(
                [label + f", {dtype}" * (dtype != "float32")]
                + [span(ratio.value.value for ratio in found if ratio.size == size) for size in sizes]
                + [f"{bounded(worst) if worst.low < worst.high else number(worst.value) + TIMES}, p = {lowest.ranks}"]
                + [number_of_runs(found)]
            )
    return table(["", *map(size_name, sizes), "lowest", "runs"], lines)


def processor_table(runs: list[Run]) -> str:
    """A line for each processor, by today's engine: in a loop by size, in other ways over all sizes."""
    columns = {size_name(size): ("allreduce", "in_loop", (size,)) for size in (1 << 12, 1 << 16, 1 << 20, 1 << 24)}
    columns["with a product"] = ("loops", "turn", SIZES)
    columns["from Python"] = ("allreduce", "out_of_place", SIZES)
    columns["donated"] = ("allreduce", "in_place", SIZES)

    def cell(several: list[Run], kind: str, figure: str, sizes: tuple[int, ...]) -> str:
        found = (ratio for run in several if run.kind == kind for ratio in ratios(run, figure, "float32"))
        return span(ratio.value.value for ratio in found if ratio.size in sizes)

    labels = by_label([run for run in runs if run.is_usual], "allreduce", "loops")
    lines = [[label, *(cell(several, *column) for column in columns.values())] for label, several in labels.items()]
    return table(["", *columns], lines)


def limit_table(runs: list[Run]) -> str:
    """Times in loops in units that carry over: round trips of a cache line, and parts of the limit."""
    lines = []
    for label, several in by_label(runs, "allreduce").items():
        for dtype in ("float32", "bfloat16", "int32") if label != EVERY else ():
            cells = defaultdict(list)
            for run in several:
                trip, switch = run.machine.get("round_trip_us"), run.machine.get("switch_us")
                for row in run.rows:
                    if row["dtype"] != dtype or row.get("implementation") != "ring_psum":
                        continue
                    time = max(row["in_loop"]["median"], 1e-3)
                    if row["bytes"] <= SMALL and trip:
                        more = row["ranks"] > (cores := run.machine["usable_cores"])
                        aim = 20 * row["ranks"] * trip + more * row["ranks"] / cores * switch
                        cells[row["bytes"]].append((time / row["ranks"] / trip, time / aim))
                    elif row["bytes"] > SMALL and not math.isnan(row.get("limit_us", math.nan)):
                        cells[row["bytes"]].append((100 * row["limit_us"] / time, None))
            small = [pair for size in (4, 4096) for pair in cells[size]]
            if not any(cells.values()):
                continue
            lines.append(
                [label + f", {dtype}" * (dtype != "float32")]
                + [span((multiple for multiple, _ in cells[size]), " pt") for size in (4, 4096)]
                + [span((part for _, part in small), "")]
                + [share(part for part, _ in cells[size]) for size in SIZES[1:]]
            )
    titles = ["", "4 B", "4 KiB", "of the aim", *(f"{size_name(size)}, %" for size in SIZES[1:])]
    aims = ["*aim*", "", "", "*1*", *(f"*{aim}*" for aim in AIMS)]
    return table(titles, [aims, *lines])


def share(parts: Iterable[float]) -> str:
    """The lowest and the highest part of the limit. More is not possible, so one of the two was disturbed."""
    texts = ["above" if part > 100 else f"{part:.0f}" for part in sorted(parts)]
    return TO.join(dict.fromkeys((texts[0], texts[-1]))) if texts else ""


def train_table(runs: list[Run], together: bool = False) -> str:
    """Ratios of whole training steps, beside those of a step without any collective; `together`, of all usual runs."""
    lines = defaultdict(lambda: defaultdict(list))
    for label, several in by_label(runs, "train_step").items():
        for run in several if label == EVERY or not together else ():
            for row in run.rows:
                if row["variant"] in ("ring_psum, fused", "override_lax()", "no collective"):
                    lines[label, row["model"], row["dtype"]][row["ranks"], row["variant"] == "no collective"].append(
                        row["speedup"]
                    )
    ranks = (4, 8)
    titles = ["", "model", "type", *(title for p in ranks for title in (f"p = {p}", "no collective")), "runs"]
    rows = [
        [*key, *(span(cells[p, floor]) for p in ranks for floor in (False, True)), str(max(map(len, cells.values())))]
        for key, cells in lines.items()
    ]
    return table(titles[together:], [row[together:] for row in rows])


def against_table(runs: list[Run]) -> str:
    """An earlier commit's time over today's, from processes in turn; samples of all processes of a file together."""
    names = {"in_loop": "in a loop", "turn": "with a product", "out_of_place": "from Python"}
    sizes, cells = (4, 1 << 12, 1 << 16, 1 << 18), defaultdict(lambda: defaultdict(list))
    for run in runs:
        for row in run.rows if run.kind == "against" else ():
            if row["implementation"] == "ring_psum" and row["figure"] in names:
                key = (run.label, run.machine["against"], names[row["figure"]], str(row["ranks"]))
                cells[key][row["bytes"]].append(intervals.ratio(row["old_us"], row["new_us"], paired=False))
    return table(
        ["", "commit", "", "p", *map(size_name, sizes)],
        [[*key, *(", ".join(map(bounded, found[size])) for size in sizes)] for key, found in sorted(cells.items())],
    )


def bounded(ratio: intervals.Interval) -> str:
    return f"{number(ratio.value)}{TIMES} ({number(ratio.low)}{TO}{number(ratio.high)})"


def scaling_table(runs: list[Run]) -> str:
    labels = by_label(runs, "scaling")
    return "\n\n".join(
        f"{label}, one run:\n\n" + scaling.table([row for run in several for row in run.rows])
        for label, several in labels.items()
        if label != EVERY and any(run.is_usual for run in several)
    )


def headline(runs: list[Run]) -> str:
    """The sentence of the README, of all runs of today's engine."""
    usual = [run for run in runs if run.is_usual and run.kind == "allreduce"]
    found = [ratio for run in usual for ratio in ratios(run, "in_loop", "float32")]
    small, large = (span(ratio.value.value for ratio in found if ratio.size == size) for size in (1 << 12, 1 << 20))
    return f"In a jitted loop a sum of 4 KiB is {small} as fast as `lax.psum`, of 1 MiB {large}"


def machines(runs: list[Run]) -> str:
    """What was measured on: a line for each processor and version."""
    columns = {"t, µs": "round_trip_us", "s, µs": "switch_us", "memory, GB/s": "memory_gb_s"}
    lines = defaultdict(lambda: defaultdict(list))
    for run in runs:
        versions = " and ".join(filter(None, (run.machine.get("python"), run.machine["jax"])))
        for key in (*columns.values(), "jax_ring"):
            lines[run.label, versions][key] += [run.machine[key]] if run.machine.get(key) else []
        lines[run.label, versions]["round_trip_us"] += filter(None, [run.machine.get("round_trip_at_end_us")])
    return table(
        ["", "Python and JAX", *columns, "jax_ring"],
        [
            [*key, *(span(found[name], "") for name in columns.values()), ", ".join(dict.fromkeys(found["jax_ring"]))]
            for key, found in lines.items()
        ],
    )


TABLES: dict[str, Callable[[list[Run]], str]] = {
    "headline": headline,
    "machines": machines,
    "loop": lambda runs: ratio_table(runs, "allreduce", "in_loop", ("float32", "bfloat16", "float16", "int32")),
    "product": lambda runs: ratio_table(runs, "loops", "turn", ("float32", "bfloat16")),
    "python": lambda runs: ratio_table(runs, "allreduce", "out_of_place", ("float32",)),
    "donated": lambda runs: ratio_table(runs, "allreduce", "in_place", ("float32",)),
    "limit": limit_table,
    "against": against_table,
    "devices": scaling_table,
    "train": train_table,
    # Of today's engine alone.
    "processors": processor_table,
    "steps": lambda runs: train_table(runs, together=True),
}


def filled(text: str, runs: list[Run]) -> str:
    """The text with each table between its marks. A table stands on lines of its own, a sentence in its line."""

    def fill(match: re.Match) -> str:
        made = TABLES[match["name"]](runs)
        around = "\n\n" if "\n" in made else ""
        return f"<!-- table: {match['name']} -->{around}{made}{around}<!-- end -->"

    return re.sub(r"<!-- table: (?P<name>\w+) -->.*?<!-- end -->", fill, text, flags=re.DOTALL)


def main() -> None:
    argparse.ArgumentParser(description=__doc__.split("\n\n")[0]).parse_args()
    runs = load()
    for page in PAGES:
        page.write_text(filled(page.read_text(), runs))


if __name__ == "__main__":
    main()
