"""Compares all-reduces on CPU devices, with the options of nccl-tests.

    python benchmarks/allreduce.py -b 4 -e 64M -f 4 --devices 8 --plot allreduce.png

Each size is timed out of place (called from Python), in place (with a donated argument), and inside a jitted loop. Two
loops without the collective are subtracted from that, each timed next to it: an empty one, in which no rank waits for
another, and ("waiting") one with a sum of 4 bytes in its place, less the time of that sum. Once ranks wait for each
other, all their messages compete for the caches, in the loop's own computation too. The implementations are
interleaved, so that noise affects all of them, and ratios have a confidence interval of 95 %. Other libraries, if
installed (pip install --editable '.[peers]'), run in processes of their own, interleaved by size; their times are means
over the ranks. torch.distributed reduces in place only, and its loop is in Python.

    python benchmarks/allreduce.py --platform cuda -b 1K -e 64M -f 4 --tune thresholds.json

measures one-shot, two-shot and ring instead, on 2, 4, ... devices, and writes the sizes at which "auto" should switch
between them, for JAX_RING_TUNING.

    python benchmarks/allreduce.py --devices 4 --impl ring_psum --against REV

builds the commit REV in an environment of its own, and measures processes of both in turn. So the modules that time
calls import public names only; those of `harness/machine.py` may be absent there.
"""

import argparse
import math
import sys

import jax
from harness import options


