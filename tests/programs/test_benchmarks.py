"""The benchmarks run, and their results are correct. Measured times are not tested."""

import argparse
import csv
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys

import compare
import draw_speedup
import jax
import numpy as np
import pytest
from harness import against, intervals, machine, measure, options, report
from model import published, topology

pytestmark = pytest.mark.one_pair  # no new calls

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"


def run(name, *arguments):
    result = subprocess.run(
        [sys.executable, str(BENCHMARKS / name), *arguments], capture_output=True, text=True, timeout=240, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.full
def test_allreduce(tmp_path):
    files = tmp_path / "rows.json", tmp_path / "rows.csv"
    text = run(
        *("allreduce.py", "-b", "4", "-e", "4K", "-f", "32", "-n", "2", "-w", "1", "--devices", "3"),
        *("-d", "bfloat16,int64", "--loop-seconds", "0.001", "--json", str(files[0]), "--csv", str(files[1])),
        *("--impl", "ring_psum,lax.psum,ppermute"),
    )
    assert "# Out of bounds values: 0 OK" in text
    described = json.loads(files[0].read_text())["machine"]
    assert f"# t = {described['round_trip_us']} us" in text
    assert described.keys() >= {"caches", "isa", "switch_us", "jaxlib", "jax_ring", "usable_cores"}
    rows = json.loads(files[0].read_text())["rows"]
    assert {(row["implementation"], row["dtype"]) for row in rows} == {
        (implementation, dtype)
        for implementation in ("ring_psum", "lax.psum", "ppermute")
        for dtype in ("bfloat16", "int64")
    }
    assert all(row["wrong"] == 0 and row["out_of_place"]["median"] > 0 for row in rows)
    assert all(len(row["out_of_place"]["samples"]) == 2 for row in rows)
    assert all(len(row[figure]["samples"]) == 8 for row in rows for figure in ("in_loop", "in_waiting_loop"))
    with files[1].open() as file:
        assert len(list(csv.DictReader(file))) == len(rows)


@pytest.mark.parametrize(
    ("kind", "right", "wrong"),
    [
        (options.count, {"3": 3}, ("0", "-1", "x", "1.5", "")),
        (options.size, {"64": 64, "4k": 4096, "1.5M": 3 << 19}, ("4X", "abc", "0", "", "-4K", "nan", "inf")),
        (options.positive, {"0.5": 0.5}, ("0", "nan", "inf")),
        (options.seconds, {"0.5": 0.5}, ("0", "nan", "inf", "x")),
        (options.dtype, {"float8_e4m3fn": "float8_e4m3fn"}, ("foo", "bool", "complex64", "int4", "")),
        (options.file, {"rows.json": "rows.json"}, ("/dev/null/rows.json",)),
        (options.one_of(("a", "b")), {"b": "b"}, ("c", "")),
        (options.several(options.count), {"1,2": [1, 2]}, ("", "1,", "1,x")),
    ],
)  # fmt: skip
def test_wrong_values_of_options(kind, right, wrong):
    assert {text: kind(text) for text in right} == right
    for text in wrong:
        with pytest.raises(argparse.ArgumentTypeError, match=" is not "):
            kind(text)


@pytest.mark.parametrize(
    ("command", "status", "text"),
    [
        (
            "allreduce.py --sizes 4X",
            2,
            "allreduce.py: error: argument --sizes: '4X' is not a number of bytes, as 64, 4K",
        ),
        ("model fit nofile.json", 2, "model: error: [Errno 2] No such file or directory: 'nofile.json'"),
        ("../docs/record.py nothing", 2, "record.py: error: no example nothing"),
        ("draw_speedup.py --help", 0, "usage: draw_speedup.py"),
        ("run_all.sh --help", 0, "  benchmarks/run_all.sh NAME [RUNS]"),
    ],
)
def test_command_lines(command, status, text, tmp_path):
    """They say what is wrong, or what they take, and write nothing."""
    script, *arguments = command.split()
    program = "bash" if script.endswith(".sh") else sys.executable
    result = subprocess.run(
        [program, str(BENCHMARKS / script), *arguments],
        cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert result.returncode == status
    assert text in result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.iterdir())


def test_rows_outlive_an_interrupt(tmp_path, capsys):
    path = tmp_path / "rows.json"

    def interrupted():
        with report.written_to(str(path), {"cpu": "x"}) as rows:
            rows.append({"bytes": 4})
            raise KeyboardInterrupt

    with pytest.raises(SystemExit, match="130"):
        interrupted()
    assert capsys.readouterr().err == f"interrupted; 1 rows are in {path}\n"
    assert json.loads(path.read_text())["rows"] == [{"bytes": 4}]


def test_tables_fit_a_terminal():
    """Of 80 columns; times of a second, and the longest name of a dtype."""
    spread = measure.Spread.of(np.ones(9))
    crossing = {"xla_bytes": 1 << 33, "loopback_bytes": 1e9}
    rows = [
        measure.Row(name, 8, 1 << 29, 1 << 29, "float8_e4m3fn", *[spread] * 4, wrong=3, **crossing)
        for name in ("ring_psum", "lax.psum")
    ]
    tables = report.HEADER, report.line(rows[0]), report.summary(rows), report.crossing_table(rows)
    tables += (report.ratio_table(rows, ("lax.psum",)),)
    assert max(len(line) for table in tables for line in table.splitlines()) <= 80


@pytest.mark.full
def test_costs_of_the_machine():
    """One core has no round trip to another, but switches."""
    code = (
        "import os, sys; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); sys.path.insert(0, sys.argv[1]);"
        "from harness import machine; print(machine.describe())"
    )
    command = [sys.executable, "-c", code, str(BENCHMARKS)]
    described = eval(subprocess.run(command, capture_output=True, text=True, timeout=240, check=True).stdout)
    assert (described["usable_cores"], described["round_trip_us"]) == (1, None)
    assert described["switch_us"] > 0
    assert described["memory_gb_s"] > 0
    two = len(os.sched_getaffinity(0)) > 1
    assert (machine.describe()["round_trip_us"] is not None) == two


def test_names_of_processors():
    known = {("AuthenticAMD", 25, 1): "Zen 3", ("AuthenticAMD", 25, 17): "Zen 4", ("AuthenticAMD", 23, 49): "Zen 2"}
    for (vendor, family, model), name in known.items():
        assert machine.processor_of(vendor, family, model) == name
    assert machine.processor_of("GenuineIntel", 6, 143) == "GenuineIntel family 6 model 143"


def test_share_of_other_programs(tmp_path, monkeypatch):
    """Half of all cores were with others: of 8 seconds of two cores 10 were busy, 2 of them with this program."""
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(machine, "_BEGIN", (100.0, 1000.0, 20.0))
    monkeypatch.setattr(machine, "_core_seconds", lambda: (108.0, 1010.0, 22.0))
    report.write_rows(str(tmp_path / "rows.json"), [], {"cpu": "x"})
    described = json.loads((tmp_path / "rows.json").read_text())["machine"]
    assert (described["cpu"], described["share_of_others"]) == ("x", 0.5)
    assert "round_trip_at_end_us" in described


def test_small_messages_in_round_trips():
    """Up to 4 KiB a time is given in p round trips of a cache line, above in parts of the limit."""
    spread = measure.Spread.of(noisy(8e-6))
    small, large = (
        measure.Row("ring_psum", 4, size, size // 4, "float32", spread, spread, spread, limit_us=4.0)
        for size in (4096, 8192)
    )
    assert " 4.0 pt" in report.line(small, round_trip_us=spread.median / 16)
    assert "pt" not in report.line(small) + report.line(large, round_trip_us=0.5)


@pytest.mark.full
def test_loops(tmp_path):
    file = tmp_path / "rows.json"
    run(
        *("loops.py", "--devices", "3", "--sizes", "4,1K", "-d", "float32,bfloat16", "--product", "8", "-n", "2"),
        *("--loop-seconds", "0.001", "--json", str(file)),
    )
    rows = json.loads(file.read_text())["rows"]
    assert [(row["bytes"], row["dtype"]) for row in rows] == [
        (size, dtype) for dtype in ("float32", "bfloat16") for size in (4, 1024)
    ]
    for row in rows:
        assert row["median_us"].keys() == {"ring_psum", "lax.psum", "no collective"}
        assert min(row["median_us"].values()) > 0
        low, high = row["speedup_interval"]
        assert low <= row["speedup"] <= high


@pytest.mark.full
@pytest.mark.parametrize(("peer", "module"), [("torch/Gloo", "torch"), ("mpi4jax", "mpi4jax")])
def test_peers(peer, module, tmp_path):
    """An installed peer has rows in the results. For a missing one, a line says what to install."""
    file = tmp_path / "rows.json"
    text = run(
        *("allreduce.py", "-b", "4", "-e", "1K", "-f", "256", "-n", "2", "-w", "1", "--devices", "2"),
        *("--loop-seconds", "0.001", "--impl", f"ring_psum,{peer}", "--json", str(file)),
    )
    rows = [row for row in json.loads(file.read_text())["rows"] if row["implementation"] == peer]
    if importlib.util.find_spec(module) is None:
        assert f"# {peer}: left out: {module}" in text
        assert ".[peers]" in text
        assert not rows
    else:
        assert [(row["bytes"], row["ranks"], row["wrong"]) for row in rows] == [(4, 2, 0), (1024, 2, 0)]
        assert all(row["out_of_place"]["median"] > 0 for row in rows)


@pytest.mark.full
def test_processes(tmp_path):
    """Two hosts are simulated. Libraries that support only one rank per process are left out."""
    file = tmp_path / "rows.json"
    text = run(
        *("processes.py", "-b", "4", "-e", "1K", "-f", "256", "-n", "2", "-w", "1", "--rounds", "2"),
        *("--layout", "2x2", "--hosts", "2", "--impl", "ring_psum,lax.psum,mpi4jax"),
        *("--loop-seconds", "0.001", "--json", str(file)),
    )
    assert "# Out of bounds values: 0 OK" in text
    assert "# mpi4jax: left out: " in text
    assert "# ring_psum is served by " in text
    rows = json.loads(file.read_text())["rows"]
    assert [(row["implementation"], row["bytes"]) for row in rows] == [
        (name, size) for size in (4, 1024) for name in ("ring_psum", "lax.psum")
    ]
    for row in rows:
        assert (row["ranks"], row["processes"], row["hosts"], row["wrong"]) == (4, 2, 2, 0)
        assert row["out_of_place"]["median"] > 0
        # lax.psum passes every rank's message to XLA's all-reduce; ring_psum must not pass more. A rank's shard, of
        # which there is a copy for each of the two hosts, has at least one element.
        assert row["xla_bytes"] == 4 * row["bytes"] if row["implementation"] == "lax.psum" else row["xla_bytes"] > 0
        assert row["xla_bytes"] <= 4 * max(row["bytes"], 2 * 4)


@pytest.mark.full
def test_processes_without_a_peer(tmp_path):
    """An environment without an MPI is left out, and named."""
    text = run(
        *("processes.py", "-b", "4", "-e", "4", "-n", "1", "-w", "1", "--rounds", "1", "--layout", "2x1"),
        *("--impl", "ring_psum", "--mpi", str(tmp_path), "--loop-seconds", "0.001"),
    )
    assert "# ring_psum is served by jax_ring (shared memory, 2 processes)" in text
    assert "# time / ring_psum's" not in text
    assert f"# mpi4jax:{tmp_path}: left out: there is no {tmp_path / 'bin' / 'mpirun'}" in text


@pytest.mark.full
def test_train_step(tmp_path):
    file = tmp_path / "rows.json"
    text = run(
        *("train_step.py", "--devices", "2", "--steps", "2", "--json", str(file)),
        *("--models", "mlp,gpt,bn-8x64", "--layers", "1", "--dtypes", "bfloat16"),
    )
    rows = json.loads(file.read_text())["rows"]
    has_flax = importlib.util.find_spec("flax") is not None
    assert ("flax not found" in text) != has_flax
    assert len(rows) == 2 * 5 + 3 * has_flax
    assert {row["ranks"] for row in rows} == {2}
    assert {row["over_floor"] for row in rows if row["variant"] == "no collective"} == {1}


def fake_row(implementation, num_bytes, microseconds, ranks=2, dtype="float32", limit_us=1.0):
    """A row whose times all have the same samples."""
    samples = list(microseconds)
    figure = {"median": float(np.median(samples)), "p10": min(samples), "p90": max(samples), "samples": samples}
    figures = dict.fromkeys(("out_of_place", "in_place", "in_loop", "in_waiting_loop"), figure)
    row = {"implementation": implementation, "ranks": ranks, "bytes": num_bytes, "count": num_bytes // 4}
    return row | {"dtype": dtype, "wrong": 0, "limit_us": limit_us} | figures


def noisy(median, size=20, seed=0):
    return median * np.exp(0.1 * np.random.default_rng(seed).standard_normal(size))


@pytest.mark.full
@pytest.mark.parametrize(("paired", "common", "most"), [(True, 0.0, 0.99), (True, 0.5, 1), (False, 0.0, 0.99)])
def test_interval_covers_the_ratio(paired, common, most):
    """At about the nominal rate; more often where pairs have noise in common, which medians do not remove entirely."""
    rng = np.random.default_rng(0)
    trials, covered = 400, 0
    for _ in range(trials):
        both = np.exp(common * rng.standard_normal(20))
        one, other = (both * median * np.exp(0.1 * rng.standard_normal(20)) for median in (3.0, 2.0))
        interval = intervals.ratio(one, other, paired)
        covered += interval.low <= 1.5 <= interval.high
    assert 0.91 <= covered / trials <= most


def test_verdicts():
    assert intervals.ratio([1.0] * 9, [1.0] * 9).verdict() == "noise"
    assert intervals.ratio(noisy(1), noisy(1, seed=1)).verdict() == "noise"
    assert intervals.ratio(noisy(2), noisy(1, seed=1)).verdict() == "faster"
    assert intervals.ratio(noisy(1), noisy(2, seed=1), paired=False).verdict() == "slower"
    # A time in a loop is a difference, which noise can make negative.
    below_zero = intervals.ratio(noisy(1), noisy(1, seed=1) - 1)
    assert below_zero.high == np.inf
    assert "noise" in str(intervals.ratio(-noisy(1), -noisy(1)))


def test_no_more_than_the_limit():
    """A time below the limit is reported with both numbers, and not as a fraction."""
    spread, near_zero = (measure.Spread.of(noisy(50e-6) - offset) for offset in (0, 50e-6))
    row = measure.Row("ring_psum", 8, 1024, 256, "float32", spread, spread, spread, near_zero, limit_us=80.0)
    table_line, note = report.line(row).splitlines()
    assert "%" not in table_line
    assert "above" in table_line
    assert "noise" in table_line
    assert re.search(r"in a loop: \d\d\.\d us, but the limit took 80\.0 us", note)
    row.limit_us = 25.0
    (table_line,) = report.line(row).splitlines()
    assert "%" in table_line


def test_compare(tmp_path):
    """Twice as fast, on a machine that was slower on the day; the other size has not changed."""
    machine = {"cpu": "x", "cores": 2, "system": "Linux", "python": "3", "jax": "1"}
    cases = (("old", {4: 2.0, 8: 2.0}, 1.0), ("new", {4: 1.0, 8: 2.0}, 1.3))
    files = {}
    for seed, (name, times, slowness) in enumerate(cases):
        rows = [fake_row("ring_psum", size, noisy(us * slowness, seed=seed)) for size, us in times.items()]
        rows += [fake_row("lax.psum", size, noisy(9 * slowness, seed=seed + 2)) for size in times]
        files[name] = {"machine": machine, "rows": rows}
        (tmp_path / f"{name}.json").write_text(json.dumps(files[name]))
    text = run("compare.py", str(tmp_path / "old.json"), str(tmp_path / "new.json"))
    lines = {(row[1], row[3]): row for row in map(str.split, text.splitlines()[1:]) if row[4] == "in_loop"}
    assert lines["4", "ring_psum"][9] == "faster"
    assert lines["4", "ring_psum"][-1] == "faster"
    assert float(lines["4", "ring_psum"][-3].rstrip("x")) == pytest.approx(2, rel=0.1)
    assert lines["8", "ring_psum"][9] == "slower"
    assert lines["8", "ring_psum"][-1] == "noise"

    other = files["new"] | {"machine": machine | {"cores": 4}}
    with pytest.raises(ValueError, match="different machines: cores 2 and 4"):
        compare.compare(files["old"], other)
    with pytest.raises(ValueError, match="no row in common"):
        compare.compare(files["old"], {"machine": machine, "rows": [fake_row("ring_psum", 16, noisy(1))]})
    fewer = {"machine": machine | {"jax": "2"}, "rows": files["new"]["rows"][:1]}
    text = compare.compare(files["old"], fewer)
    assert "# warning: the files differ in jax 1 and 2" in text
    assert "# warning: only in the old file: ring_psum, 2 ranks, 8 bytes, float32" in text


ROW = {"ranks": 2, "bytes": 4, "dtype": "f32", "implementation": "a", "samples_us": {"a": [1.0]}}


@pytest.mark.parametrize(
    "text",
    ["[]", '"a"', "{", "{}", "[" * 10_000, b"\xff"]
    + [json.dumps({"machine": {}, "rows": rows}) for rows in (7, [7], [{}], [ROW | {"ranks": "2"}])]
    + [json.dumps({"machine": {}, "rows": [ROW | {"samples_us": samples}]}) for samples in ([], {"a": 1}, {"a": []})]
    + [json.dumps({"machine": {}, "rows": [ROW | {"samples_us": {"a": [time]}}]}) for time in ("1", 0, None)]
    + [json.dumps({"machine": [], "rows": [ROW]})],
)
def test_what_is_no_file_of_results_is_not_compared(text, tmp_path):
    file = tmp_path / "results.json"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match="has no results of a benchmark: "):
        compare.load(str(file))


def test_what_a_file_of_results_says_is_escaped(tmp_path):
    file, evil = tmp_path / "results.json", "\x1b[2J\n# mine"
    file.write_text(
        json.dumps({"machine": {"cpu": evil}, "rows": [ROW | {"dtype": evil, "samples_us": {evil: [1.0]}}]})
    )
    results = compare.load(str(file))
    assert compare.compare(results, results).count("\n") == 1
    with pytest.raises(ValueError, match="different machines") as raised:
        compare.compare(results, {"machine": {"cpu": "x"}, "rows": []})
    assert "\x1b" not in str(raised.value) + compare.table(results, results)


@pytest.mark.full
def test_compare_of_another_machine_is_refused_first(tmp_path):
    file = tmp_path / "old.json"
    file.write_text(json.dumps({"machine": {"cpu": "another"}, "rows": []}))
    command = [sys.executable, str(BENCHMARKS / "allreduce.py"), "--devices", "2", "--compare", str(file)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode != 0
    assert "is of another machine: cpu another and" in result.stderr
    assert "ring_psum" not in result.stdout


@pytest.mark.full
@pytest.mark.parametrize(("script", "pairs"), [("allreduce.py", 2), ("loops.py", 1)])
def test_against_another_commit(script, pairs, tmp_path, monkeypatch, capsys):
    """Processes of both commits take turns, with the options of the whole; here both are this one, without a build."""
    arguments = ["--devices=2", "--sizes", "4,64", "-n", "2", "--loop-seconds", "0.001"]
    arguments += {"allreduce.py": ["--impl", "ring_psum,lax.psum"], "loops.py": ["--product", "8"]}[script]
    asked, file = [], tmp_path / "rows.json"
    monkeypatch.setattr(against, "build", lambda revision: asked.append(revision) or sys.executable)
    monkeypatch.setattr(against, "_head", lambda: "HEAD")
    whole = [*arguments, "--against=abc", "--json", str(file), "--pairs", str(pairs)]
    assert against.command_of("py", script, whole, "f") == ["py", script, *arguments, "--json", "f"]
    against.run(str(BENCHMARKS / script), whole, "abc", pairs, str(file))
    assert asked == ["abc", "HEAD"]  # built the same way
    results = json.loads(file.read_text())
    assert results["machine"]["against"] == "abc"
    figure = {"allreduce.py": "out_of_place", "loops.py": "turn"}[script]
    rows = [row for row in results["rows"] if row["figure"] == figure and row["implementation"] == "ring_psum"]
    assert [(row["ranks"], row["bytes"]) for row in rows] == [(2, 4), (2, 64)]
    assert all(len(row["old_us"]) == len(row["new_us"]) == 2 * pairs for row in rows)
    order = re.findall(f"process (.) of {pairs}, (...): done", capsys.readouterr().out)
    assert order == [("1", "old"), ("1", "new"), ("2", "new"), ("2", "old")][: 2 * pairs]


def test_environment_of_another_commit(tmp_path):
    """The tree of the commit is installed, with this version of JAX, in an environment that has nothing else."""
    _, tree, venv, install, remove = against.steps_to_build("abc", tmp_path)
    assert tree[-2:] == [str(tmp_path / "tree"), "abc"]
    assert venv == [sys.executable, "-m", "venv", str(tmp_path / "venv")]
    assert install[0] == str(tmp_path / "venv/bin/python")
    assert {f"jax=={jax.__version__}", str(tmp_path / "tree")} <= set(install)
    assert remove[-1] == str(tmp_path / "tree")


def test_environment_of_another_commit_is_the_users(tmp_path, monkeypatch):
    """It is not taken from the folder for temporary files, where another user could have put one of that name."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(against.subprocess, "run", lambda *_, **__: argparse.Namespace(stdout="abc\n"))
    folder = tmp_path / "cache" / f"jax_ring-abc-jax-{jax.__version__}"
    folder.mkdir(parents=True)
    (folder / "done").touch()
    assert against.build("abc") == folder / "venv/bin/python"


def test_only_commits_are_compared(tmp_path, monkeypatch):
    monkeypatch.setattr(against, "ROOT", tmp_path)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.invalid"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    (tmp_path / "pyproject.toml").write_text("[project]")
    subprocess.run([*git, "add", "pyproject.toml"], check=True)
    subprocess.run([*git, "commit", "--quiet", "--message=a"], check=True)
    (tmp_path / "notes").touch()  # is not built
    assert against._head() == "HEAD"
    (tmp_path / "pyproject.toml").write_text("")
    with pytest.raises(SystemExit, match=r"commit them first\n M pyproject.toml"):
        against._head()


@pytest.mark.full
def test_scaling(tmp_path):
    text = run("scaling.py", str(tmp_path), "--devices", "2,3", "--sizes", "4,64", "-n", "1", "--loop-seconds", "0.001")
    assert "| time per rank, µs | p = 2 | p = 3 |" in text
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")
    files = [json.loads((tmp_path / f"scaling-p{p}.json").read_text()) for p in (2, 3)]
    assert [{(row["ranks"], row["bytes"]) for row in file["rows"]} for file in files] == [
        {(2, 4), (2, 64)},
        {(3, 4), (3, 64)},
    ]


@pytest.mark.full
def test_picture_of_speed(tmp_path):
    """It has the lowest ratio of a size, and that of the documentation is drawn from the published results."""
    picture = tmp_path / "speed.svg"
    names = ("cpu-2-cores-zen4", "cpu-2-cores-zen4-jax-0.12", "cpu-2-cores-zen5")
    folders = [BENCHMARKS / "results" / name for name in names]
    run("draw_speedup.py", str(picture), *map(str, folders))
    texts = re.findall(r">([^<>]+)</text>", picture.read_text())
    lowest = min(
        (point for folder in folders for point in draw_speedup.points(folder) if point.size == 1 << 20),
        key=lambda point: point.ratio.value,
    )
    assert f"{lowest.ratio.value:.1f}{draw_speedup.TIMES}" in texts
    published = (BENCHMARKS.parent / "docs/images/speed.svg").read_text()
    assert texts == re.findall(r">([^<>]+)</text>", published)


@pytest.mark.full
def test_results_have_the_published_figures():
    assert run("model", "published") in (BENCHMARKS / "model/RESULTS.md").read_text()
    # The parameters are derived from the rows with role "input"; the other rows are predictions.
    rows = published.rows()
    assert max(abs(row.error) for row in rows if row.role == "input") < 0.02
    small = [abs(row.error) for row in rows if row.role == "prediction" and row.bytes <= 1024]
    large = [abs(row.error) for row in rows if row.role == "prediction" and row.bytes > 1 << 20]
    assert max(small + large) < 0.25


def test_a100_latencies_are_fitted_to_the_inputs():
    rows = [row for row in published.rows() if row.what.startswith("A100, one host")]
    inputs = [(2 * (row.ranks - 1), row.measured) for row in rows if row.role == "input"]
    hop, launch = np.polyfit(*zip(*inputs, strict=True), 1)
    described = topology.load("nvswitch8_a100")
    assert described.host_latency * 1e6 == pytest.approx(hop, rel=1e-2)
    assert described.launch_latency * 1e6 == pytest.approx(launch, rel=1e-2)


@pytest.mark.full
def test_wire_error():
    text = run("wire_error.py", "--devices", "2", "--elements", "512", "--steps", "2", "--gradients", "normal")
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| normal")]
    one_step = {row[1]: float(row[3]) for row in rows}
    assert one_step["float32"] < one_step["bfloat16"] < one_step["int8"] < one_step["float8_e4m3fn"]
    assert {row[1]: row[2] for row in rows}["int8"] == "0.254"


@pytest.mark.full
def test_memory_at_rest():
    text = run("memory_at_rest.py", "--processes", "2", "--megabytes", "20")
    rows = [line.split(" | ") for line in text.splitlines()[2:]]
    assert [(row[1], row[3]) for row in rows] == [
        ("replicated", "3.00 |"),
        ("stage 2", "2.00 |"),
        ("stage 3", "1.50 |"),
        ("stage 3, whole parameters", "1.50 |"),
    ]


@pytest.mark.full
def test_lowering_time():
    text = run("lowering_time.py", "--devices", "2", "--leaves", "3", "--runs", "1")
    rows = [line.split() for line in text.splitlines() if not line.startswith("#")]
    # The sums that are left before XLA looks at the program.
    assert [row[-1] for row in rows] == ["3", "3", "1", "1", "1"]


def test_lowering_calls():
    """Whoever reads how one ring_psum is lowered opens few files."""
    counts = re.match(r"(\d+) calls in (\d+) files ", run("lowering_calls.py", "--devices", "2"))
    calls, files = map(int, counts.groups())
    assert 5 < files <= 10
    if sys.version_info >= (3, 12):  # older versions count comprehensions
        assert 20 < calls <= 50


@pytest.mark.full
def test_reduction_place(tmp_path):
    file = tmp_path / "rows.json"
    run("reduction_place.py", "--devices", "2", "--steps", "2", "--layers", "3", "--json", str(file))
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 2 * 2 * 3
