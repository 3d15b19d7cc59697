"""Shows what a change did: compares two files of benchmarks/allreduce.py --json.

    python benchmarks/compare.py old.json new.json
    python benchmarks/allreduce.py ... --compare old.json

"old / new" is the old time over the new one. "against lax.psum" is the same with each time as a part of that of
lax.psum in the same file, which removes the speed of the machine on the day. Intervals are of 95 % confidence, by the
bootstrap. Runs of different machines are not compared.
"""

import argparse
import json
import pathlib
import sys
from typing import Any

from harness import FIGURES, intervals

from jax_ring.launcher import schema

REFERENCE = "lax.psum"
SAME, SAME_SOFTWARE = ("cpu", "family", "model", "cores", "usable_cores", "system"), ("python", "jax", "isa")


def load(path: str) -> dict:
    """The results in a file, with texts that may be printed.

    Raises:
      ValueError: if it has no results of a benchmark.
    """
    try:
        file = json.loads(pathlib.Path(path).read_text(), object_pairs_hook=_printable)
        dict.items(file["machine"])
        for (*message, implementation, _), samples in samples_of(file).items():
            schema.checked([*message, implementation], tuple[int, int, str, str])
            if min(schema.checked(samples, tuple[float, ...])) <= 0:
                raise ValueError(f"a time of {min(samples)}")
    except KeyError as error:
        raise ValueError(f"{path} has no results of a benchmark: it lacks {error}") from error
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} has no results of a benchmark: {schema.escaped(str(error))}") from error
    return file


def _printable(pairs: list[tuple[str, Any]]) -> dict:
    return {schema.escaped(key): schema.escaped(value) if isinstance(value, str) else value for key, value in pairs}


def differences(old: dict, new: dict, keys: tuple[str, ...]) -> list[str]:
    """What the machines of two files differ in, of what both files say."""
    before, after = old["machine"], new["machine"]
    values = [(key, before[key], after[key]) for key in keys if key in before and key in after]
    return [f"{key} {before} and {after}" for key, before, after in values if before != after]


def samples_of(file: dict) -> dict[tuple, list[float]]:
    """The timed runs by ranks, bytes, dtype, implementation and figure, of allreduce.py or loops.py."""
    found = {}
    for row in file["rows"]:
        message = (row["ranks"], row["bytes"], row["dtype"])
        for figure in FIGURES:
            if row.get(figure) and row[figure].get("samples"):
                found[*message, row["implementation"], figure] = row[figure]["samples"]
        found |= {(*message, name, "turn"): samples for name, samples in row.get("samples_us", {}).items()}
    return found


def check_comparable(old: dict, new: dict) -> list[str]:
    """Warnings about what differs between two files.

    Raises:
      ValueError: if they are of different machines, or have no row in common.
    """
    if different := differences(old, new, SAME):
        raise ValueError(f"the files are of different machines: {', '.join(different)}")
    before, after = samples_of(old), samples_of(new)
    if not before.keys() & after.keys():
        raise ValueError("the files have no row in common, or no samples: measure both with the same options")
    warnings = [f"the files differ in {each}" for each in differences(old, new, SAME_SOFTWARE)]
    for name, one, other in (("old", before, after), ("new", after, before)):
        missing = sorted({key[:4] for key in one.keys() - other.keys()})
        warnings += [
            f"only in the {name} file: {implementation}, {ranks} ranks, {size} bytes, {dtype}"
            for ranks, size, dtype, implementation in missing
        ]
    return warnings


def table(old: dict, new: dict) -> str:
    """A line for each figure of each row that both files have."""
    before, after = samples_of(old), samples_of(new)
    lines = [
        f"#{'ranks':>6} {'size (B)':>10} {'dtype':>13} {'implementation':>15} {'figure':>15} {'old us':>9}"
        f" {'new us':>9} {'old / new':>25} {'':>6} {'against lax.psum':>25}"
    ]
    for key in sorted(before.keys() & after.keys()):
        ranks, size, dtype, implementation, figure = key
        reference = (ranks, size, dtype, REFERENCE, figure)
        ratio = intervals.ratio(before[key], after[key], paired=False)
        against = ""
        if implementation != REFERENCE and all(
            reference in file and len(file[reference]) == len(file[key]) for file in (before, after)
        ):
            pairs = [(file[reference], file[key]) for file in (after, before)]
            change = intervals.ratio_of_ratios(*pairs)
            against = f"{change.bounds():>25} {change.verdict()}"
        times = [intervals.median(file[key]).value for file in (before, after)]
        lines.append(
            f" {ranks:>6} {size:>10} {dtype:>13} {implementation:>15} {figure:>15} {times[0]:>9.1f} {times[1]:>9.1f}"
            f" {ratio.bounds():>25} {ratio.verdict():>6} {against}".rstrip()
        )
    return "\n".join(lines)


def compare(old: dict, new: dict) -> str:
    return "\n".join([*(f"# warning: {warning}" for warning in check_comparable(old, new)), table(old, new)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("old")
    parser.add_argument("new")
    arguments = parser.parse_args()
    try:
        print(compare(load(arguments.old), load(arguments.new)))
    except (OSError, ValueError) as error:
        sys.exit(f"not compared: {error}")


if __name__ == "__main__":
    main()
