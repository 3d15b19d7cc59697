"""The command of this folder: counts and draws schedules, simulates topologies, and fits cost models.

python benchmarks/model ring --ranks 4 --draw ring.svg
"""

import argparse
import pathlib
import sys
from functools import partial
from typing import Any

import numpy as np

sys.path.append(str(pathlib.Path(__file__).parent.parent))  # running a folder puts only the folder on the path

from harness import options

from model import claims, cost, draw, fit, plots, published, simulator, topology
from model.interpreter import run
from model.schedules import ALGORITHMS


def parser() -> argparse.ArgumentParser:
    """The argument parser of the command line."""
    result = argparse.ArgumentParser(prog="python benchmarks/model", description=__doc__.split("\n\n")[0])
    commands = result.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, algorithm in ALGORITHMS.items():
        command = commands.add_parser(name, help=(algorithm.__doc__ or "").split(".\n")[0])
        command.add_argument("--ranks", type=options.count, default=4)
        command.add_argument("--pieces", type=options.count, help="of the message, for pipelined algorithms")
        command.add_argument("--ranks-per-host", type=options.count, default=2, help="for two_level")
        command.add_argument("--draw", metavar="FILE", help="a diagram of ranks and time (.svg, .png, .pdf)")
        command.add_argument("--animate", metavar="FILE.gif", help="an animation of the chunks as they move")
    simulate = commands.add_parser("simulate", help="the time of an all-reduce on a topology")
    simulate.add_argument("algorithm", choices=sorted(simulator.PHASES))
    simulate.add_argument("--ranks", type=options.count, default=8)
    simulate.add_argument("--bytes", type=float, default=2**30, help="message size of each rank")
    simulate.add_argument("--jitter", type=float, default=0.0, metavar="SECONDS", help="mean random delay of each hop")
    simulate.add_argument("--stragglers", type=int, default=0, help="number of ranks at half speed")
    crossover = commands.add_parser("crossover", help="a map of the fastest algorithm by message size and ranks")
    scaling = commands.add_parser("scaling", help="a training step on 1 to 100,000 ranks")
    refuted = commands.add_parser("claims", help="four plots that refute common claims")
    for command in (simulate, crossover, scaling, refuted):
        command.add_argument(
            "--topology", default="nvswitch8", help=f"one of {', '.join(topology.names())}, or the path of a .toml file"
        )
    fitted = commands.add_parser("fit", help="a cost model fitted to measurements, and its errors")
    fitted.add_argument("files", nargs="+", help="files written by benchmarks/allreduce.py --json")
    fitted.add_argument("--implementation", default="ring_psum")
    commands.add_parser("published", help="the table of RESULTS.md: the simulator and published measurements")
    for command, required in ((crossover, True), (scaling, True), (refuted, True), (fitted, False)):
        command.add_argument("--draw", metavar="FILE", required=required)
    return result


def show_schedule(arguments: argparse.Namespace) -> None:
    """Prints the steps and bytes of a schedule, and draws it."""
    name, p = arguments.command, arguments.ranks
    schedule: Any = ALGORITHMS[name]
    pieces = arguments.pieces or (4 if name == "rank_ordered_ring" else 1)
    chunks = {"rank_ordered_ring": pieces, "double_tree": 2 * pieces, "ring": p * pieces, "one_shot": 1}.get(name, p)
    if name in ("ring", "rank_ordered_ring", "double_tree"):
        schedule = partial(schedule, pieces=pieces)
    elif arguments.pieces:
        raise SystemExit(f"{name} is not pipelined; leave out --pieces")
    if name == "two_level":
        schedule = partial(schedule, ranks_per_host=arguments.ranks_per_host)
    size = 1024 * chunks
    result = run(schedule, [np.zeros(size, np.int8)] * p)
    print(f"{name}, {p} ranks: {result.steps} steps")
    print(f"bytes sent by a rank, for each byte of its message: at most {max(result.bytes_sent()) / size:.4g}")
    print(f"bytes on a link: at most {max(result.bytes_per_link().values(), default=0) / size:.4g}")
    title = f"{name.replace('_', ' ')}, {p} ranks"
    if arguments.draw:
        draw.save(draw.diagram(schedule, p, chunks, title), arguments.draw)
    if arguments.animate:
        draw.animate(schedule, p, chunks, title, arguments.animate)


def show_fit(arguments: argparse.Namespace) -> None:
    """Prints the fitted model, and its errors on numbers of ranks that were left out of the fit."""
    measurements = fit.read(arguments.files, implementation=arguments.implementation)
    print(fit.fit(measurements))
    print("fitted to all other numbers of ranks:\n ranks      bytes   measured  predicted   error")
    errors = []
    for p, (model, held_out) in fit.leave_out_each(measurements).items():
        for m, error in zip((m for m in measurements if m.num_ranks == p), held_out, strict=True):
            predicted = model.seconds(p, m.num_bytes)
            print(f"{p:>6} {m.num_bytes:>10} {m.seconds * 1e6:>8.1f}us {predicted * 1e6:>8.1f}us {error:>+7.0%}")
            errors.append(abs(error))
    print(f"error: median {np.median(errors):.1%}, largest {max(errors):.0%}")
    if arguments.draw:
        figure = plots.fit_plot(measurements, f"{arguments.implementation} on CPU devices, predicted and measured")
        draw.save(figure, arguments.draw)


def main(arguments: argparse.Namespace) -> None:
    """Runs the command that the arguments name."""
    if arguments.command in ALGORITHMS:
        return show_schedule(arguments)
    if arguments.command == "fit":
        return show_fit(arguments)
    if arguments.command == "published":
        return print("\n".join(published.table(published.rows())))
    loaded = topology.load(arguments.topology)
    if arguments.command == "crossover":
        draw.save(plots.crossover_map(loaded), arguments.draw)
    elif arguments.command == "claims":
        draw.save(claims.claims(loaded), arguments.draw)
    elif arguments.command == "scaling":
        draw.save(plots.scaling_curve(loaded), arguments.draw)
    else:
        conditions = simulator.Conditions(arguments.jitter, arguments.stragglers)
        seconds = simulator.simulate(arguments.algorithm, arguments.ranks, arguments.bytes, loaded, conditions).max()
        busbw = cost.busbw(arguments.ranks, arguments.bytes, seconds) / 1e9
        print(f"{arguments.algorithm}, {arguments.ranks} ranks, {loaded.name}: {seconds * 1e6:.1f} us,", end=" ")
        print(f"busbw {busbw:.1f} GB/s")


if __name__ == "__main__":
    command_line = parser()
    arguments = command_line.parse_args()
    try:
        main(arguments)
    except (ValueError, OSError) as error:
        command_line.error(str(error))
