"""The tables of README and documentation are made from the stored results, and are those that stand there."""

import json

import pytest
import tables

pytestmark = pytest.mark.one_pair  # no new calls


def result(implementation, num_bytes, microseconds, ranks=2, limit_us=1.0):
    """A row of allreduce.py whose times are all the same."""
    figure = {"median": microseconds, "samples": [microseconds] * 9}
    row = {"implementation": implementation, "ranks": ranks, "bytes": num_bytes, "dtype": "float32"}
    return row | {"limit_us": limit_us, "in_loop": figure}


def write_results(folder, kind, rows, about=None, **machine):
    folder.mkdir(exist_ok=True)
    described = {"cpu": "x", "cores": 2, "jax": "1.2.3"} | machine
    number = len(list(folder.glob("*.json")))
    (folder / f"{kind}-{number}.json").write_text(json.dumps({"machine": described, "rows": rows}))
    if about:
        (folder / "about.json").write_text(json.dumps(about))


def test_tables_of_all_results(tmp_path):
    """A row for each processor, version and engine, with the lowest and the highest ratio of all runs."""
    for folder, lax, about in (
        ("cpu-a", (8.0, 12.0), {"processor": "A"}),
        ("cpu-b", (4.0, 6.0), {"processor": "B"}),
        ("cpu-c", (2.0,), {"processor": "B", "engine": "earlier engine"}),
        ("gpu", (1.0,), None),
    ):
        for us in lax:
            rows = [result("ring_psum", 4096, 2.0), result("lax.psum", 4096, us)]
            write_results(tmp_path / folder, "allreduce", rows, about)
    reported = {"ranks": 2, "bytes": 4096, "dtype": "float32", "reported": {"in_loop": [1.5, 20.0]}}
    write_results(tmp_path / "cpu-a", "allreduce", [reported], processor="A", forced_isa="avx2")
    of_loop = {"ranks": 2, "bytes": 4096, "dtype": "float32", "speedup": 2.0, "speedup_interval": [1.5, 2.5]}
    write_results(tmp_path / "cpu-b", "loops", [of_loop])
    runs = tables.load(tmp_path)
    cells = {line.split(" | ")[0]: line.split(" | ") for line in tables.TABLES["loop"](runs).splitlines()[2:]}
    ratios = {name.strip("| "): (row[1], row[-1].strip("| ")) for name, row in cells.items()}
    times, to = tables.TIMES, tables.TO
    assert ratios == {
        "all of today's engine": (f"2.0{to}6.0{times}", "4"),
        "A, JAX 1.2": (f"4.0{to}6.0{times}", "2"),
        "B, JAX 1.2": (f"2.0{to}3.0{times}", "2"),
        "A, JAX 1.2, avx2": (f"1.50{to}20{times}", "2"),
        "B, JAX 1.2, earlier engine": (f"1.00{times}", "1"),
    }
    assert f"| B, JAX 1.2 | 2.0{times} |" in tables.TABLES["product"](runs)
    assert tables.TABLES["processors"](runs).splitlines()[2:] == [
        f"| all of today's engine | 2.0{to}6.0{times} | | | | 2.0{times} | | |",
        f"| A, JAX 1.2 | 4.0{to}6.0{times} | | | | | | |",
        f"| B, JAX 1.2 | 2.0{to}3.0{times} | | | | 2.0{times} | | |",
    ]
    text = "Sums: <!-- table: headline -->nothing<!-- end -->. <!-- table: loop -->\n\nold\n\n<!-- end -->"
    filled = tables.filled(text, runs)
    assert f"4 KiB is 2.0{to}6.0{times}" in filled
    assert "nothing" not in filled
    assert filled == tables.filled(filled, runs)


def test_training_steps_of_all_processors_together(tmp_path):
    """Today's engine has one line for each model and type, in which an earlier one does not count."""
    for folder, speedup, about in (("cpu-a", 1.5, None), ("cpu-b", 2.5, None), ("cpu-c", 9.0, {"engine": "first"})):
        row = {"model": "mlp", "dtype": "float32", "ranks": 4}
        rows = [row | {"variant": "ring_psum, fused", "speedup": speedup}]
        rows.append(row | {"variant": "no collective", "speedup": 3.0})
        write_results(tmp_path / folder, "train_step", rows, about, processor=folder)
    runs = tables.load(tmp_path)
    lines = tables.TABLES["steps"](runs).splitlines()[2:]
    assert lines == [f"| mlp | float32 | 1.50{tables.TO}2.5{tables.TIMES} | 3.0{tables.TIMES} | | | 2 |"]
    assert len(tables.TABLES["train"](runs).splitlines()[2:]) == 4


def test_times_in_units_that_carry_over(tmp_path):
    """Small messages in p round trips and parts of the aim, large ones in per cent of the limit."""
    rows = [result("ring_psum", 4096, 40.0, ranks=4), result("ring_psum", 1 << 20, 40.0, limit_us=10.0)]
    rows.append(result("ring_psum", 1 << 18, 40.0, limit_us=50.0))
    costs = {"round_trip_us": 0.5, "switch_us": 20.0, "usable_cores": 2, "processor": "A"}
    write_results(tmp_path / "cpu-a", "allreduce", rows, **costs)
    line = tables.TABLES["limit"](tables.load(tmp_path)).splitlines()[-1]
    # Four ranks on two cores: 20 * 4 * 0.5 and 4 / 2 * 20 us.
    assert line == "| A, JAX 1.2 | | 20 pt | 0.50 | | above | 25 | | |"


@pytest.mark.full
@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.name)
def test_published_tables_are_made_from_the_results(page):
    """Run benchmarks/tables.py after adding results."""
    text = page.read_text()
    assert "<!-- table: " in text
    assert tables.filled(text, tables.load()) == text
