"""Tables that fit a terminal of 80 columns and show ten rows."""

import os
import textwrap
from collections.abc import Sequence

ROWS = 10


def relative(text: str) -> str:
    """Without the working directory in front of files below it."""
    here = os.path.join(os.getcwd(), "")
    return text.removeprefix(here).replace(f" {here}", " ")


def wrapped(text: str) -> list[str]:
    return textwrap.wrap(
        text, 80, initial_indent="      ", subsequent_indent="      ", break_long_words=False, break_on_hyphens=False
    )


def left_out(num_rows: int, field: str) -> list[str]:
    return [f"  ... {num_rows - ROWS} more in .{field}"] if num_rows > ROWS else []


def table(
    title: str, header: Sequence[str], rows: Sequence[Sequence[str]], details: Sequence[Sequence[str]], field: str
) -> str:
    """Columns of numbers, with details of any width below each row. `field` has all rows."""
    shown = rows[:ROWS]
    widths = [max(map(len, column)) for column in zip(header, *shown, strict=True)]
    head, *lines = ["  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)) for row in (header, *shown)]
    text = [title, f"  {head.rstrip()}"]
    for line, parts in zip(lines, details, strict=False):
        text += [f"  {line.rstrip()}", *wrapped("; ".join(filter(None, parts)))]
    return "\n".join([*text, *left_out(len(rows), field), ""])
