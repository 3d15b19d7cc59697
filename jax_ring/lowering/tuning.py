"""The thresholds of `algorithm="auto"`: built-in, or from a file (`JAX_RING_TUNING`)."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jax_ring.runtime import _ffi_cpu

VARIABLE = "JAX_RING_TUNING"
PLATFORMS = ("cpu", "cuda")
# A threshold that no message exceeds.
NO_LIMIT = (1 << 63) - 1
_MOST_DIGITS = 9  # of a number of ranks; Python refuses to read thousands of them


class Thresholds(NamedTuple):
    """The largest message in bytes for each algorithm; a ring above both.

    Attributes:
      one_shot: its limit.
      two_shot: its limit, above one-shot's.
    """

    one_shot: int
    two_shot: int

    def choose(self, num_bytes: int) -> str:
        """The algorithm for `num_bytes`."""
        return _ffi_cpu.choose(num_bytes, self.one_shot, self.two_shot)


Tuning = Mapping[str, Mapping[int, Thresholds]]  # by platform, then number of ranks


def read(path: str | os.PathLike) -> dict[str, dict[int, Thresholds]]:
    """Reads a file that `benchmarks/allreduce.py --tune` wrote.

    JSON: {"thresholds": {platform: {number of ranks: {"one_shot": bytes, "two_shot": bytes}}}}, with null for no limit.
    Other keys are ignored.

    Raises:
      ValueError: if it cannot be read, or is malformed.
    """

    def invalid(why: str) -> ValueError:
        return ValueError(
            f"{VARIABLE}={os.fspath(path)!r}: {why}. Regenerate it with benchmarks/allreduce.py --tune, or unset the "
            "variable."
        )

    if os.path.exists(path) and not os.path.isfile(path):  # a pipe would wait for who writes to it
        raise invalid("it is no file")
    try:
        data = json.loads(Path(path).read_text())
    except OSError as error:
        raise invalid(f"it cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise invalid(f"it is not a JSON file: {error}") from error
    tables = data.get("thresholds") if isinstance(data, dict) else None
    if not isinstance(tables, dict):
        raise invalid('there must be an object with the key "thresholds"')
    if unknown := sorted(set(tables) - set(PLATFORMS)):
        raise invalid(f"unknown platforms: {str(unknown)[1:-1]}; thresholds are for {' or '.join(PLATFORMS)}")
    result: dict[str, dict[int, Thresholds]] = {}
    for platform, table in tables.items():
        if not isinstance(table, dict) or not table:
            raise invalid(f"the thresholds for {platform} must be an object with a key for each number of ranks")
        for ranks, entry in table.items():
            if not ranks.isdecimal() or len(ranks) > _MOST_DIGITS or int(ranks) < 2:
                raise invalid(
                    f"{platform}: a number of ranks must be 2 or more, with at most {_MOST_DIGITS} digits, got "
                    f"{ranks!r:.80}"
                )
            try:
                result.setdefault(platform, {})[int(ranks)] = _thresholds(entry)
            except ValueError as error:
                raise invalid(f"{platform}, {ranks} ranks: {error}") from error
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
    """Writes a file for `read`, with `about` as further keys."""
    tables = {
        platform: {
            str(ranks): {name: None if value >= NO_LIMIT else value for name, value in thresholds._asdict().items()}
            for ranks, thresholds in sorted(table.items())
        }
        for platform, table in tuning.items()
    }
    Path(path).write_text(json.dumps({"thresholds": tables, **about}, indent=1) + "\n")


ACTIVE: Tuning = read(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else {}


def thresholds(platform: str, num_ranks: int) -> Thresholds:
    """The thresholds for groups of `num_ranks` on "cpu" or "cuda", the same in all processes.

    The file's entry for the next smaller number applies, or else its smallest; without a file or platform, the built-in
    ones.
    """
    table = ACTIVE.get(platform)
    if not table:
        return Thresholds(*_ffi_cpu.default_thresholds(num_ranks))
    entry = table[max((p for p in table if p <= num_ranks), default=min(table))]
    # CPU devices share one memory and have no neighbours, so a ring is never chosen.
    return entry._replace(two_shot=NO_LIMIT) if platform == "cpu" else entry


def describe() -> str:
    if not ACTIVE:
        return "built-in thresholds for algorithm='auto'"
    tables = (f"{platform} with {', '.join(map(str, sorted(table)))} ranks" for platform, table in ACTIVE.items())
    return f"thresholds for algorithm='auto' on {' and '.join(tables)}"
