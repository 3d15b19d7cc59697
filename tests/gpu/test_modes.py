"""Collectives between ranks on one GPU: in one launch, on separate streams, and replayed from CUDA graphs."""

import ml_dtypes
import numpy as np
import pytest
from helpers import rank_fold, ring_fold

VARIANTS = [("one_shot", "rank"), ("two_shot", "rank"), ("ring", "rank"), ("ring", "ring"), ("ring", "any")]
MODES = ["together", "streams", "graphs"]
DTYPES = {
    "u8": np.uint8, "u16": np.uint16, "u32": np.uint32, "u64": np.uint64,
    "s8": np.int8, "s16": np.int16, "s32": np.int32, "s64": np.int64,
    "f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32, "f64": np.float64,
    "f8e5m2": ml_dtypes.float8_e5m2, "f8e4m3": ml_dtypes.float8_e4m3, "f8e3m4": ml_dtypes.float8_e3m4,
    "f8e4m3fn": ml_dtypes.float8_e4m3fn, "f8e4m3b11fnuz": ml_dtypes.float8_e4m3b11fnuz,
    "f8e4m3fnuz": ml_dtypes.float8_e4m3fnuz, "f8e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
}  # fmt: skip


@pytest.fixture
def ranks(backend):
    from jax_ring import _gpu_check

    # A hang should cost seconds. The threads of a dry run share the cores with other tests.
    deadline = 5.0 if backend == "cuda" else 30.0
    return lambda p, **options: _gpu_check.Ranks(backend, [(0, 0)] * p, **{"deadline": deadline} | options)


def random(dtype, shape, seed=0) -> np.ndarray:
    values = np.random.default_rng(seed).normal(0, 2, shape)
    return np.abs(values * 9).astype(dtype) if np.issubdtype(dtype, np.integer) else values.astype(dtype)


def reduce(group, operands, dtype="f32", **options) -> list[np.ndarray]:
    """All-reduces operands of shape (ranks, ...); the results have the same shape."""
    inputs = [[operand[rank].tobytes() for operand in operands] for rank in range(len(operands[0]))]
    results = group.run(inputs, dtype, **options)
    assert group.failure() == ""
    return [
        np.stack([np.frombuffer(result[i], operand.dtype).reshape(operand.shape[1:]) for result in results])
        for i, operand in enumerate(operands)
    ]


@pytest.mark.parametrize("how", MODES)
@pytest.mark.parametrize("p", [2, 3, 8])
def test_the_family(ranks, p, how):
    group = ranks(p)
    for size in (0, 1, 5, 4096, 70_001):
        x = random(np.float32, (p, size), size)
        options = {"dtype": "f32", "how": how}

        def results(operand, collective, options=options, **details):
            inputs = [[row.tobytes()] for row in operand]
            outputs = group.run(inputs, collective=collective, **options, **details)
            assert group.failure() == ""
            return [np.frombuffer(result[0], np.float32) for result in outputs]

        for got in results(x, "all_gather"):
            np.testing.assert_array_equal(got, x.reshape(-1))
        for got in results(x, "broadcast", root=p - 1):
            np.testing.assert_array_equal(got, x[p - 1])
        for rank, got in enumerate(results(x, "reduce", root=1)):
            np.testing.assert_array_equal(got, rank_fold(x) if rank == 1 else 0 * x[0])
        for op, reference in (("max", np.max), ("min", np.min)):
            for got in results(x, "all_reduce", op=op):
                np.testing.assert_array_equal(got, reference(x, axis=0))
        blocks = random(np.float32, (p, p, size), size + 1)
        for order in ("rank", "ring", "any"):
            for rank, got in enumerate(results(blocks, "reduce_scatter", order=order)):
                first = rank + 1 if order == "ring" else 0
                np.testing.assert_array_equal(got, rank_fold(np.roll(blocks[:, rank], -first, axis=0)))


