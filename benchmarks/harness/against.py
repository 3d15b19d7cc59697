"""Measures an earlier commit beside this one: builds each in an environment of its own, and interleaves processes."""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import compare
import jax

from harness import intervals, options, report
from harness.machine import heading

ROOT = pathlib.Path(__file__).parents[2]


def command_of(python: pathlib.Path | str, script: str, arguments: list[str], file: pathlib.Path) -> list[str]:
    """One process of either commit: the same benchmark, without the options that the whole has."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option in ("--against", "--pairs", "--json"):
        parser.add_argument(option)
    return [str(python), script, *parser.parse_known_args(arguments)[1], "--json", str(file)]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--against", metavar="REV", help="build this commit and HEAD, and compare them in turn")
    parser.add_argument("--pairs", type=options.count, default=3, help="processes of each commit for --against")


def steps_to_build(revision: str, folder: pathlib.Path) -> list[list[str]]:
    """The commands that make an environment of the commit, with this version of JAX."""
    tree, python = folder / "tree", folder / "venv/bin/python"
    return [
        ["git", "-C", str(ROOT), "worktree", "prune"],
        ["git", "-C", str(ROOT), "worktree", "add", "--force", "--detach", str(tree), revision],
        [sys.executable, "-m", "venv", str(folder / "venv")],
        [str(python), "-m", "pip", "install", "--quiet", f"jax=={jax.__version__}", "rich", str(tree)],
        ["git", "-C", str(ROOT), "worktree", "remove", "--force", str(tree)],
    ]


def build(revision: str) -> pathlib.Path:
    """Python of an environment of the commit. It is kept in the user's cache, and used again."""
    described = ["git", "-C", str(ROOT), "rev-parse", "--verify", "--short=12", f"{revision}^{{commit}}"]
    commit = subprocess.run(described, capture_output=True, text=True, check=True).stdout.strip()
    # Not in the folder for temporary files, where another user could put an environment of this name.
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    folder = cache / f"jax_ring-{commit}-jax-{jax.__version__}"
    if not (folder / "done").exists():
        print(f"# builds {commit} in {folder}", flush=True)
        shutil.rmtree(folder, ignore_errors=True)  # leftovers of a failed build
        for step in steps_to_build(commit, folder):
            subprocess.run(step, check=True)
        (folder / "done").touch()
    return folder / "venv/bin/python"


def _head() -> str:
    changed = ["git", "-C", str(ROOT), "status", "--porcelain", "--", "pyproject.toml", "jax_ring", "ffi"]
    if files := subprocess.run(changed, capture_output=True, text=True, check=True).stdout:
        raise SystemExit(f"--against compares commits, and these files differ from HEAD: commit them first\n{files}")
    return "HEAD"


def rows_of(old: list[dict], new: list[dict]) -> list[dict]:
    """A row for each figure that both have, with the samples of all processes. The files are of as many processes."""
    samples = {name: [compare.samples_of(file) for file in files] for name, files in (("old", old), ("new", new))}
    titles = ("ranks", "bytes", "dtype", "implementation", "figure")
    return [
        dict(zip(titles, key, strict=True))
        | {f"{name}_us": [us for file in files for us in file[key]] for name, files in samples.items()}
        for key in samples["new"][0]
        if all(key in file for files in samples.values() for file in files)
    ]


def line(row: dict) -> str:
    ratio = intervals.ratio(row["old_us"], row["new_us"], paired=False)
    old, new = (intervals.median(row[name]).value for name in ("old_us", "new_us"))
    what = f"{row['ranks']:>6} {row['bytes']:>10} {row['dtype']:>9} {row['implementation']:>15} {row['figure']:>15}"
    return f"{what} {old:>9.1f} {new:>9.1f} {ratio.bounds():>24} {ratio.verdict()}"


def run(script: str, arguments: list[str], revision: str, pairs: int, json_file: str | None) -> None:
    """Measures by so many processes of each commit, in turn, and prints the old times over the new ones.

    Raises:
      SystemExit: if something that would be built is not committed.
    """
    # Not the environment that runs this: with more packages in it, the same bytes can take another time.
    pythons = {"old": build(revision), "new": build(_head())}
    found = {name: [] for name in pythons}
    with tempfile.TemporaryDirectory() as folder:
        for pair in range(pairs):
            for name in sorted(pythons, reverse=pair % 2 == 0):
                file = pathlib.Path(folder) / "rows.json"
                command = command_of(pythons[name], script, arguments, file)
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                found[name].append(json.loads(file.read_text()))
                print(f"# process {pair + 1} of {pairs}, {name}: done", flush=True)
    rows = rows_of(**found)
    machine = found["new"][0]["machine"] | {"against": revision}
    print(heading(machine, f"old: {revision}"))
    print(
        f"#{'ranks':>5} {'size (B)':>10} {'dtype':>9} {'implementation':>15} {'figure':>15} {'old us':>9} {'new us':>9}"
    )
    print("\n".join(map(line, rows)))
    if json_file:
        report.write_rows(json_file, rows, machine)
