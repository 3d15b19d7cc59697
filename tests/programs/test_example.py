"""The examples: train_digits.py as the README runs it, most others with small sizes.

CI runs the README's commands as they stand there, too, compiled as for users.
"""

import math
import pathlib
import re
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.full, pytest.mark.one_pair]  # programs in processes of their own; no new calls

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


def run(*arguments, name="train_digits.py"):
    return subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments], capture_output=True, text=True, timeout=240, check=False
    )


def end_of(text):
    """The last words without numbers and digests."""
    return re.sub(r"\b(?=\w*\d)\w[\w.+-]*", "#", " ".join(text.split()))[-40:]


def check_end(name, text):
    """The site has pages with what examples have printed: docs/record.py."""
    recorded = EXAMPLES.parent / f"docs/outputs/{name.removesuffix('.py')}.txt"
    assert not recorded.exists() or end_of(text) == end_of(recorded.read_text())


def test_recorded_outputs_fit_a_terminal():
    recorded = {path.stem: path.read_text() for path in EXAMPLES.parent.glob("docs/outputs/*.txt")}
    assert recorded.keys() == {path.stem for path in EXAMPLES.glob("*.py")}
    # The launcher puts a label before each line, and its own messages have any length.
    wide = [(name, line) for name, text in recorded.items() for line in text.splitlines() if len(line) > 80 + 4]
    assert not [each for each in wide if not each[1].startswith("jax_ring.launch:")]


def test_train_digits():
    result = run("--epochs", "3")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "with ring_psum calls jax_ring's all-reduce 1x and XLA's 0x" in result.stdout
    assert "with lax.psum calls jax_ring's all-reduce 0x and XLA's 1x" in result.stdout
    rows = re.findall(r"│ (\d) +│ (\w{16})  (\S+)% +│ (\w{16})  (\S+)% +│", result.stdout)
    assert [devices for devices, *_ in rows] == ["8", "3", "1"]
    assert len({ring for _, ring, *_ in rows}) == 1
    assert all(float(accuracy) > 50 for row in rows for accuracy in (row[2], row[4]))
    different = len({lax for *_, lax, _ in rows})
    last = result.stdout.splitlines()[-1]
    assert last == f"ring_psum on 8, 3 and 1 devices: the same bits. lax.psum: {different} different results."


def test_invalid_options_are_rejected():
    result = run("--devices", "8,7")
    assert result.returncode == 2
    assert "--devices must be numbers that divide 24, got 8,7" in result.stderr


def test_replace_psum():
    result = run("--devices", "4", name="replace_psum.py")
    assert result.returncode == 0, result.stdout + result.stderr
    check_end("replace_psum.py", result.stdout)
    rows = [line.split("│")[2:4] for line in result.stdout.splitlines() if "│ the same bits" in line]
    # Calls served by jax_ring and by XLA: unchanged, with the name replaced, and under override_lax().
    assert [[int(cell) for cell in row] for row in rows] == [[0, 4], [2, 2], [4, 0]]


def run_small(name, *arguments):
    result = run(*arguments, name=name)
    assert result.returncode == 0, result.stdout + result.stderr
    check_end(name, result.stdout)
    return result.stdout


def test_accumulation_and_clipping():
    text = run_small("accumulation_and_clipping.py", "--devices", "2", "--steps", "5", "--microbatches", "4")
    memory = {line.split("│")[1].strip(): line for line in text.splitlines() if "KiB" in line}
    whole, accumulated = (int(re.search(r"(\d+) KiB", memory[name])[1]) for name in ("whole batch", "accumulated"))
    assert accumulated < whole / 2


def test_zero(tmp_path):
    # The example fails if its measurement differs from its prediction.
    plot = tmp_path / "memory.png"
    text = run_small("zero.py", "--devices", "3", "--epochs", "1", "--plot", str(plot))
    assert "ceil(17226 / 3) + 4 = 45940" in text
    assert plot.stat().st_size > 1000


def test_parameter_server(tmp_path):
    plot = tmp_path / "losses.png"
    text = run_small("parameter_server.py", "--devices", "2", "--epochs", "2", "--plot", str(plot))
    rows = {cells[1].strip(): cells for line in text.splitlines() if len(cells := line.split("│")) > 4}
    losses = {name: float(cells[4]) for name, cells in rows.items()}
    assert losses["ring"] == pytest.approx(losses["server"], rel=1e-3)
    assert not losses["server, stale by 16"] < 2 * losses["server"]
    assert plot.stat().st_size > 1000


