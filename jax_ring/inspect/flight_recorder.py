"""The last calls of this process and its peers, side by side."""

from typing import NamedTuple

from jax_ring import _ffi_cpu


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


def tables_of_host() -> str:
    """The last calls of this user's processes on this host: a table per job."""
    tables = _ffi_cpu.flight_tables_of_host()
    if not tables:
        return "No process of this user on this host has made a call of jax_ring on CPU devices.\n"
    return "\n".join(f"processes {pids}\n{table}" for pids, table in tables)
