"""What this process has recorded of its calls on CPU devices: the last ones, how often each ran, and who came last."""

import collections
from dataclasses import dataclass
from typing import NamedTuple

from jax_ring import _ffi_cpu
from jax_ring.inspect.table import ROWS, left_out, relative, wrapped

# ---- The last calls --------------------------------------------------------------------------------------------------


class RecordedCall(NamedTuple):
    """A call as one process recorded it; times are seconds before `flight_recorder()`.

        last = jax_ring.flight_recorder().calls[-1]
        print(last.call, last.state, last.entered_ago)

    Attributes:
      process: that recorded it.
      sequence: its number in that process, from 1. Each group with ranks there counts.
      call: with dtype, shape, axis and place in the program.
      group: index of its replica group.
      state: "arriving" (some ranks of the process have called), "ready" (all have), "done" or "failed".
      entered_ago: since the process's first rank called.
      ready_ago: since its last one did; None if some are missing.
      ended_ago: since it was done or failed, or None.
      ranks_here: the group's ranks that have called there, of the first 64.
      last: the mesh position that called last, among all processes once done, else in this one; None if some ranks here
        are missing.
    """

    process: int
    sequence: int
    call: str
    group: int
    state: str
    entered_ago: float
    ready_ago: float | None
    ended_ago: float | None
    ranks_here: tuple[int, ...]
    last: int | None


_AS_RECORDED = ("sequence", "call", "group", "state", "entered_ago", "ready_ago", "ended_ago")


class FlightRecord(NamedTuple):
    """What `flight_recorder()` returns. Printed, it is a table.

        pending = [call for call in jax_ring.flight_recorder().calls if call.state in ("arriving", "ready")]

    Attributes:
      calls: this process's, oldest first, then each peer's.
      table: the last ten calls, with the state of each process or, in a program of one process, of each mesh position.
        > marks a call that not everyone has completed. Completed calls that are equal are one row.
    """

    calls: tuple[RecordedCall, ...]
    table: str

    def __str__(self) -> str:
        return self.table


def flight_recorder() -> FlightRecord:
    """The last 256 calls on CPU devices of this process and of those that it has communicated with.

        print(jax_ring.flight_recorder())

    A dead peer's calls are there, too. Missing are those of peers before the first call together, or in containers with
    process ids of their own.
    """
    table = _ffi_cpu.flight_table()
    calls = [
        RecordedCall(
            process=process,
            ranks_here=tuple(rank for rank in range(64) if record["arrived"] >> rank & 1),
            last=None if record["ready_ago"] is None else record["last"],
            **{name: record[name] for name in _AS_RECORDED},
        )
        for _, process, _, records in _ffi_cpu.flight_records()
        for record in records
    ]
    return FlightRecord(tuple(calls), table)


def tables_of_host(*, of_all_users: bool = False) -> str:
    """The last calls of this user's processes on this host: a table per job.

    of_all_users: whether to read other users' processes as well, as root may.
    """
    tables = _ffi_cpu.flight_tables_of_host(of_all_users)
    if not tables:
        whose = "that this user may read" if of_all_users else "of this user"
        return f"No process {whose} on this host has made a call of jax_ring on CPU devices.\n"
    return "\n".join(
        (f"user {user}, " if of_all_users else "") + f"processes {pids}\n{table}" for user, pids, table in tables
    )


# ---- Statistics ------------------------------------------------------------------------------------------------------

# By kind: bus bandwidth as nccl-tests defines it, in units of a rank's operand per second, in a group of p ranks: what
# each rank would send in a ring.
_BUS_FACTORS = {
    "all_reduce": lambda p: 2 * (p - 1) / p,
    "reduce_scatter": lambda p: (p - 1) / p,
    "all_gather": lambda p: p - 1,
    "reduce": lambda p: 1,
    "broadcast": lambda p: 1,
    "all_to_all": lambda p: (p - 1) / p,
    "permute": lambda p: 1,
    "ragged_all_to_all": lambda p: (p - 1) / p,
}


@dataclass(frozen=True)
class Late:
    """A rank that came last.

        for late in jax_ring.statistics().late[:3]:
            print(late.process, late.position, late.seconds)

    Attributes:
      position: in the mesh.
      count: of calls that it made last.
      seconds: behind the one before it, over all these calls; between processes, behind the process before.
    """

    process: int
    position: int
    count: int
    seconds: float


