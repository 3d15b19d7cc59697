"""The options of a collective: the order of the fold, bit for bit, and valid and invalid choices."""

import itertools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    assert_same_bits,
    compiled_text,
    make_mesh,
    num_calls,
    rank_fold,
    ring_fold,
    run_python,
    sharded,
    tree_fold,
)
from jax import lax
from jax.sharding import PartitionSpec as P
from tiers import full_but

from jax_ring import ring_pmean, ring_psum, ring_psum_scatter, ring_reduce
from jax_ring.options import ALGORITHMS, ORDERS, Options, make_options

DTYPES = ["float32", "bfloat16", "float16", "float8_e4m3fn", "complex64", "int32", "uint8"]


def values_of(dtype, shape, seed=0):
    """Values of both signs and very different magnitudes, whose sum depends on the order."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape) * 2.0 ** rng.integers(-6, 6, shape)
    if np.dtype(dtype).kind == "c":
        values = values + 1j * rng.standard_normal(shape)
    return values.astype(np.dtype(dtype)) if np.dtype(dtype).kind in "ciu" else jnp.asarray(values).astype(dtype)


def psum_of_ranks(values, **options):
    """ring_psum where rank r holds leaf[r] of each leaf. Returns the results of all ranks, stacked."""
    ranks = len(jax.tree.leaves(values)[0])

    def body(values):
        total = ring_psum(jax.tree.map(lambda v: v[0], values), "i", **options)
        return jax.tree.map(lambda x: x[None], total)

    return sharded(body, mesh=make_mesh((ranks,)), check_vma=False)(values)


@pytest.mark.one_pair
@pytest.mark.parametrize(
    ("dtype", "ranks"),
    full_but(
        itertools.product(DTYPES, [1, 2, 3, 4, 5, 8]),
        [("float32", 3), ("float32", 5), ("float32", 8), ("bfloat16", 4), ("int32", 8)],
    ),
)
def test_ring_order(dtype, ranks):
    # Counts around the number of ranks, one pack of 16 bytes, and one pack per rank.
    pack = 16 // jnp.dtype(dtype).itemsize
    counts = {0, 1, ranks - 1, ranks, ranks + 1, pack - 1, pack + 1, ranks * pack - 1, ranks * pack + 1, 1003}
    values = {str(count): np.asarray(values_of(jnp.dtype(dtype), (ranks, count), count)) for count in sorted(counts)}
    totals = psum_of_ranks(values, order="ring")
    for count, operands in values.items():
        for total in totals[count]:
            assert_same_bits(total, ring_fold(operands))


def test_ring_order_differs_from_rank_order():
    # Otherwise the tests of the ring order would prove nothing.
    values = np.asarray(values_of("float32", (8, 1003)))
    assert np.any(ring_fold(values) != rank_fold(values))


def test_known_ring_order():
    # One pack per rank, for 3 ranks. 1e8 + 1 is 1e8 in float32, so the result shows the order of the fold.
    values = np.repeat(np.array([[1e8], [-1e8], [1]], np.float32), 12, axis=1)
    (total, *_) = psum_of_ranks(values, order="ring")
    # Block 0: (-1e8 + 1) + 1e8; block 1: (1 + 1e8) - 1e8; block 2: (1e8 - 1e8) + 1.
    np.testing.assert_array_equal(total, np.repeat([0, 0, 1], 4))


@pytest.mark.one_pair
def test_ring_order_of_64_bits():
    with jax.enable_x64(True):
        for dtype in (np.float64, np.complex128):
            values = values_of(dtype, (5, 77))
            for total in psum_of_ranks(values, order="ring"):
                assert_same_bits(total, ring_fold(values))


@pytest.mark.one_pair
def test_ring_order_of_a_large_message():
    # Larger than a chunk, than the part that one thread folds, and than the caches.
    for count in (40_003, 500_009):
        values = np.asarray(values_of("float32", (4, count)))
        for total in psum_of_ranks(values, order="ring"):
            assert_same_bits(total, ring_fold(values))


@pytest.mark.one_pair
def test_ring_order_of_a_tree_is_that_of_its_leaves():
    values = {"a": values_of("float32", (4, 3, 5)), "b": [values_of("bfloat16", (4, 33)), values_of("float32", (4, 1))]}
    totals = psum_of_ranks(values, order="ring")
    assert_same_bits(jax.tree.map(lambda total: total[2], totals), jax.tree.map(ring_fold, values))


def test_ring_order_in_groups():
    values = np.asarray(values_of("float32", (6, 101)))
    groups = [[5, 0, 2], [1], [4, 3]]
    totals = psum_of_ranks(values, order="ring", axis_index_groups=groups)
    for group in groups:
        for rank in group:
            assert_same_bits(totals[rank], ring_fold(values[group]))


@pytest.mark.one_pair
def test_any_order_is_rank_order_on_cpu_devices():
    values = {"a": values_of("float32", (8, 1003)), "b": values_of("bfloat16", (8, 77))}
    for algorithm in ALGORITHMS:
        totals = psum_of_ranks(values, algorithm=algorithm, order="any")
        for rank in range(8):
            assert_same_bits(
                jax.tree.map(lambda total, rank=rank: total[rank], totals), jax.tree.map(rank_fold, values)
            )


@pytest.mark.one_pair
def test_any_order_in_the_family():
    values = np.asarray(values_of("float32", (8, 8, 5)))
    scattered = sharded(lambda x: ring_psum_scatter(x[0], "i", order="any")[None], check_vma=False)(values)
    assert_same_bits(np.asarray(scattered), rank_fold(values))
    mean = sharded(lambda x: ring_pmean(x[0], "i", order="any")[None], check_vma=False)(values)
    assert_same_bits(np.asarray(mean)[3], rank_fold(values) / np.float32(8))
    reduced = sharded(lambda x: ring_reduce(x[0], "i", root=2, order="any")[None], check_vma=False)(values)
    assert_same_bits(np.asarray(reduced)[2], rank_fold(values))


@pytest.mark.one_pair
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("order", ORDERS)
def test_no_algorithm_changes_the_result(algorithm, order):
    if (order == "ring" and algorithm not in ("auto", "ring")) or (order, algorithm) == ("tree", "ring"):
        pytest.skip("refused")
    values = np.asarray(values_of("bfloat16", (8, 321)))
    expected = {"rank": rank_fold, "ring": ring_fold, "any": rank_fold, "tree": tree_fold}[order](values)
    for total in psum_of_ranks(values, algorithm=algorithm, order=order):
        assert_same_bits(total, expected)


def test_options_under_transformations(check_vma):
    options = {"algorithm": "ring", "order": "ring"}
    x = np.asarray(values_of("float32", (8, 3, 40)))

    def body(x, **options):
        f = lambda x: ring_psum(x, "i", **options)  # noqa: E731
        vary = lambda x: x if not check_vma else lax.pcast(x, "i", to="varying")  # noqa: E731
        gradient = jax.grad(lambda x: jnp.sum(vary(f(x * x)) * x))(x)
        return gradient, vary(jax.jvp(f, (x,), (x,))[1]), vary(jax.vmap(f, in_axes=1)(x))

    text = str(jax.make_jaxpr(sharded(lambda x: body(x, **options), check_vma=check_vma, jit=False))(x))
    calls = "".join(text.split()).count("options=Options(algorithm='ring',order='ring',overlap=False,")
    assert calls == text.count("ring_psum") > 3
    # A batched operand is one operand: its ring blocks span the whole batch.
    batched = sharded(lambda x: body(x, **options)[2], check_vma=check_vma)(x)
    assert_same_bits(np.asarray(batched)[:3, 0], ring_fold(np.moveaxis(x[:, None], 2, 1))[:, 0])


def test_options_over_a_vmap_axis():
    x = np.arange(12.0, dtype=np.float32).reshape(4, 3)
    total = jax.vmap(lambda x: ring_psum(x, "v", algorithm="ring", order="ring"), axis_name="v")(x)
    np.testing.assert_array_equal(total, np.tile(x.sum(0), (4, 1)))


def test_calls_with_different_options_do_not_merge(check_vma):
    def body(x):
        return ring_psum(x, "i") + ring_psum(x, "i", order="ring")

    f = sharded(body, out_specs=P(), check_vma=check_vma)
    assert num_calls(f, jnp.arange(8.0)) == 2
    text = jax.jit(f).lower(jnp.arange(8.0)).as_text()
    assert text.count('algorithm = "auto"') == 2
    assert text.count('order = "rank"') == text.count('order = "ring"') == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithm": "tree"}, r"algorithm must be one of 'auto', 'one_shot', 'two_shot', 'ring'; got 'tree'"),
        ({"algorithm": None}, r"algorithm must be one of .*; got None"),
        ({"order": "fast"}, r"order must be one of 'rank', 'ring', 'any', 'tree'; got 'fast'"),
        ({"order": ["ring"]}, r"order must be one of .*; got \['ring'\]"),
        ({"order": "ring", "algorithm": "one_shot"}, r"order='ring' needs algorithm='ring' or 'auto'.*'one_shot'"),
        ({"order": "ring", "algorithm": "two_shot"}, r"order='ring' needs algorithm='ring' or 'auto'.*'two_shot'"),
        ({"order": "tree", "algorithm": "ring"}, r"order='tree' cannot have algorithm='ring'"),
    ],
    ids=str,
)
def test_refused_when_traced(options, message, check_vma):
    f = sharded(lambda x: ring_psum(x, "i", **options), out_specs=P(), check_vma=check_vma)
    with pytest.raises(ValueError, match=f"ring_psum: {message}"):
        jax.make_jaxpr(f)(jnp.arange(8.0))


def test_defaults_and_text():
    assert make_options("f") == Options() == Options("auto", "rank", overlap=False, num_shards=None, apart=False)
    assert Options().ignored_by_xla() == Options("auto", "any").ignored_by_xla() == ""
    assert Options("ring", "ring").ignored_by_xla() == "algorithm='ring', order='ring'"
    assert Options("auto", "tree").ignored_by_xla() == ""
    assert Options("two_shot", "any").ignored_by_xla() == "algorithm='two_shot'"


def on_a_partly_manual_mesh(**options):
    """A function that falls back to XLA, and its operand."""
    mesh = make_mesh((2, 2), ("i", "j"))
    f = jax.shard_map(
        lambda x: ring_psum(x, "i", **options), mesh=mesh, in_specs=P("i"), out_specs=P(), axis_names={"i"}
    )
    return jax.jit(f), jnp.arange(8.0)


@pytest.mark.usefixtures("left_to_xla")
def test_fallback_logs_ignored_options(caplog):
    ignored_or_not = [
        ({}, "uses XLA's all_reduce: the"),
        ({"order": "ring"}, "ignores order='ring': the"),
        ({"order": "any"}, "uses XLA's all_reduce: the"),  # XLA's order is one
    ]
    for options, words in ignored_or_not:
        f, x = on_a_partly_manual_mesh(**options)
        with caplog.at_level(logging.INFO, logger="jax_ring"):
            np.testing.assert_array_equal(f(x), np.arange(8.0).reshape(2, 4).sum(0))
        assert words in caplog.records[-1].getMessage()


STRICT = """
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec as P
import numpy as np
from jax_ring import ring_psum
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("i", "j"))
x = jnp.arange(8.0)
def total(**options):
    total = lambda x: ring_psum(x, "i", order="ring")
    return jax.jit(jax.shard_map(total, mesh=mesh, in_specs=P("i"), out_specs=P(), **options))
