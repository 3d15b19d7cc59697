"""Parameters of which some values have marks: the tiers of tests are described in pyproject.toml, at `markers`."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest

Marks = pytest.MarkDecorator | Collection[pytest.MarkDecorator]


def full_but(values: Iterable[Any], keep: Collection[Any]) -> list[Any]:
    """Values to parametrize with, of which the plain command runs those to keep. A tuple has several parameters."""
    values = list(values)
    if missing := [value for value in keep if value not in values]:
        raise ValueError(f"{missing} are no values of this parameter")
    return [value if value in keep else _marked(value, pytest.mark.full) for value in values]


def _marked(value: Any, marks: Marks) -> Any:
    return pytest.param(*(value if type(value) is tuple else (value,)), marks=marks)


def vma_fixture(with_vma: Marks = (), without_vma: Marks = ()) -> Any:
    """The fixture `check_vma`: both modes of shard_map, with and without tracking of varying manual axes."""
    # Without vma a test takes the same steps.
    without = [pytest.mark.full, *(without_vma if isinstance(without_vma, Collection) else [without_vma])]

    @pytest.fixture(params=[_marked(True, with_vma), _marked(False, without)], ids=["vma", "no_vma"])
    def check_vma(request: pytest.FixtureRequest) -> bool:
        return request.param

    return check_vma
