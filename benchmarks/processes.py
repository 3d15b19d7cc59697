"""Compares all-reduces between processes of this host, in the form of nccl-tests.

    python benchmarks/processes.py -b 4 -e 64M -f 16 --layout 2x1,4x1
    python benchmarks/processes.py -b 64K -e 16M -f 16 --layout 2x4 --hosts 2 --impl ring_psum,lax.psum
    python benchmarks/processes.py -b 4 -e 4K --mpi mpich-venv,openmpi-venv

Each implementation has processes of its own; `lax.psum` uses the collectives that JAX is configured for (by default
Gloo). They are interleaved in several rounds per size, so that noise affects all of them. Times are means over the
processes. A layout is PROCESSESxDEVICES. With --hosts, JAX_RING_HOST_ID divides the processes into that many hosts, and
the operand bytes of XLA's collectives and the bytes through the loopback interface are counted as well. With --mpi,
mpi4jax is measured with each of these MPIs, which are virtual environments with mpirun, mpi4jax and jax_ring.
"""

import argparse
import pathlib
import sys

import jax
import numpy as np
from allreduce import cases_of, check_messages, parser_of_messages
from harness import options, report
from harness.machine import describe, fold_limit, heading
from harness.measure import Row, Spread
from peers.libraries import BETWEEN_PROCESSES, Layout
from peers.peer import Peer, Task, why_not


def parse_arguments() -> argparse.Namespace:
    parser = parser_of_messages(__doc__.split("\n\n")[0])
    parser.add_argument("--layout", default="2x1,4x1", help="PROCESSESxDEVICES, several separated by commas")
    parser.add_argument("--hosts", type=options.count, default=1, help="number of hosts to divide the processes into")
    parser.add_argument(
        "--impl", type=options.several(options.one_of(BETWEEN_PROCESSES)), default=",".join(BETWEEN_PROCESSES),
        help="implementations, separated by commas",
    )  # fmt: skip
    parser.add_argument("--mpi", default="", help="environments of mpi4jax with other MPIs, separated by commas")
    parser.add_argument("--rounds", type=options.count, default=4, help="rounds per size")
    arguments = parser.parse_args()
    check_messages(parser, arguments)
    arguments.impl += [f"mpi4jax:{prefix}" for prefix in arguments.mpi.split(",") if prefix]
    if arguments.rounds > arguments.iters:
        parser.error(f"--rounds must be from 1 to the number of timed runs, {arguments.iters}; got {arguments.rounds}")
    try:
        arguments.layouts = [
            Layout(*(int(number) for number in text.split("x", 1)), arguments.hosts)
            for text in arguments.layout.split(",")
        ]
    except (TypeError, ValueError):
        parser.error(f"--layout must be like 2x1,2x4 (processes x devices), got {arguments.layout!r}")
    for layout in arguments.layouts:
        if min(layout.processes, layout.devices, layout.hosts) < 1 or layout.processes % layout.hosts:
            parser.error(f"--layout needs positive numbers and the same number of processes on each host, got {layout}")
    return arguments


def loopback_bytes() -> int:
    """Bytes that the loopback interface of this host has received so far."""
    for line in pathlib.Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[0])
    return 0


class Rounds:
    """The measurements of one message by one implementation, over several rounds."""

    def __init__(self, peer: Peer, count: int, dtype: str, arguments: argparse.Namespace):
        self.peer, self.measurements, self.loopback = peer, [], 0.0
        self.task = Task(count, dtype, arguments.iters // arguments.rounds, arguments.warmup_iters, 0)
        # Many calls amortize the launch of the loop.
        once = float(np.median(peer.measure(self.task).seconds[0]))
        self.task.times = int(np.clip(arguments.loop_seconds / once, 4, 2000))

    def measure(self) -> None:
        before = loopback_bytes()
        measurement = self.peer.measure(self.task)
        # Keep the last round: the first one also compiles programs and checks results.
        self.loopback = (loopback_bytes() - before) / measurement.calls
        self.measurements.append(measurement)

    def row(self, layout: Layout, itemsize: int, check: bool, limit: float) -> Row:
        figures = [np.concatenate([measurement.seconds[i] for measurement in self.measurements]) for i in range(3)]
        measurement, num_bytes = self.measurements[-1], self.task.count * itemsize
        return Row(
            self.peer.name, layout.ranks, num_bytes, self.task.count, self.task.dtype,
            *(Spread.of(seconds) for seconds in figures),
            wrong=measurement.wrong if check else -1, limit_us=limit * 1e6,
            processes=layout.processes, hosts=layout.hosts, served_by=measurement.served_by,
            xla_bytes=None if measurement.xla_bytes is None else measurement.xla_bytes * layout.ranks,
            loopback_bytes=self.loopback,
        )  # fmt: skip


def measure(peers: list[Peer], count: int, dtype: str, arguments: argparse.Namespace) -> list[Rounds]:
    """Measures the implementations interleaved, each first in turn. One that fails is closed and removed."""
    rounds: list[Rounds] = []
    for step in range(arguments.rounds + 1):
        for peer in list(peers):
            try:
                if step == 0:
                    rounds.append(Rounds(peer, count, dtype, arguments))
                else:
                    next(one for one in rounds if one.peer is peer).measure()
            except RuntimeError as error:
                print(f"# {error}", flush=True)
                rounds = [one for one in rounds if one.peer is not peer]
                peers.remove(peer)
                peer.close()
        peers.append(peers.pop(0))
    return rounds


def main() -> int:
    arguments = parse_arguments()
    cases = cases_of(arguments)
    machine = describe()
    print(heading(machine))
    with report.written_to(arguments.json, machine) as rows:
        for layout in arguments.layouts:
            print(f"\n# {layout}\n{report.HEADER}", flush=True)
            peers = []
            for name in arguments.impl:
                if (reason := why_not(name, layout)) is not None:
                    print(f"# {name}: left out: {reason}")
                else:
                    peers.append(Peer(name, layout))
            measure_layout(layout, peers, cases, arguments, rows)
            for peer in peers:
                peer.close()
    wrong = sum(max(row.wrong, 0) for row in rows)
    print(f"# Out of bounds values: {wrong} {'OK' if wrong == 0 else 'FAILED'}")
    return 0 if rows and wrong == 0 else 1


def measure_layout(
    layout: Layout, peers: list[Peer], cases: list, arguments: argparse.Namespace, all_rows: list[Row]
) -> None:
    """Prints the rows of one layout and their summary, and adds the rows."""
    rows: list[Row] = []
    with report.progress() as progress:
        for dtype, size in progress.track(cases, description=str(layout)):
            itemsize = jax.numpy.dtype(dtype).itemsize
            count = max(1, size // itemsize)
            limit = fold_limit(layout.ranks, count, dtype)
            measured = measure(peers, count, dtype, arguments) if peers else []
            for rounds in sorted(measured, key=lambda rounds: arguments.impl.index(rounds.peer.name)):
                rows.append(rounds.row(layout, itemsize, bool(arguments.check), limit))
                all_rows.append(rows[-1])
                print(report.line(rows[-1]), flush=True)
    others = tuple(name for name in dict.fromkeys(row.implementation for row in rows) if name != "ring_psum")
    for served_by in dict.fromkeys(row.served_by for row in rows if row.implementation == "ring_psum"):
        print(f"# ring_psum is served by {served_by}")
        if others:
            print(report.ratio_table(rows, others))
            print(report.summary(rows, others))
    if layout.hosts > 1:
        print(report.crossing_table(rows))


if __name__ == "__main__":
    sys.exit(main())
