"""ring_psum through JAX on GPUs: several processes share one GPU, and each is one rank of the mesh."""

import os
import socket
import subprocess
import sys

import pytest


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def run_ranks(backend, count: int, part: str, **environment) -> list[subprocess.CompletedProcess]:
    """Runs jax_rank.py in `count` processes, and returns the exit status and output of each."""
    variables = os.environ | environment | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    variables["JAX_PLATFORMS"] = "cuda,cpu" if backend == "cuda" else "cpu"
    script = os.path.join(os.path.dirname(__file__), "jax_rank.py")
    coordinator = f"localhost:{free_port()}"
    workers = [
        subprocess.Popen(
            [sys.executable, script, coordinator, str(count), str(i), part],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=variables,
        )
        for i in range(count)
    ]  # fmt: skip
    completed = []
    for worker in workers:
        try:
            output, _ = worker.communicate(timeout=200)
        except subprocess.TimeoutExpired:
            worker.kill()
            output = worker.communicate()[0] + "\n(killed: timed out)"
        completed.append(subprocess.CompletedProcess(worker.args, worker.returncode, output))
    return completed


@pytest.mark.parametrize("count", [2, 4])
def test_sums_gradients_loops_and_trees(backend, count):
    for completed in run_ranks(backend, count, "sums"):
        assert completed.returncode == 0, completed.stdout
        assert "all sums are right" in completed.stdout, completed.stdout


def test_a_skipped_call_raises_on_the_other_ranks(backend):
    if backend == "host":
        pytest.skip("CPU devices use the CPU engine: tests/multiprocess/test_failures.py")
    first, second = run_ranks(backend, 2, "skip", JAX_RING_TIMEOUT_S="3")
    assert "JaxRuntimeError" in first.stdout, first.stdout
    assert "rank 0 (GPU 0 of process 0) waited 3 s for rank 1 (GPU 0 of process 1)" in first.stdout, first.stdout
    assert "the process continues" in first.stdout, first.stdout
    assert second.returncode == 0, second.stdout
