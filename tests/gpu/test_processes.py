"""All-reduce between processes that share one GPU, with and without a missing rank."""

import multiprocessing
import time

import numpy as np
import pytest
from helpers import rank_fold

PROCESSES = [2, 4]


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


def run_rank(backend, process, count, shared, absent, algorithm, results):
    """Body of each process: some all-reduces, then one in which rank `absent` does not take part."""
    from jax_ring import _gpu_check

    table = Table(shared)
    group = _gpu_check.Ranks(
        backend, [(i, 0) for i in range(count)], process, deadline=5.0, publish=table.publish, fetch=table.fetch
    )
    outputs = []
    for size in (1, 1000, 100_003):
        mine = data(process, size).tobytes()
        outputs.append(group.run([[mine]], "f32", algorithm, how="streams")[0][0])
    if absent is not None and process != absent:
        group.run([[data(process, 1000).tobytes()]], "f32", algorithm, how="streams")
    results.put((process, outputs, group.failure()))
    # The other processes may still use this one's memory.
    while memory_is_needed(shared):
        time.sleep(0.01)


def data(process: int, size: int) -> np.ndarray:
    return np.random.default_rng(process).normal(size=size).astype(np.float32)


def memory_is_needed(shared) -> bool:
    return "done" not in shared


def run_processes(backend, count, algorithm, absent=None):
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager:
        shared, results = manager.dict(), manager.Queue()
        workers = [
            context.Process(target=run_rank, args=(backend, i, count, shared, absent, algorithm, results))
            for i in range(count)
        ]
        for worker in workers:
            worker.start()
        try:
            completed = (results.get(timeout=120) for _ in range(count))
            return {process: (outputs, failure) for process, outputs, failure in completed}
        finally:
            shared["done"] = True
            for worker in workers:
                worker.join(30)
                worker.kill()


@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot", "ring"])
@pytest.mark.parametrize("count", PROCESSES)
def test_sums(backend, count, algorithm):
    by_process = run_processes(backend, count, algorithm)
    for outputs, failure in by_process.values():
        assert failure == ""
        for size, output in zip((1, 1000, 100_003), outputs, strict=True):
            want = rank_fold(np.stack([data(i, size) for i in range(count)]))
            np.testing.assert_array_equal(np.frombuffer(output, np.uint32), want.view(np.uint32))


@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot", "ring"])
def test_a_rank_that_does_not_arrive_is_named(backend, algorithm):
    absent = 1
    by_process = run_processes(backend, 3, algorithm, absent)
    waited_for = [f"rank {absent} (GPU 0 of process {absent})" in failure for _, failure in by_process.values()]
    for process, (_, failure) in by_process.items():
        assert (failure == "") == (process == absent), failure
    assert any(waited_for)
