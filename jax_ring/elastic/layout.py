"""On which host each process is, and who keeps copies of whose parts of divided leaves, on the next host."""

import os

from jax_ring.launcher.protocol import HOSTS_VARIABLE


class Layout:
    """The processes of a generation.

    firsts: the first process of each host, in order. count: the number of processes.
    """

    def __init__(self, firsts: tuple[int, ...], count: int) -> None:
        self._firsts, self._count = firsts, count

    @classmethod
    def of_launcher(cls, count: int) -> "Layout":
        """That of this job; without hosts that come and go, all on one host."""
        given = os.environ.get(HOSTS_VARIABLE)
        return cls(tuple(map(int, given.split(","))) if given else (0,), count)

    @property
    def has_several_hosts(self) -> bool:
        return len(self._firsts) > 1

    def is_first(self, process: int) -> bool:
        """Whether it is the first process of its host."""
        return process in self._firsts

    def keeper(self, owner: int) -> int:
        """The process on the next host that keeps a copy of a process's parts; on one host the process itself."""
        host = max(h for h, first in enumerate(self._firsts) if first <= owner)
        begin = self._firsts[(host + 1) % len(self._firsts)]
        end = ([*self._firsts, self._count])[(host + 1) % len(self._firsts) + 1]
        return begin + (owner - self._firsts[host]) % (end - begin)

    def kept_by(self, process: int) -> list[int]:
        """The processes of whose parts it keeps copies."""
        return [owner for owner in range(self._count) if owner != process and self.keeper(owner) == process]
