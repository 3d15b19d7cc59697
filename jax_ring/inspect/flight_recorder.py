"""The last calls of this process and its peers, side by side."""

from typing import NamedTuple

from jax_ring import _ffi_cpu


class RecordedCall(NamedTuple):
    """One call, as one process has recorded it. Times are in seconds before `flight_recorder()` was called.

    Attributes:
      process: the process that recorded it.
      sequence: its number among the calls of that process, from 1. A collective of several groups has one call for each
        group that has ranks there.
      call: what is called, with dtype, shape and axis, and where in the program.
      group: the index of its replica group.
      state: "arriving" (some ranks of the process have made the call), "ready" (all have), "done" or "failed".
      entered_ago: since the first rank of the process made the call.
      ready_ago: since the last one did; None if some are missing.
      ended_ago: since it was done, or failed; None if it is neither.
      ranks_here: those of the group's ranks that have made the call in that process, among the first 64.
      last: the mesh position that made the call last, among all processes once it is done, and else in this one; None
        if some ranks of the process are missing.
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

    Attributes:
      calls: this process's calls, the oldest first, then each peer's.
      table: the last ten calls, with the state of each process or, in a program of one process, of each mesh position.
        > marks a call that not everyone has completed. Completed calls that are equal are one row.
    """

    calls: tuple[RecordedCall, ...]
    table: str

    def __str__(self) -> str:
        return self.table


def flight_recorder() -> FlightRecord:
    """The last 256 calls on CPU devices of this process, and of each process that it has communicated with.

    A peer's calls are there also after it has died. They are missing before the first call together, and if the peer
    cannot be found: processes in containers that share `/dev/shm` but have process ids of their own.
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
    """The last calls of all live processes of this user on this host that use jax_ring: a table for each job."""
    tables = _ffi_cpu.flight_tables_of_host()
    if not tables:
        return "No process of this user on this host has made a call of jax_ring on CPU devices.\n"
    return "\n".join(f"processes {pids}\n{table}" for pids, table in tables)