@pytest.mark.parametrize("how", MODES)
@pytest.mark.parametrize("p", [1, 2, 3, 8])
def test_exchanges(ranks, p, how):
    """All-to-alls and permutations move bytes, in blocks of any size, from and to any address."""
    group = ranks(p)
    mirrored = [p - 1 - rank if rank % 2 == 0 else -1 for rank in range(p)]
    for dtype, sizes in (("u8", (0, 1, 15, 16, 17, 4096, 70_001)), ("f32", (5, 300_001))):
        for size in sizes:
            blocks = random(DTYPES[dtype], (p, p, size), size)

            def results(operand, collective, dtype=dtype, **details):
                inputs = [[row.tobytes(), row[:0].tobytes(), row.tobytes()] for row in operand]
                outputs = group.run(inputs, dtype, collective=collective, how=how, repeats=2, **details)
                assert group.failure() == ""
                assert all(len(second) == 0 and first == third for first, second, third in outputs)
                return [np.frombuffer(result[0], DTYPES[dtype]) for result in outputs]

            for rank, got in enumerate(results(blocks, "all_to_all")):
                np.testing.assert_array_equal(got, blocks[:, rank].reshape(-1))
            for sources in (np.roll(np.arange(p), 1).tolist(), mirrored, [-1] * p):
                for rank, got in enumerate(results(blocks[:, 0], "permute", sources=sources)):
                    want = blocks[sources[rank], 0] if sources[rank] >= 0 else np.zeros_like(got)
                    np.testing.assert_array_equal(got, want)


def test_a_permutation_needs_a_source_for_each_rank(ranks):
    for sources in ([1], [0, 2], [0, -2]):
        with pytest.raises(ValueError, match="one source for each of 2 ranks"):
            ranks(2).run([[b"1234"]] * 2, "u8", collective="permute", sources=sources)


def expect_sum(got: np.ndarray, operand: np.ndarray, order: str) -> None:
    # In a ring, any order is the ring's own.
    want = rank_fold(operand) if order == "rank" else ring_fold(operand)
    for rank, result in enumerate(got):
        np.testing.assert_array_equal(result.view(np.uint8), want.view(np.uint8), err_msg=f"rank {rank}")


