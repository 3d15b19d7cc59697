"""The thresholds of algorithm="auto": a tuning file reaches the program and explain(); invalid files are refused."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest
from fake_gpus import pretend_gpus
from helpers import make_mesh, run_python, sharded
from model import fit

from jax_ring import explain, ring_pmax, ring_psum
from jax_ring.inspect import explanation
from jax_ring.inspect.compiled import find_collectives
from jax_ring.lowering import tuning
from jax_ring.lowering.tuning import NO_LIMIT, Thresholds

pytestmark = pytest.mark.one_pair  # does not depend on JAX's version

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TABLE = {2: Thresholds(1000, 2000), 8: Thresholds(32, 64)}


@pytest.fixture
def gpus(monkeypatch):
    """Makes CPU devices look like GPUs to the lowering and to explain()."""
    pretend_gpus(monkeypatch)
    monkeypatch.setattr(explanation, "_platform", lambda mesh: "cuda")


def psum(x, **options):
    return ring_psum(x, "i", **options)


def lowered(**options):
    f = sharded(psum, check_vma=False, **options)
    return f.trace(jnp.ones(8)).lower(lowering_platforms=("cuda",)).as_text()


def test_choice_by_size():
    assert [Thresholds(8, 16).choose(n) for n in (0, 8, 9, 16, 17)] == [
        "one_shot", "one_shot", "two_shot", "two_shot", "ring"
    ]  # fmt: skip
    assert Thresholds(0, NO_LIMIT).choose(1 << 62) == "two_shot"


def test_rank_counts_that_are_not_in_the_file(monkeypatch):
    monkeypatch.setattr(tuning, "ACTIVE", {"cuda": {4: Thresholds(4, 4), 8: Thresholds(8, 8)}})
    assert [tuning.thresholds("cuda", p).one_shot for p in (2, 4, 7, 8, 64)] == [4, 4, 4, 8, 8]
    # The built-in threshold is 768 KiB sent per rank, for any number of ranks.
    assert [tuning.thresholds("cpu", p).one_shot for p in (2, 3, 8)] == [786432, 393216, 112347]
    assert tuning.thresholds("cpu", 8).two_shot == NO_LIMIT


@pytest.mark.usefixtures("gpus")
def test_thresholds_are_attributes(monkeypatch):
    text = lowered()
    assert "one_shot_bytes = dense<112347>" in text
    assert f"two_shot_bytes = dense<{NO_LIMIT}>" in text
    monkeypatch.setattr(tuning, "ACTIVE", {"cuda": TABLE})
    mesh = make_mesh((4, 2), ("j", "i"))
    assert "one_shot_bytes = dense<1000> : tensor<4xi64>" in lowered(mesh=mesh)
    assert "one_shot_bytes = dense<32> : tensor<1xi64>" in lowered()


@pytest.mark.usefixtures("gpus")
def test_explain_reports_the_choice(monkeypatch):
    monkeypatch.setattr(tuning, "ACTIVE", {"cuda": TABLE})

    def chosen(elements, collective=psum, **options):
        (found,) = explain(
            sharded(lambda x: collective(x, **options), check_vma=False), jnp.ones(8 * elements)
        ).collectives
        return found

    assert chosen(8).chosen == ("one_shot",)
    assert chosen(8).wire_bytes == 32 * 7
    assert chosen(9).chosen == ("two_shot",)
    assert chosen(9).wire_bytes == 36 * 2 * 7 / 8
    assert chosen(17).chosen == ("ring",)
    # No choice by size.
    assert chosen(8, algorithm="two_shot").chosen == ()
    assert chosen(8, order="ring").chosen == ()
    assert chosen(9, order="any").chosen == ("two_shot",)
    assert chosen(8, lambda x: ring_pmax(x, "i")).chosen == ()
    # Groups of different sizes choose separately: four of eight ranks send 32 bytes to one peer, the others nothing.
    groups = {"axis_index_groups": [[0, 1], [2, 3], [4], [5], [6], [7]]}
    assert chosen(8, **groups).wire_bytes == 32 * 4 / 8
    text = str(explain(sharded(psum, check_vma=False), jnp.ones(64)))
    assert "jax_ring (auto: one_shot)" in text


@pytest.mark.usefixtures("gpus")
def test_explain_reports_the_choice_for_joined_calls(monkeypatch):
    monkeypatch.setattr(tuning, "ACTIVE", {"cuda": TABLE})
    found = explain(sharded(lambda x: [psum(x), psum(x + 1)], check_vma=False), jnp.ones(64))
    assert [call.num_bytes for call in found.instructions] == [64]
    assert [call.chosen for call in found.collectives] == [("two_shot",)] * 2
    assert found.predicted_bytes == 64 * 2 * 7 / 8


def test_explain_reports_no_choice_on_cpu():
    (found,) = explain(sharded(psum, check_vma=False), jnp.ones(64)).collectives
    assert (found.algorithm, found.chosen) == ("auto", ())


def test_bytes_are_counted_by_the_thresholds_in_the_program():
    call = (
        '  ROOT %c = f32[9]{{0}} custom-call(%p), custom_call_target="jax_ring_all_reduce", backend_config={{'
        'algorithm = "auto", op = "{op}", order = "rank", group_sizes = dense<[2, 4]> : tensor<2xi64>, '
        "one_shot_bytes = dense<[64, 32]> : tensor<2xi64>, two_shot_bytes = dense<64> : tensor<2xi64>}}"
    )
    text = "HloModule jit_f, num_partitions=6\n\nENTRY %main (p: f32[9]) -> f32[9] {{\n" + call + "\n}}\n"
    (found,) = find_collectives(text.format(op="sum"))
    # 36 bytes: two ranks use one-shot, four use two-shot.
    assert found.wire_bytes == (2 * 36 + 4 * 36 * 1.5) / 6
    assert find_collectives(text.format(op="sum").replace('"rank"', '"any"')) == [found]
    (in_a_ring,) = find_collectives(text.format(op="sum").replace('"rank"', '"ring"'))
    assert in_a_ring.wire_bytes == (2 * 36 + 4 * 36 * 1.5) / 6
    (extrema,) = find_collectives(text.format(op="max"))
    assert extrema.wire_bytes == (2 * 36 + 4 * 36 * 1.5) / 6


def test_thresholds_are_where_the_lines_cross():
    lines = {
        "one_shot": fit.Line("one_shot", 2e-6, 1e-7, 3e-11),
        "two_shot": fit.Line("two_shot", 5e-6, 2e-7, 2e-11),
        "ring": fit.Line("ring", 9e-6, 4e-6, 1e-11),
    }
    cases = [(p, n) for p in (2, 4, 8) for n in (1 << 10, 1 << 14, 1 << 18, 1 << 24)]
    for name, line in lines.items():
        at = [fit.Measurement(p, n, line.at(p)[0] + line.at(p)[1] * n) for p, n in cases]
        found = fit.fit_line(name, at)
        assert (found.alpha, found.arrival, found.beta) == pytest.approx((line.alpha, line.arrival, line.beta))
    one_shot, two_shot = fit.thresholds(lines, 8)
    # In microseconds: 2.8 + 7 * 3e-5 n = 6.6 + 1.75 * 2e-5 n, and 6.6 + 3.5e-5 n = 41 + 2e-5 n.
    assert (one_shot, two_shot) == (int(3.8 / 17.5e-5), int(34.4 / 1.5e-5))
    assert fit.thresholds({**lines, "one_shot": fit.Line("one_shot", 1e-3, 0, 0)}, 8).one_shot == 0
    never = fit.thresholds({**lines, "ring": fit.Line("ring", 1, 0, 1)}, 8)
    assert never == (one_shot, NO_LIMIT)
    with pytest.raises(ValueError, match="3 parameters; got 1 measurements"):
        fit.fit_line("ring", [fit.Measurement(2, 4, 1e-6)])


def test_write_and_read(tmp_path):
    file = tmp_path / "tuning.json"
    tables = {"cpu": {2: Thresholds(0, NO_LIMIT)}, "cuda": TABLE}
    tuning.write(file, tables, machine={"cpu": "one"})
    assert tuning.read(file) == tables
    assert json.loads(file.read_text())["machine"] == {"cpu": "one"}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "it is not a JSON file: Expecting property name"),
        ("[]", 'there must be an object with the key "thresholds"'),
        ('{"thresholds": {"tpu": {}}}', "unknown platforms: 'tpu'; thresholds are for cpu or cuda"),
        ('{"thresholds": {"cuda": {}}}', "thresholds for cuda must be an object with a key for each number of ranks"),
        (
            '{"thresholds": {"cuda": {"1": {}}}}',
            "cuda: a number of ranks must be 2 or more, with at most 9 digits, got '1'",
        ),
        (
            '{"thresholds": {"cpu": {"' + "9" * 5000 + '": {"one_shot": 1, "two_shot": 2}}}}',
            f"cpu: a number of ranks must be 2 or more, with at most 9 digits, got '{'9' * 30}",
        ),
        (
            '{"thresholds": {"cpu": {"8": {"one_shot": ' + "9" * 5000 + ', "two_shot": null}}}}',
            "it is not a JSON file: Exceeds the limit",
        ),
        (
            '{"thresholds": {"cuda": {"8": {"one_shot": 1}}}}',
            'cuda, 8 ranks: needs "one_shot" and "two_shot" and nothing',
        ),
        (
            '{"thresholds": {"cuda": {"8": {"one_shot": true, "two_shot": null}}}}',
            '"one_shot" must be a number of bytes or null, got true',
        ),
        (
            '{"thresholds": {"cuda": {"8": {"one_shot": -1, "two_shot": null}}}}',
            '"one_shot" must be a number of bytes or null, got -1',
        ),
        (
            '{"thresholds": {"cuda": {"8": {"one_shot": 9, "two_shot": 8}}}}',
            '"two_shot" must not be less than "one_shot", got 8 and 9',
        ),
        ("[" * 10**5, "it is not a JSON file"),
        ('{"thresholds": {"cpu\\u001b[2J": {}}}', "unknown platforms: 'cpu\\x1b[2J'"),
    ],
)
def test_bad_files_are_refused(text, why, tmp_path):
    file = tmp_path / "tuning.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"JAX_RING_TUNING=.*tuning\.json") as error:
        tuning.read(file)
    assert why in str(error.value)
    assert "benchmarks/allreduce.py --tune" in str(error.value)


def test_what_is_no_file_is_not_read(tmp_path):
    """A pipe would be waited for, and at the import of jax_ring."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(ValueError, match=f"JAX_RING_TUNING='{path}': it is no file"):
            tuning.read(path)


