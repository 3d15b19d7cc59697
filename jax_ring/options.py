"""The options of a collective: which algorithm runs it, and in which order its values are folded."""

from typing import NamedTuple

ALGORITHMS = ("auto", "one_shot", "two_shot", "ring")
ORDERS = ("rank", "ring")


class Options(NamedTuple):
    """Options of one call, alike on all ranks; hashable, since they are parameters of the primitive."""

    algorithm: str = "auto"
    order: str = "rank"

    def chosen(self) -> str:
        """Those that are not the default, as they are written in a call; empty if all are."""
        return ", ".join(
            f"{name}={value!r}" for name, value in self._asdict().items() if value != self._field_defaults[name]
        )


def make_options(function: str, algorithm: str = "auto", order: str = "rank") -> Options:
    """The options as given to `function`.

    Raises:
      ValueError: if one is none of its choices, or the algorithm cannot fold in that order.
    """
    for name, value, choices in (("algorithm", algorithm, ALGORITHMS), ("order", order, ORDERS)):
        if value not in choices:
            raise ValueError(f"{function}: {name} must be one of {', '.join(map(repr, choices))}; got {value!r}")
    if order == "ring" and algorithm not in ("auto", "ring"):
        raise ValueError(
            f"{function}: order='ring' needs algorithm='ring' or 'auto', since no other algorithm folds in that "
            f"order; got algorithm={algorithm!r}. With order='rank' every algorithm gives the same result."
        )
    return Options(algorithm, order)