def parser_of_messages(description: str) -> argparse.ArgumentParser:
    """The options of nccl-tests that select the messages and the number of runs."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("-b", "--minbytes", type=options.size, default="4", help="smallest message of one rank")
    parser.add_argument("-e", "--maxbytes", type=options.size, default="64M", help="largest message of one rank")
    parser.add_argument("-f", "--stepfactor", type=int, default=4, help="factor between sizes")
    sizes = options.several(options.size)
    parser.add_argument("--sizes", type=sizes, metavar="SIZE,...", help="these messages instead of those of -b, -e, -f")
    parser.add_argument("-n", "--iters", type=options.count, default=20, help="timed runs")
    parser.add_argument("-w", "--warmup_iters", type=int, default=3, help="untimed runs before these")
    parser.add_argument("-c", "--check", type=int, choices=(0, 1), default=1, help="check every result")
    dtypes = options.several(options.dtype)
    parser.add_argument("-d", "--datatype", type=dtypes, default="float32", help="dtypes, separated by commas")
    parser.add_argument("-o", "--op", choices=("sum",), default="sum")
    parser.add_argument("--loop-seconds", type=options.seconds, default=0.1, help="duration of one jitted loop, about")
    parser.add_argument("--json", type=options.file, metavar="FILE")
    return parser


def cases_of(arguments: argparse.Namespace) -> list[tuple[str, int]]:
    """Every dtype with every size in bytes."""
    sizes = list(arguments.sizes or ())
    size = arguments.minbytes
    while not arguments.sizes and size <= arguments.maxbytes:
        sizes.append(size)
        size *= arguments.stepfactor
    return [(dtype, size) for dtype in arguments.datatype for size in sizes]


def check_messages(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    if arguments.stepfactor < 2 or not 0 < arguments.minbytes <= arguments.maxbytes:
        parser.error("needs 0 < minbytes <= maxbytes and stepfactor >= 2")


def parse_arguments(implementations, peers) -> argparse.Namespace:
    from harness import against

    parser = parser_of_messages(__doc__.split("\n\n")[0])
    parser.add_argument("--platform", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--devices", type=options.count, default=8, help="CPU devices; other platforms use all")
    choices = [*implementations, *peers]
    parser.add_argument(
        "--impl", type=options.several(options.one_of(choices)), default=",".join(choices),
        help="implementations, separated by commas",
    )  # fmt: skip
    parser.add_argument("--compare", metavar="OLD", help="compare the result with a file of --json (see compare.py)")
    parser.add_argument("--csv", type=options.file, metavar="FILE")
    parser.add_argument("--plot", type=options.file, metavar="FILE", help="plot the first datatype")
    parser.add_argument("--tune", type=options.file, metavar="FILE", help="write thresholds for JAX_RING_TUNING")
    against.add_options(parser)
    arguments = parser.parse_args()
    # The implementations in this process determine the number of calls in a loop, also for the peers.
    arguments.in_process = [name for name in arguments.impl if name in implementations]
    if not arguments.in_process:
        parser.error(f"needs at least one of {list(implementations)}")
    check_messages(parser, arguments)
    return arguments


def main() -> int:
    from compare import SAME, compare, differences, load
    from harness import against, report
    from harness.implementations import AXIS, IMPLEMENTATIONS
    from harness.machine import describe, fold_limit, heading
    from harness.measure import Case, Row
    from peers.libraries import PEERS, Layout
    from peers.peer import Peer, Task, why_not

    arguments = parse_arguments(IMPLEMENTATIONS, PEERS)
    if arguments.against:
        against.run(__file__, sys.argv[1:], arguments.against, arguments.pairs, arguments.json)
        return 0
    jax.config.update("jax_num_cpu_devices", arguments.devices)
    jax.config.update("jax_platforms", arguments.platform)
    cases = cases_of(arguments)
    if any(jax.numpy.dtype(dtype).itemsize >= 8 for dtype, _ in cases):
        jax.config.update("jax_enable_x64", True)
    mesh = jax.sharding.Mesh(jax.devices(), (AXIS,))
    if arguments.tune:
        from harness.tune import tune

        sizes = sorted({size for _, size in cases})
        tune(arguments.tune, sizes, cases[0][0], arguments.iters, arguments.warmup_iters, arguments.loop_seconds)
        return 0

    machine = describe()
    try:
        old = load(arguments.compare) if arguments.compare else None
    except (OSError, ValueError) as error:
        sys.exit(f"not compared: {error}")
    if old and (different := differences(old, {"machine": machine}, SAME)):
        sys.exit(f"not compared: {arguments.compare} is of another machine: {', '.join(different)}")
    print(heading(machine, f"{mesh.size} {arguments.platform} devices"))
    print(report.HEADER, flush=True)
    layout = Layout(mesh.size)
    peers = []
    for name in arguments.impl:
        if name in PEERS and (reason := why_not(name, layout)) is not None:
            print(f"# {name}: left out: {reason}")
        elif name in PEERS:
            peers.append(Peer(name, layout))
    with report.written_to(arguments.json, machine) as rows, report.progress() as progress:
        for dtype, size in progress.track(cases, description="measuring"):
            count = max(1, size // jax.numpy.dtype(dtype).itemsize)
            in_process = {name: IMPLEMENTATIONS[name] for name in arguments.in_process}
            case = Case(mesh, count, dtype, in_process, arguments.loop_seconds)
            results = {
                name: (spreads, case.wrong(name) if arguments.check else -1)
                for name, spreads in case.run(arguments.iters, arguments.warmup_iters).items()
            }
            # Measure it last: the limit leaves no buffers, but its memory would be in the caches.
            limit = fold_limit(mesh.size, count, case.dtype)
            task = Task(count, dtype, arguments.iters, arguments.warmup_iters, case.times)
            for peer in peers:
                try:
                    results[peer.name] = peer.run(task)
                except RuntimeError as error:
                    print(f"# {error}", flush=True)
            for name, (spreads, wrong) in results.items():
                rows.append(
                    Row(
                        name, mesh.size, count * case.dtype.itemsize, count, dtype, *spreads,
                        wrong=wrong if arguments.check else -1, limit_us=limit * 1e6,
                    )
                )  # fmt: skip
                print(report.line(rows[-1], machine["round_trip_us"] or math.nan), flush=True)
    for peer in peers:
        peer.close()
    print(report.summary(rows))
    wrong = sum(max(row.wrong, 0) for row in rows)
    print(f"# Out of bounds values: {wrong} {'OK' if wrong == 0 else 'FAILED'}")

    if old:
        print(compare(old, report.as_json(rows, machine)))
    if arguments.csv:
        report.write_csv(arguments.csv, rows)
    if arguments.plot:
        report.plot(arguments.plot, [row for row in rows if row.dtype == rows[0].dtype])
    return 0 if wrong == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
