"""ring_psum through JAX on GPUs: several processes share one GPU, and each is one rank of the mesh."""

import os
import re
import socket
import subprocess
import sys

import pytest
from command_buffers import FLAGS, Recorded, dump_flags, recorded


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def run_ranks(backend, count: int, part: str, **environment) -> list[subprocess.CompletedProcess]:
    """Runs jax_rank.py in `count` processes, and returns the exit status and output of each.

    environment: more variables; `{rank}` in them is the process's number.
    """
    # All ranks are on one GPU here, which jax_ring would otherwise leave to XLA.
    variables = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_RING_SHARED_GPU": "1"}
    variables["JAX_PLATFORMS"] = "cuda,cpu" if backend == "cuda" else "cpu"
    script = os.path.join(os.path.dirname(__file__), "jax_rank.py")
    coordinator = f"localhost:{free_port()}"
    workers = [
        subprocess.Popen(
            [sys.executable, script, coordinator, str(count), str(i), part],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=variables | {name: value.format(rank=i) for name, value in environment.items()},
        )
        for i in range(count)
    ]  # fmt: skip
    completed = []
    for worker in workers:
        try:
            output, _ = worker.communicate(timeout=60 if backend == "cuda" else 200)
        except subprocess.TimeoutExpired:
            worker.kill()
            output = worker.communicate()[0] + "\n(killed: timed out)"
        completed.append(subprocess.CompletedProcess(worker.args, worker.returncode, output))
    return completed


PARTS = [("sums", 2), ("sums", 4), ("exchanges", 2), ("exchanges", 3), ("family", 2), ("family", 3), ("training", 2)]
PARTS += [("training", 4), ("ordinary", 2), ("ordinary", 4)]


@pytest.mark.parametrize(("part", "count"), PARTS)
def test_results(backend, part, count):
    for completed in run_ranks(backend, count, part):
        assert completed.returncode == 0, completed.stdout
        assert "right" in completed.stdout, completed.stdout


def test_a_recorded_loop(backend, tmp_path):
    if backend == "host":
        pytest.skip("CPU devices have no CUDA graphs; tests/gpu_topologies compiles this for GPUs")
    flags = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS} {dump_flags(tmp_path / '{rank}')}"
    for rank, completed in enumerate(run_ranks(backend, 2, "recorded", XLA_FLAGS=flags)):
        assert completed.returncode == 0, completed.stdout
        assert "all recorded sums are right" in completed.stdout, completed.stdout
        found = recorded(tmp_path / str(rank), "jit_recorded_loop")
        assert found == Recorded(inside=1, outside=0, loops=1), (
            f"XLA was to record the loop and the call in it, and recorded {found}: the driver may be too old for loops "
            "in graphs, or this JAX may want other flags than " + FLAGS
        )


def test_a_group_connects_beside_a_running_loop(backend):
    for completed in run_ranks(backend, 2, "beside"):
        assert completed.returncode == 0, completed.stdout
        assert "both are right" in completed.stdout, completed.stdout
        print(completed.stdout[-100:])


def test_a_skipped_call_raises_on_the_other_ranks(backend):
    if backend == "host":
        pytest.skip("CPU devices use the CPU engine: tests/multiprocess/test_failures.py")
    first, second = run_ranks(backend, 2, "skip", JAX_RING_TIMEOUT_S="5")
    assert "JaxRuntimeError" in first.stdout, first.stdout
    waited = r"rank 0 \(GPU \d of process 0\) waited 5 s for rank 1 \(GPU \d of process 1\)"
    assert re.search(waited, first.stdout), first.stdout
    assert "the process continues" in first.stdout, first.stdout
    assert second.returncode == 0, second.stdout


def test_programs_run_again_after_a_failure(backend):
    if backend == "host":
        pytest.skip("CPU devices use the CPU engine: tests/multiprocess/test_failures.py")
    for completed in run_ranks(backend, 2, "go on", JAX_RING_TIMEOUT_S="5"):
        assert completed.returncode == 0, completed.stdout
        assert "all sums are right" in completed.stdout, completed.stdout
