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
    ended = []
    for worker in workers:
        try:
            output, _ = worker.communicate(timeout=200)
        except subprocess.TimeoutExpired:
            worker.kill()
            output = worker.communicate()[0] + "\n(killed: timed out)"
        ended.append(subprocess.CompletedProcess(worker.args, worker.returncode, output))
    return ended


@pytest.mark.parametrize("count", [2, 4])
def test_sums_gradients_loops_and_trees(backend, count):
    for ended in run_ranks(backend, count, "sums"):
        assert ended.returncode == 0, ended.stdout
        assert "all sums are right" in ended.stdout, ended.stdout


def test_a_rank_that_skips_the_call_is_an_exception_on_the_others(backend):
    if backend == "host":
        pytest.skip("CPU devices use the CPU engine: tests/multiprocess/test_failures.py")
    first, second = run_ranks(backend, 2, "skip", JAX_RING_TIMEOUT_S="3")
    assert "JaxRuntimeError" in first.stdout, first.stdout
    assert "rank 0 (GPU 0 of process 0) waited 3 s for rank 1 (GPU 0 of process 1)" in first.stdout, first.stdout
    assert "the process continues" in first.stdout, first.stdout
    assert second.returncode == 0, second.stdout
