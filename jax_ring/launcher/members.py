"""Who is a member of an elastic job: when a generation is formed, of whom, and who is overdue."""

from typing import NamedTuple


class Formation(NamedTuple):
    """A generation: the launcher's numbers of members, by process index, and of spares."""

    members: tuple[int, ...]
    spares: tuple[int, ...]


class Refusal(NamedTuple):
    reason: str


class Needs(NamedTuple):
    """What the processes of an elastic job ask for, all the same."""

    min_processes: int  # the job ends with fewer left and none being started
    multiple_of: int | None  # shards, a multiple of the number of members, others are spares; None for any number

    def check(self, others: "Needs | None") -> None:
        """Raises ValueError if they are not those of the other processes."""
        if others is not None and others != self:
            raise ValueError(
                f"elastic.run: another process has min_processes={others.min_processes} and num_shards for "
                f"{others.multiple_of} processes; this one {self.min_processes}, and {self.multiple_of}. All processes "
                "must ask for the same."
            )


def num_members(candidates: int, multiple_of: int | None) -> int:
    """How many of so many processes can be members."""
    if multiple_of is None:
        return candidates
    return max((d for d in range(1, candidates + 1) if multiple_of % d == 0), default=0)


class Membership:
    """The processes of an elastic job, by their numbers in the launcher, without handles or clocks."""

    def __init__(self, members: list[int], min_processes: int, multiple_of: int | None) -> None:
        self.generation = 0
        self.members = list(members)  # by process index, ended ones too
        self.alive = set(members)  # running processes, also those that were never members
        self.waiting: dict[int, str] = {}  # for the next generation, with reasons
        self._died: set[int] = set()
        self._min_processes, self._multiple_of = min_processes, multiple_of

    def started(self, process: int) -> None:
        self.alive.add(process)

    def ended(self, process: int, is_failure: bool = True) -> None:
        self.alive.discard(process)
        if is_failure:
            self._died.add(process)
        self.waiting.pop(process, None)

    def left(self, process: int, after: int, reason: str) -> None:
        """A process has left a generation, or none (-1), and waits for the next. Raises ValueError if it cannot."""
        if after > self.generation or (process in self.members and after != self.generation):
            raise ValueError(f"next_generation(after={after}): the generation is {self.generation}")
        self.waiting[process] = reason

    def members_left_over(self) -> list[int]:
        """Running members that have not left."""
        return [process for process in self.members if process in self.alive and process not in self.waiting]

    def is_leaving(self) -> bool:
        """Whether some members have left and others are to follow."""
        return any(process in self.waiting for process in self.members)

    def is_change_pending(self) -> bool:
        """Whether members should leave: one has died, or a new generation would have more.

        Members that wait for the dead one get an error as well, but not before they have connected.
        """
        members = self.members_left_over()
        if any(process in self._died for process in self.members):
            return bool(members)
        if not members or self.is_leaving():
            return False
        return num_members(len(members) + len(self.waiting), self._multiple_of) > len(members)

    def decide(self, to_come: int) -> Formation | Refusal | None:
        """What to do now; None to wait.

        to_come: processes still to be started.
        """
        if not self.waiting or self.members_left_over():
            return None
        survivors = [process for process in self.members if process in self.waiting]
        candidates = survivors + sorted(set(self.waiting) - set(survivors))
        to_come += len(self.alive - set(self.waiting))
        if not survivors and to_come:
            return None  # nobody has a state to keep, so an early start gains nothing
        count = num_members(len(candidates), self._multiple_of)
        if count >= self._min_processes:
            return Formation(tuple(candidates[:count]), tuple(candidates[count:]))
        if to_come:
            return None
        return Refusal(
            f"{len(candidates)} processes are left, of which {count} can be members; it needs {self._min_processes}"
        )

    def form(self, formation: Formation) -> None:
        self.generation += 1
        self.members = list(formation.members)
        for process in formation.members + formation.spares:
            del self.waiting[process]  # others may have joined meanwhile
