"""`python -m tests.random_programs --minutes 10`, from the source tree: random programs until time is up.

Each is made from a seed, and compared with lax. One that differs is made smaller, and printed as Python source that
`--file` runs. The exit status is 1 then.
"""

import argparse
import collections
import pathlib
import sys
import time

import jax

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]
jax.config.update("jax_num_cpu_devices", 8)

import generator  # noqa: E402
import runner  # noqa: E402
import shrinking  # noqa: E402


def main() -> int:
    arguments = _parse()
    if arguments.file:
        print(runner.check(arguments.file.read_text()))
        return 0
    if arguments.print:
        print(generator.make(arguments.seed).source())
        return 0
    endings: collections.Counter[str] = collections.Counter()
    features: collections.Counter[str] = collections.Counter()
    until, faults = time.monotonic() + 60 * arguments.minutes, 0
    number = 0
    while number < arguments.seeds and (number == 0 or time.monotonic() < until):
        program = generator.make(arguments.seed + number)
        number += 1
        if arguments.verbose:
            print(f"seed {program.seed}", file=sys.stderr, flush=True)  # XLA may end the process
        features.update(program.features())
        try:
            endings[runner.check(program.source())] += 1
        except runner.Fault as fault:
            faults += 1
            smaller, reason = shrinking.shrink(program, fault, arguments.shrink)
            print(f"{reason}\n\n{smaller.source()}", flush=True)
    print(f"{number} programs, {faults} faults; {dict(endings)}")
    print(", ".join(f"{name} {count}" for name, count in sorted(features.items())))
    return 1 if faults else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.random_programs", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the first program; the others follow")
    parser.add_argument("--seeds", type=int, default=10**9, help="how many programs to run at most")
    parser.add_argument("--minutes", type=float, default=1)
    parser.add_argument("--shrink", type=int, default=40, metavar="N", help="how many smaller programs to try")
    parser.add_argument("--verbose", action="store_true", help="print each seed before it runs")
    parser.add_argument("--print", action="store_true", help="only print the program of --seed")
    parser.add_argument("--file", type=pathlib.Path, help="run the program in this file")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