@dataclass(frozen=True)
class CallStatistics:
    """A call, over all its executions.

        for call in jax_ring.statistics().calls:
            print(call.call, call.busy / call.count)

    Attributes:
      call: with dtype, shape, axis and place in the program.
      kind: all_reduce, reduce_scatter, all_gather, reduce, broadcast, all_to_all, permute or ragged_all_to_all.
      num_ranks: of its largest group.
      count: executions, for each group with ranks here.
      failures: of them.
      bytes: of a rank's operands, in total.
      waited: seconds from the first arrival in this process to the last of all, in total.
      busy: seconds from there to the end.
      late: the ranks that came last, most seconds first.
    """

    call: str
    kind: str
    num_ranks: int
    count: int
    failures: int
    bytes: int
    waited: float
    busy: float
    late: tuple[Late, ...]

    @property
    def bytes_per_rank(self) -> int:
        """The bytes of the operands, on average: calls with equal first operands are one."""
        return self.bytes // self.count if self.count else 0

    @property
    def bus_bandwidth(self) -> float:
        """Bytes per second, as in nccl-tests, over the busy time; 0 before the first call."""
        return _BUS_FACTORS[self.kind](self.num_ranks) * self.bytes / self.busy if self.busy else 0.0


class Statistics(NamedTuple):
    """What `statistics()` returns. Printed, it is two tables of up to ten rows each.

        most_expensive = jax_ring.statistics().calls[0]

    Attributes:
      calls: the most expensive first.
      late: the ranks that came last, over all calls: the stragglers.
    """

    calls: tuple[CallStatistics, ...]
    late: tuple[Late, ...]

    def __str__(self) -> str:
        if not self.calls:
            return "jax_ring: no calls on CPU devices have been recorded.\n"
        lines = [
            f"{'busy s':>9} {'waited s':>9} {'count':>9} {'bus GB/s':>9} {'bytes/rank':>12} {'ranks':>5} {'failed':>6}"
        ]
        for each in self.calls[:ROWS]:
            lines += [
                f"{each.busy:>9.3f} {each.waited:>9.3f} {each.count:>9} {each.bus_bandwidth / 1e9:>9.3f} "
                f"{each.bytes_per_rank:>12} {each.num_ranks:>5} {each.failures:>6}",
                *wrapped(relative(each.call)),
            ]
        lines += left_out(len(self.calls), "calls")
        lines += ["", f"{'by s':>9} {'by us each':>11} {'came last':>10} {'position':>9} {'process':>9}"]
        lines += [
            f"{late.seconds:>9.3f} {late.seconds / late.count * 1e6:>11.1f} {late.count:>10} {late.position:>9} "
            f"{late.process:>9}"
            for late in self.late[:ROWS]
        ]
        lines += left_out(len(self.late), "late")
        return "\n".join(lines) + "\n"


def statistics(*, reset: bool = False) -> Statistics:
    """What this process's calls on CPU devices have taken, and who was late.

        jax_ring.statistics(reset=True)  # after the first steps
        ...                              # train
        print(jax_ring.statistics())

    Every process sees the calls that it takes part in. Some rank comes last by microseconds: look at the seconds, not
    at the count.

    Args:
      reset: whether to count anew from now on, as after the first steps, which compile.
    """
    calls = []
    counts: collections.Counter[tuple[int, int]] = collections.Counter()  # by process and mesh position
    seconds: collections.defaultdict[tuple[int, int], float] = collections.defaultdict(float)
    for call, kind, size, positions, processes, count, failures, waited, busy, late in _ffi_cpu.call_statistics(reset):
        if not count and not failures:
            continue
        members = [
            member
            for group in zip(processes, positions, strict=True)
            for member in zip(*group, strict=True)
        ]  # fmt: skip
        ranks = [Late(*member, *by) for member, by in zip(members, late, strict=True) if by[0]]
        for rank in ranks:
            counts[rank.process, rank.position] += rank.count
            seconds[rank.process, rank.position] += rank.seconds
        largest = max(map(len, positions))
        calls.append(CallStatistics(call, kind, largest, count, failures, size, waited, busy, _slowest_first(ranks)))
    calls.sort(key=lambda each: each.waited + each.busy, reverse=True)
    late_ranks = [Late(*rank, count, seconds[rank]) for rank, count in counts.items()]
    return Statistics(tuple(calls), _slowest_first(late_ranks))


def _slowest_first(ranks: list[Late]) -> tuple[Late, ...]:
    return tuple(sorted(ranks, key=lambda rank: rank.seconds, reverse=True))
