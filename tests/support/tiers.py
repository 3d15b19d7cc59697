"""Which tests the plain command `pytest` leaves out, and which CI runs with one pair of Python and JAX alone.

The one place that says so. Patterns are regular expressions that match the beginning of a test's id below tests/.
"""

import functools
import re

# What CI's invocations select. Together they run every test: test_tiers.py.
PLAIN = "not full"  # with the oldest pair
REST_OF_OLDEST = "full and one_pair"
NEWEST = "not one_pair"

MARKERS = {
    "full": "left out of the plain command, whose tests are something of every feature; CI runs it",
    "one_pair": "does not depend on JAX's version; CI runs it with the oldest pair alone",
}

FULL: list[str] = []
ONE_PAIR: list[str] = []


@functools.cache
def _compiled(marker: str) -> re.Pattern:
    return re.compile("|".join({"full": FULL, "one_pair": ONE_PAIR}[marker]) or "(?!)")


def markers_of(name: str) -> list[str]:
    """The markers of a test, by its id below tests/."""
    return [marker for marker in MARKERS if _compiled(marker).match(name)]


def selects(expression: str, markers: list[str]) -> bool:
    """Whether `pytest -m expression` runs a test with these markers."""
    return bool(eval(expression, {}, {marker: marker in markers for marker in MARKERS}))