@pytest.mark.parametrize("reduction", ["--dtype=bfloat16", "--wire=int8"])
def test_train_gpt(reduction):
    size = ("--devices", "2", "--steps", "3", "--batch", "4", "--context", "8", "--width", "16", "--layers", "2")
    text = run_small("train_gpt.py", *size, "--sample", "9", reduction)
    assert 5 < float(re.search(r"Loss of the first step (\d\.\d+)", text)[1]) < 6
    assert "a sample" in text


# These two fail if a collective of XLA is left, or if the results are not those of a dense computation.


def test_ring_attention():
    text = run_small("ring_attention.py", "--devices", "3", "--length", "24", "--heads", "2", "--width", "8")
    assert "collectives that XLA serves: 0" in text
    assert "jax_ring_permute" in text
    distance = re.search(r"those of plain attention up to ([\d.e-]+),", text)
    assert float(distance[1]) < 1e-5


@pytest.mark.parametrize("ragged", [False, True], ids=["blocks", "ragged"])
def test_mixture_of_experts(ragged):
    options = ("--devices", "3", "--tokens", "16", "--steps", "5")
    text = run_small("mixture_of_experts.py", *options, *["--ragged"] * ragged)
    assert "collectives that XLA serves: 0" in text
    assert "jax_ring_all_to_all" in text
    assert ("jax_ring_ragged_all_to_all" in text) == ragged
    first, last, dense = (float(loss) for loss in re.findall(r"\b\d\.\d{4}\b", text))
    assert last < first
    assert last == pytest.approx(dense, abs=1e-3)


def test_data_and_tensor_parallel():
    text = run_small("data_and_tensor_parallel.py", "--data", "2", "--model", "2", "--steps", "3", "--width", "16")
    assert "jax_ring_all_reduce" in text
    assert "all-gather" not in text
    last, on_one_device = re.search(r"last step (\d\.\d+), on one device (\d\.\d+)", text).groups()
    assert float(last) == pytest.approx(float(on_one_device), abs=1e-4)


def test_multi_process():
    launch = [sys.executable, "-P", "-m", "jax_ring.launch", "-n", "2", "--devices", "2"]
    command = [str(EXAMPLES / "multi_process.py"), "--epochs", "2"]
    result = subprocess.run([*launch, *command], capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "processes: 2, devices: 4" in result.stdout
    assert " of 68,908 bytes is served by " in result.stdout
    first, last = (float(loss) for loss in re.findall(r"mean loss (\d\.\d+)", result.stdout))
    assert last < first / 2
    # Not anchored, because Gloo writes partial lines, and so does Python where its output is not buffered.
    parameters = re.findall(r"process (\d) has parameters (\w+), the same on all processes", result.stdout)
    assert sorted(rank for rank, _ in parameters) == ["0", "1"]
    assert len({digest for _, digest in parameters}) == 1


def test_ten_steps():
    """Several buckets of 1 MiB, the losses of a single device up to rounding, and bit equality as reported."""
    text = run_small("ten_steps.py", "--layers", "2")
    rows = [[cell.strip() for cell in line.split("│")[1:5]] for line in text.splitlines() if line.startswith("│")]
    buckets = {name: (number, verdict) for name, number, _, verdict in rows}
    assert buckets["all in one bucket"] == buckets["lax.psum"] == ("1", "the same bits")
    assert buckets["buckets of 1 MiB"] == ("3", "the same bits")
    assert buckets["buckets of 1 KiB"] == ("9", "the same bits")
    assert 0 < float(buckets["on one device"][1].split()[0]) < 1e-5
    first = float(re.search(r"first step:\s+(\d\.\d+)", text)[1])
    assert first == pytest.approx(math.log(256), rel=0.02)
    assert all(float(loss) < first - 1 for _, _, loss, _ in rows)


def test_invalid_options_of_other_examples_are_rejected():
    assert "got 7" in run("--devices", "7", name="zero.py").stderr
    assert "got 3 and 8" in run("--devices", "3", "--length", "8", name="ring_attention.py").stderr
    assert "got 3 and 3" in run("--width", "3", "--steps", "3", name="train_gpt.py").stderr