@pytest.mark.parametrize("how", MODES)
@pytest.mark.parametrize(("algorithm", "order"), VARIANTS)
@pytest.mark.parametrize("p", [1, 2, 3, 5, 8])
def test_sizes_around_boundaries(ranks, p, algorithm, order, how):
    group = ranks(p)
    for seed, size in enumerate([0, 1, p - 1, p, p + 1, 1023, 32 * 1024 // 4, 32 * 1024 // 4 + 1, 300_001]):
        operand = random(np.float32, (p, size), seed)
        (got,) = reduce(group, [operand], algorithm=algorithm, order=order, how=how)
        expect_sum(got, operand, order)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("algorithm", "order"), VARIANTS)
def test_every_dtype(backend, ranks, algorithm, order, dtype):
    from jax_ring import _gpu_check

    if dtype not in _gpu_check.built_dtypes(backend):
        pytest.skip("this build has no kernels of some types (JAX_RING_CUDA_DTYPES)")
    operand = random(DTYPES[dtype], (8, 70_003))
    (got,) = reduce(ranks(8), [operand], dtype, algorithm=algorithm, order=order)
    expect_sum(got, operand, order)


def test_all_dtypes_are_covered():
    from jax_ring import _gpu_check

    assert set(DTYPES) == set(_gpu_check.dtypes())


test_all_dtypes_are_covered = pytest.mark.usefixtures("backend")(test_all_dtypes_are_covered)


def test_all_ctas_of_ranks_that_share_a_gpu_run_at_the_same_time(backend, ranks):
    from jax_ring import _gpu_check

    # With more than 64 registers one CTA of 512 threads fits on each processor: 108 on an A100, 132 on an H100.
    assert _gpu_check.ctas_of_each(wanted=16, ranks=8, resident=132) == 16
    assert _gpu_check.ctas_of_each(wanted=16, ranks=8, resident=108) == 13
    with pytest.raises(RuntimeError, match="8 ranks share a GPU that runs 7 CTAs"):
        _gpu_check.ctas_of_each(wanted=16, ranks=8, resident=7)
    for p in (2, 8):
        assert p * ranks(p).num_ctas <= _gpu_check.resident_ctas(backend)
    assert ranks(2, max_ctas=1).num_ctas == 1


@pytest.mark.parametrize(("algorithm", "order"), VARIANTS)
def test_against_float64(ranks, algorithm, order):
    operand = random(np.float32, (8, 50_000))
    (got,) = reduce(ranks(8), [operand], algorithm=algorithm, order=order)
    exact = operand.astype(np.float64).sum(0)
    # Seven additions; each rounds by at most half a ULP of a partial sum.
    bound = 7 * 2.0**-24 * np.abs(operand).sum(0)
    assert np.all(np.abs(got.astype(np.float64) - exact) <= bound)


@pytest.mark.parametrize(("algorithm", "order"), VARIANTS)
def test_trees_and_repeated_calls(backend, ranks, algorithm, order):
    operands = [random(np.float32, (4, size), size) for size in [*range(80), 40_000]]
    options = {"algorithm": algorithm, "order": order, "how": "graphs", "repeats": 50 if backend == "cuda" else 5}
    for got, operand in zip(reduce(ranks(4), operands, **options), operands, strict=True):
        expect_sum(got, operand, order)


@pytest.mark.parametrize(("algorithm", "order"), VARIANTS)
def test_counters_wrap_around(ranks, algorithm, order):
    group = ranks(3)
    group.start_from(2**32 - 5)
    for seed in range(6):
        operand = random(np.float32, (3, 20_000), seed)
        (got,) = reduce(group, [operand], algorithm=algorithm, order=order, repeats=3)
        expect_sum(got, operand, order)


def test_counters_wrap_around_in_exchanges(ranks):
    group = ranks(3)
    group.start_from(2**32 - 5)
    for seed in range(6):
        blocks = random(np.uint8, (3, 3, 20_000), seed)
        inputs = [[row.tobytes()] for row in blocks]
        swapped = group.run(inputs, "u8", collective="all_to_all", repeats=3)
        shifted = group.run(inputs, "u8", collective="permute", sources=[1, 2, 0], repeats=3)
        assert group.failure() == ""
        for rank in range(3):
            assert swapped[rank][0] == blocks[:, rank].tobytes()
            assert shifted[rank][0] == inputs[(rank + 1) % 3][0]


def test_a_message_larger_than_all_buffers(ranks):
    # 5 MB for each team, which is more than its buffers hold: 80 MB for 16 teams.
    operand = random(np.float32, (2, 1_250_000 * ranks(2).num_ctas + 3))
    for algorithm, order in VARIANTS:
        (got,) = reduce(ranks(2), [operand], algorithm=algorithm, order=order)
        expect_sum(got, operand, order)


def test_same_bits_as_the_cpu_engine(backend, ranks):
    import jax
    from helpers import make_mesh, sharded

    from jax_ring import ring_psum

    mesh = make_mesh(devices=jax.devices("cpu"))
    from jax_ring import _gpu_check

    for name in {"f32", "bf16", "f16", "f8e4m3fn"} & set(_gpu_check.built_dtypes(backend)):
        operand = random(DTYPES[name], (8, 4099))
        for order in ("rank", "ring"):
            with jax.default_device(jax.devices("cpu")[0]):
                psum = sharded(lambda x, order=order: ring_psum(x, "i", order=order), mesh=mesh, check_vma=False)
                on_cpu = np.asarray(psum(operand))
            (on_gpu,) = reduce(ranks(8), [operand], name, algorithm="ring", order=order)
            np.testing.assert_array_equal(on_gpu.view(np.uint8), on_cpu.view(np.uint8))
