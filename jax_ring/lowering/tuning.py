"""What `algorithm="auto"` stands for: thresholds between algorithms, ours or those of a file (`JAX_RING_TUNING`)."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jax_ring.runtime import _ffi_cpu

VARIABLE = "JAX_RING_TUNING"
PLATFORMS = ("cpu", "cuda")
# Every size is below this one: the threshold of an algorithm that never gives way to the next.
NO_LIMIT = (1 << 63) - 1


class Thresholds(NamedTuple):
    """The largest messages of a rank, in bytes, that go by one-shot, and, above those, by two-shot. A ring follows."""

    one_shot: int
    two_shot: int

    def choose(self, num_bytes: int) -> str:
        """The algorithm for a message of so many bytes. It is the engine itself that answers."""
        return _ffi_cpu.choose(num_bytes, self.one_shot, self.two_shot)


Tuning = Mapping[str, Mapping[int, Thresholds]]  # by platform, then number of ranks


def read(path: str | os.PathLike) -> dict[str, dict[int, Thresholds]]:
    """The thresholds in a file that `benchmarks/allreduce.py --tune` wrote.

    It is JSON with a key "thresholds": {platform: {number of ranks: {"one_shot": bytes, "two_shot": bytes}}}, where
    null in the place of the bytes means: of any size. Other keys are for people to read.

    Raises:
      ValueError: if the file cannot be read, or is not of that form.
    """

    def refuse(why: str) -> ValueError:
        return ValueError(
            f"{VARIABLE}={os.fspath(path)!r}: {why}. Write it anew with benchmarks/allreduce.py --tune, or unset the "
            "variable."
        )

    try:
        data = json.loads(Path(path).read_text())
    except OSError as error:
        raise refuse(f"it cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise refuse(f"it is no JSON file: {error}") from error
    tables = data.get("thresholds") if isinstance(data, dict) else None
    if not isinstance(tables, dict):
        raise refuse('there must be an object with the key "thresholds"')
    if unknown := sorted(set(tables) - set(PLATFORMS)):
        raise refuse(f"thresholds are for {' or '.join(PLATFORMS)}, and not for {', '.join(unknown)}")
    result: dict[str, dict[int, Thresholds]] = {}
    for platform, table in tables.items():
        if not isinstance(table, dict) or not table:
            raise refuse(f"the thresholds for {platform} must be an object, with a key for each number of ranks")
        for ranks, entry in table.items():
            if not ranks.isdecimal() or int(ranks) < 2:
                raise refuse(f"{platform}: a number of ranks must be 2 or more, got {ranks!r}")
            try:
                result.setdefault(platform, {})[int(ranks)] = _thresholds(entry)
            except ValueError as error:
                raise refuse(f"{platform}, {ranks} ranks: {error}") from error
    return result


def _thresholds(entry: Any) -> Thresholds:
    if not isinstance(entry, dict) or set(entry) != set(Thresholds._fields):
        raise ValueError(f'needs "one_shot" and "two_shot" and nothing else, got {json.dumps(entry)}')
    for name, value in entry.items():
        if value is not None and (type(value) is not int or not 0 <= value <= NO_LIMIT):
            raise ValueError(f'"{name}" must be a number of bytes or null, got {json.dumps(value)}')
    one_shot, two_shot = (NO_LIMIT if entry[name] is None else entry[name] for name in Thresholds._fields)
    if two_shot < one_shot:
        raise ValueError(f'"two_shot" must not be less than "one_shot", got {two_shot} and {one_shot}')
    return Thresholds(one_shot, two_shot)


def write(path: str | os.PathLike, tuning: Tuning, **about: Any) -> None:
    """Writes a file for `read`. about: what else to put in it."""
    tables = {
        platform: {
            str(ranks): {name: None if value >= NO_LIMIT else value for name, value in thresholds._asdict().items()}
            for ranks, thresholds in sorted(table.items())
        }
        for platform, table in tuning.items()
    }
    Path(path).write_text(json.dumps({"thresholds": tables, **about}, indent=1) + "\n")


IN_FORCE: Tuning = read(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else {}


def thresholds(platform: str, num_ranks: int) -> Thresholds:
    """Those in force for groups of `num_ranks` on a platform, "cpu" or "cuda".

    Where the file has none for this number of ranks, those for the next smaller one, or else for the smallest; where it
    has none for the platform, or there is no file, ours. All processes of a program must have the same.
    """
    table = IN_FORCE.get(platform)
    if not table:
        return Thresholds(*_ffi_cpu.default_thresholds(num_ranks))
    found = table[max((p for p in table if p <= num_ranks), default=min(table))]
    # Ranks on CPU devices have the memory that they share, and no neighbours.
    return found._replace(two_shot=NO_LIMIT) if platform == "cpu" else found


def in_force() -> str:
    """In words, what is in force."""
    if not IN_FORCE:
        return "the thresholds of algorithm='auto' are ours"
    tables = (f"{platform} with {', '.join(map(str, sorted(table)))} ranks" for platform, table in IN_FORCE.items())
    return f"thresholds of algorithm='auto' for {' and '.join(tables)}"