@pytest.mark.full
def test_environment_variable(tmp_path):
    file = tmp_path / "tuning.json"
    result = run_python("import jax_ring", JAX_RING_TUNING=str(file))
    assert "ValueError: JAX_RING_TUNING=" in result.stderr
    assert "it cannot be read: No such file" in result.stderr
    tuning.write(file, {"cuda": TABLE})
    code = "from jax_ring.lowering import tuning\nprint(tuning.thresholds('cuda', 3), tuning.describe())"
    result = run_python(code, JAX_RING_TUNING=str(file))
    assert result.stdout.strip() == (
        "Thresholds(one_shot=1000, two_shot=2000) thresholds for algorithm='auto' on cuda with 2, 8 ranks"
    ), result.stderr


@pytest.mark.full
def test_the_benchmark_writes_a_file(tmp_path):
    file = tmp_path / "tuning.json"
    command = [BENCHMARKS / "allreduce.py", "-b", "64", "-e", "64K", "-f", "32", "-n", "1", "-w", "0", "--devices", "3"]
    result = subprocess.run(
        [sys.executable, *map(str, command), "--loop-seconds", "0.001", "--tune", str(file)],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    assert "of one process: all algorithms are the same" in result.stdout
    found = tuning.read(file)
    assert sorted(found["cpu"]) == [2, 3, 4, 8, 16, 32, 64]
    data = json.loads(file.read_text())
    assert data["measured"] == {"ranks": [2, 3], "bytes": [64, 2048, 65536], "dtype": "float32"}
    lines = {name: fit.Line(**line) for name, line in data["fitted"].items()}
    assert fit.thresholds(lines, 3) == found["cpu"][3]