print(total()(x))
print(total(axis_names={"i"})(x))
"""


def test_strict_forbids_the_fallback():
    result = run_python(STRICT, devices=4, JAX_RING_STRICT="1")
    assert "[ 4.  6.  8. 10.]" in result.stdout  # the call that needs no fallback
    assert result.returncode != 0
    assert (
        "NotImplementedError: ring_psum over ('i',) would use XLA's all_reduce, which ignores order='ring': the"
        in result.stderr
    )
    assert "JAX_RING_STRICT=1 forbids it" in result.stderr


@pytest.mark.full
@pytest.mark.parametrize("text", ["0", ""])
def test_not_strict(text):
    result = run_python(STRICT, devices=4, JAX_RING_STRICT=text)
    assert result.stdout.count("[ 4.  6.  8. 10.]") == 2, result.stderr


@pytest.mark.full
def test_strict_is_0_or_1():
    result = run_python("import jax_ring", JAX_RING_STRICT="yes")
    assert "ValueError: JAX_RING_STRICT must be 1" in result.stderr
    assert "got 'yes'" in result.stderr


def test_in_place_with_ring_order():
    # A computed operand is summed in its own buffer: blocks are read and written at the same offsets.
    values = np.asarray(values_of("float32", (8, 1003)))
    f = sharded(lambda x: ring_psum(jnp.sin(x), "i", order="ring"), out_specs=P())
    assert "output_to_operand_aliasing" in compiled_text(f, values)
    sines = np.asarray(jax.jit(jnp.sin)(values))
    assert_same_bits(np.asarray(f(values))[0], ring_fold(sines))
