"""All-reduce between processes that share one GPU, with and without a missing rank."""

import multiprocessing
import time

import numpy as np
import pytest
from helpers import rank_fold

ALGORITHMS = ["one_shot", "two_shot", "ring"]
SIZES = [1, 1000, 100_003]


class Table:
    """The key-value store through which processes exchange the handles of their memory."""

    def __init__(self, shared):
        self.shared = shared

    def publish(self, key: str, value: bytes) -> None:
        self.shared[key] = value

    def fetch(self, key: str) -> bytes:
        for _ in range(3000):
            if key in self.shared:
                return self.shared[key]
            time.sleep(0.01)
        raise TimeoutError(key)


def run_rank(backend, process, count, shared, absent, results):
    """Body of each process: for each algorithm some all-reduces, then one in which rank `absent` does not take part."""
    from jax_ring import _gpu_check

    table = Table(shared)
    deadline = 20.0 if absent is None else 3.0
    by_algorithm = {}
    for algorithm in ALGORITHMS:  # each in a group of its own, which a failure ends
        group = _gpu_check.Ranks(
            backend, [(i, 0) for i in range(count)], process, name=algorithm, deadline=deadline,
            publish=table.publish, fetch=table.fetch,
        )  # fmt: skip
        outputs = [
            group.run([[data(process, size).tobytes()]], "f32", algorithm, how="streams")[0][0] for size in SIZES
        ]
        if absent is not None and process != absent:
            group.run([[data(process, 1000).tobytes()]], "f32", algorithm, how="streams")
        by_algorithm[algorithm] = outputs, group.failure()
        # The other processes may still use this one's memory.
        shared[f"{algorithm}/{process}"] = True
        while not all(f"{algorithm}/{i}" in shared for i in range(count)):
            time.sleep(0.01)
    results.put((process, by_algorithm))


def data(process: int, size: int) -> np.ndarray:
    return np.random.default_rng(process).normal(size=size).astype(np.float32)


def run_processes(backend, count, absent=None):
    """What each process got: for each algorithm its results by size, and its failure."""
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager:
        shared, results = manager.dict(), manager.Queue()
        workers = [
            context.Process(target=run_rank, args=(backend, i, count, shared, absent, results)) for i in range(count)
        ]
        for worker in workers:
            worker.start()
        try:
            return dict(results.get(timeout=120) for _ in range(count))
        finally:
            for worker in workers:
                worker.join(5)
                worker.kill()


@pytest.mark.parametrize("count", [2, 4])
def test_sums(backend, count):
    for by_algorithm in run_processes(backend, count).values():
        for algorithm, (outputs, failure) in by_algorithm.items():
            assert failure == "", algorithm
            for size, output in zip(SIZES, outputs, strict=True):
                want = rank_fold(np.stack([data(i, size) for i in range(count)]))
                np.testing.assert_array_equal(np.frombuffer(output, np.uint32), want.view(np.uint32), algorithm)


def test_a_rank_that_does_not_arrive_is_named(backend):
    absent = 1
    by_process = run_processes(backend, 3, absent)
    for algorithm in ALGORITHMS:
        failures = {process: by_algorithm[algorithm][1] for process, by_algorithm in by_process.items()}
        for process, failure in failures.items():
            assert (failure == "") == (process == absent), (algorithm, failures)
        assert any(f"rank {absent} (GPU 0 of process {absent})" in failure for failure in failures.values()), failures
