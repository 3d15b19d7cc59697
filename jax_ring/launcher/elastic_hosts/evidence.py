"""What a launcher knows of others that it has lost: whether they have ended, and since when they are silent."""

import dataclasses
import math
import time

from jax_ring.launcher.elastic_hosts.groups import Group

# A launcher goes on without the other of two only if that one cannot have given it up before it ended. This is the part
# of the time after which it would have, so that clocks may differ a little.
_MARGIN = 0.8


@dataclasses.dataclass
class _Loss:
    """heard, acknowledged: as in `Link`. ended: by when it is known to have ended. at: the time of day."""

    heard: float
    acknowledged: float = -math.inf
    ended: float | None = None
    at: str = dataclasses.field(default_factory=lambda: time.strftime("%H:%M:%S"))


class Evidence:
    """Of other launchers, by id.

    silence: after so many seconds without a sign of life launchers give each other up.
    """

    def __init__(self, silence: float) -> None:
        self._silence = silence
        self._losses: dict[str, _Loss] = {}

    def found(self, host: str) -> None:
        self._losses.pop(host, None)

    def lost(self, host: str, heard: float, acknowledged: float) -> None:
        """A connection to it has ended. The numbers are those of `Link`."""
        self._losses[host] = _Loss(heard, acknowledged)

    def ended(self, host: str) -> None:
        """Nobody listens at its address, or somebody else."""
        loss = self._losses.setdefault(host, _Loss(time.monotonic()))
        if loss.ended is None:
            loss.ended = time.monotonic()

    def is_accounted_for(self, host: str) -> bool:
        """Whether there is no hope that it comes soon."""
        loss = self._losses.get(host)
        return loss is not None and (loss.ended is not None or time.monotonic() - loss.heard > self._silence)

    def describe(self, host: str) -> str:
        loss = self._losses.get(host)
        if loss is None:
            return "not heard of yet"
        return f"{'ended' if loss.ended is not None else 'silent, or cannot be reached,'} since {loss.at}"

    def gone(self, own: str, group: Group) -> list[str]:
        """Who can no longer start a group of its own, of the two hosts of a group; see `Group.may_go_on`.

        The first of the two starts one without the other only if that one has ended, or was silent for so long. So the
        other may go on without the first if it has ended earlier than that.
        """
        if len(group.hosts) != 2 or own not in group.ids:
            return []
        (other,) = set(group.ids) - {own}
        loss = self._losses.get(other)
        if loss is None:
            return []
        if own == group.ids[0]:
            return [other] if self.is_accounted_for(other) else []
        is_known = loss.ended is not None and loss.ended < loss.acknowledged + _MARGIN * self._silence
        return [other] if is_known else []
