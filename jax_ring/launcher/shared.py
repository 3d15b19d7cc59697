"""What the generations of a job share on this host, and what its processes need."""

import asyncio
import itertools
from typing import NamedTuple

from jax_ring.launcher import events, protocol
from jax_ring.launcher.arguments import Options
from jax_ring.launcher.control_server import ControlServer
from jax_ring.launcher.coordinator.folder import SocketFolder
from jax_ring.launcher.output import LogFiles, Output

_LONGEST_BACKOFF_SECONDS = 60.0


class Needs(NamedTuple):
    """What the processes of an elastic job ask for, all the same."""

    min_processes: int = 1  # the job ends with fewer
    multiple_of: int | None = None  # shards, a multiple of the number of processes; None for any number

    def validate(self) -> None:
        if self.min_processes < 1 or (self.multiple_of is not None and self.multiple_of < 1):
            raise ValueError(f"min_processes={self.min_processes} and num_shards for {self.multiple_of} processes")

    def most(self, candidates: int) -> int:
        """How many of so many processes can take part; 0 if they are too few."""
        if self.multiple_of is None:
            count = candidates
        else:
            count = max((d for d in range(1, candidates + 1) if self.multiple_of % d == 0), default=0)
        return count if count >= self.min_processes else 0

    def why_not(self, candidates: int) -> str:
        """Why so many processes are too few."""
        shards = f", and a number that divides num_shards, of {self.multiple_of} processes" if self.multiple_of else ""
        return f"{candidates} processes are left, and it takes {self.min_processes} (min_processes){shards}"

    def check(self, others: "Needs | None") -> None:
        """Raises ValueError if they are not those of the other processes."""
        if others is not None and others != self:
            raise ValueError(
                f"elastic.run: another process has min_processes={others.min_processes} and num_shards for "
                f"{others.multiple_of} processes; this one {self.min_processes}, and {self.multiple_of}. All processes "
                "must ask for the same."
            )


class Shared:
    """What the generations of a job share on this host."""

    output: Output
    sockets: SocketFolder
    server: ControlServer
    kept: tuple[int, ...] = ()  # the files in which elastic jobs keep commits: two for each slot
    key_file: int  # in which processes find `key`

    def __init__(self, options: Options) -> None:
        self.options = options
        self.key = protocol.key_of_job(options.secret)
        self.queue: asyncio.Queue[events.Event] = asyncio.Queue()
        self.restarts = 0  # used up so far
        self.others_commit = 0  # the newest that other launchers have told of, whose hosts may be gone since
        self.needs: Needs | None = None  # once a process has told them: the job is elastic
        self.numbers = itertools.count()  # of processes
        self.logs = LogFiles(options.log_dir, lambda text: self.output.log(text))

    def take_restart(self) -> bool:
        """Uses up a restart; returns whether there was one."""
        if self.restarts >= self.options.max_restarts:  # on another host it may be a larger number
            return False
        self.restarts += 1
        return True

    def backoff(self) -> float:
        """The seconds before the last restart taken."""
        doubled = self.options.backoff * 2.0 ** min(self.restarts - 1, 60)  # larger powers overflow in the end
        return min(doubled, _LONGEST_BACKOFF_SECONDS)

    def newest_commit(self) -> int:
        """The number of the newest commit that this launcher knows of; 0 for none.

        Launchers tell each other, so that a job ends when all who had commits are lost, and does not begin anew.
        """
        marks = map(protocol.read_mark, self.kept)
        return max(self.others_commit, *(mark[1] for mark in marks if mark is not None), 0)

    def has_commit_of(self, generation: int, *, hosts: int) -> bool:
        """Whether the processes of this host have made a commit in a generation, on so many hosts.

        On several hosts each generation writes again what it starts from.
        """
        marks = map(protocol.read_mark, self.kept)
        return len({mark for mark in marks if mark is not None and mark[0] == generation}) > (hosts > 1)
