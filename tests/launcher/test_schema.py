"""What other processes send is of its type, or refused."""

import math
import signal
from typing import Any, NamedTuple

import pytest

from jax_ring.launcher.schema import read

pytestmark = pytest.mark.one_pair  # of Python's types alone


class Point(NamedTuple):
    x: int
    name: str | None


@pytest.mark.parametrize(
    ("text", "kind", "expected"),
    [
        ("true", bool, True), ("3", int, 3), ("3", float, 3.0), ("-0.5", float, -0.5), ('"a"', str, "a"),
        ("15", signal.Signals, signal.SIGTERM), ("[1, [2]]", Any, [1, [2]]), ("null", int | None, None),
        ("4", int | None, 4), ("[]", tuple[()], ()), ("[]", tuple[int, ...], ()), ("[1, 2]", tuple[int, ...], (1, 2)),
        ('[1, "a"]', tuple[int, str], (1, "a")), ('[1, "a"]', Point, Point(1, "a")),
        (b"[[1, null]]", tuple[Point, ...], (Point(1, None),)), ("Infinity", float, math.inf),
    ],
)  # fmt: skip
def test_what_is_of_a_type(text, kind, expected):
    found = read(text, kind)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("1", bool), ("true", int), ("3.0", int), ("true", float), ("NaN", float), ("1" + 400 * "0", float),
        ('"3"', int), ("3", str), ("99", signal.Signals), ("null", int), ('"a"', int | None), ('"ab"', tuple[str, ...]),
        ('{"a": 1}', tuple[str, ...]), ("[1]", tuple[()]), ("[1]", tuple[int, str]), ("[1, 2]", tuple[int, str]),
        ("[[1], 2]", tuple[int, ...]), ("[1]", Point), ('{"x": 1, "name": "a"}', Point), ("1", Point),
        ("", int), ("[1", tuple[int, ...]), (b"\xff", str), ("[" * 50000, tuple[int, ...]),
    ],
)  # fmt: skip
def test_what_is_not(text, kind):
    with pytest.raises(ValueError, match=r"is no|is nested|Expecting|decode") as caught:
        read(text, kind)
    assert len(str(caught.value)) < 300
