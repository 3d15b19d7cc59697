"""Runs programs of others, unmodified, by XLA's collectives and under `override_lax()`, and compares their results.

python benchmarks/programs --folder ~/jax_ring_programs     # all, each in a process of its own
python benchmarks/programs --folder ~/jax_ring_programs gemma ott_sinkhorn

The folder is for what is fetched. Results in lines of JSON: --json FILE.
"""

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # a program has only its own folder on the path

from programs import registry, sources

KINDS = {"all_reduce": "R", "all_gather": "G", "all_to_all": "A", "permute": "P", "reduce_scatter": "S"}


def bits(result: dict) -> str:
    """Whether the bits are the same, or the largest difference."""
    if not result["different"]:
        return "same"
    return f"{result['different']}/{result['arrays']}: {result['largest']:.0e}"


def line(result: dict) -> str:
    """A row of the table, of at most 80 columns."""
    program = registry.PROGRAMS[result["name"]]
    source = sources.full_name(program.source)
    replaced = " ".join(f"{result['replaced'][kind]}{KINDS[kind]}" for kind in KINDS if kind in result["replaced"])
    by_xla, by_engine = (min(seconds) for seconds in result["compile"])
    mesh = "x".join(map(str, program.mesh.values()))
    left = sum(result["left"].values())
    return (
        f"{result['name']:<20} {source[:17]:<17} {mesh:<5} {replaced:<17} {left:>3} {bits(result):<8.8}"
        f" {by_engine / by_xla:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    registry.load_all()
    parser.add_argument("names", nargs="*", help=f"of {', '.join(registry.PROGRAMS)}")
    parser.add_argument("--folder", type=Path, required=True, help="for what is fetched")
    parser.add_argument("--json", type=Path, help="appends the results to this file")
    parser.add_argument("--rounds", type=int, default=1, help="how often each way is run; compile times are the least")
    arguments = parser.parse_args()
    paths = [*map(str, sources.fetch(arguments.folder.resolve())), *filter(None, [os.environ.get("PYTHONPATH")])]
    print(f"# JAX {importlib.metadata.version('jax')}; R: all-reduce, G: all-gather, A: all-to-all, P: permute,")
    print("# S: reduce-scatter; XLA: how many are left; compile: how long, over XLA's")
    print(f"# {'program':<18} {'source':<17} {'mesh':<5} {'replaced':<17} XLA bits     compile", flush=True)
    failed = []
    for name in arguments.names or registry.PROGRAMS:
        done = subprocess.run(
            [sys.executable, str(Path(__file__).parent / "worker.py"), name, "--rounds", str(arguments.rounds)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            failed.append(name)
            print(f"{name:<20} failed: {done.stderr.strip().splitlines()[-1][:50]}", flush=True)
            continue
        text = done.stdout.strip().splitlines()[-1]
        if arguments.json:
            with arguments.json.open("a") as file:
                file.write(text + "\n")
        result = json.loads(text)
        if result["left"] or result["different"]:
            failed.append(name)
        print(line(result), flush=True)
    sys.exit(f"other bits, collectives of XLA, or a failure: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
