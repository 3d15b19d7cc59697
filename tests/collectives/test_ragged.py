"""The ragged all-to-all, against numpy and a dense computation. XLA cannot compile that of lax for CPU devices."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import make_mesh, num_calls, sharded
from jax import lax
from jax.sharding import PartitionSpec as P

import jax_ring
from jax_ring import override_lax, ring_ragged_all_to_all

RANKS = 4
ROWS_IN, ROWS_OUT = 12, 40
GROUPS = [[3, 0], [1, 2]]


def plan(seed=0, slices=1, ranks=RANKS, dtype=np.int32):
    """Stacked offsets and sizes of random slices that do not overlap, with gaps between those that are received."""
    rng = np.random.default_rng(seed)
    num = ranks * slices
    send = rng.multinomial(ROWS_IN - 2, np.ones(num) / num, ranks)
    begins = np.cumsum(np.pad(send, ((0, 0), (2, 0))), 1)[:, 1:-1]  # in order, and gaps at the end only
    recv = send.reshape(ranks, ranks, slices).swapaxes(0, 1).reshape(ranks, num)
    gaps = rng.integers(0, 3, (ranks, num))
    to = np.cumsum(gaps, 1) + np.cumsum(np.pad(recv, ((0, 0), (1, 0))), 1)[:, :-1]
    at_senders = to.reshape(ranks, ranks, slices).swapaxes(0, 1).reshape(ranks, num)
    order = rng.permuted(np.tile(np.arange(num), (ranks, 1)), axis=1)  # slices are sent from anywhere
    lengths = np.take_along_axis(send, order, 1)
    starts = np.cumsum(np.pad(lengths, ((0, 0), (1, 0))), 1)[:, :-1]
    begins = np.empty_like(starts)
    np.put_along_axis(begins, order, starts, 1)
    return tuple(x.astype(dtype) for x in (begins, send, at_senders, recv))


def reference(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes):
    """The stacked results."""
    del recv_sizes
    result, ranks = np.array(output), len(operand)
    each = input_offsets.shape[1] // ranks
    for source in range(ranks):
        for i, (begin, size, to) in enumerate(
            zip(input_offsets[source], send_sizes[source], output_offsets[source], strict=True)
        ):
            result[i // each, to : to + size] = operand[source, begin : begin + size]
    return result


def arrays(shape=(3,), dtype=np.float32, ranks=RANKS):
    rng = np.random.default_rng(1)
    return tuple(
        rng.standard_normal((ranks, rows, *shape)).astype(np.float32).astype(dtype) for rows in (ROWS_IN, ROWS_OUT)
    )


def mapped(function=ring_ragged_all_to_all, ranks=RANKS, check_vma=True, **options):
    return sharded(
        lambda *xs: function(*(x[0] for x in xs), axis_name="i", **options)[None],
        mesh=make_mesh((ranks,)), check_vma=check_vma,
    )  # fmt: skip


@pytest.mark.parametrize("slices", [1, 3])
def test_matches_the_reference(slices, check_vma):
    f = mapped(check_vma=check_vma)
    for seed in range(3):
        arguments = (*arrays(), *plan(seed, slices))
        np.testing.assert_array_equal(f(*arguments), reference(*arguments))
    assert num_calls(f, *arguments) == 2  # one gathers the sizes


def test_every_dtype_by_its_bits():
    numbers = plan()
    names = ["bfloat16", "float16", "float8_e4m3fn", "float8_e8m0fnu", "int8", "uint16", "complex64", "bool", "int4"]
    for name in names:
        dtype = np.dtype(getattr(ml_dtypes, name, name))
        bits = [np.random.default_rng(i).integers(0, 256, (RANKS, rows, 8), np.uint8) for i, rows in ((0, 12), (1, 40))]
        if name in ("bool", "int4"):
            operand, output = ((x % (2 if name == "bool" else 16)).astype(np.int8).astype(dtype) for x in bits)
        else:
            operand, output = (x.view(dtype) for x in bits)
        result = np.asarray(mapped()(operand, output, *numbers))
        assert result.tobytes() == reference(operand, output, *numbers).tobytes(), name


@pytest.mark.parametrize("dtype", ["int64", "int8", "uint32"])
def test_types_of_sizes(dtype):
    with jax.enable_x64(True):
        arguments = (*arrays(()), *plan(dtype=dtype))
        np.testing.assert_array_equal(mapped()(*arguments), reference(*arguments))


@pytest.mark.parametrize("dtype", ["uint8", "int16"])
def test_sums_of_offsets_do_not_fit_their_type(dtype):
    """Of a batch, whose members become consecutive rows, and of the end of a slice in the derivative."""
    last = np.iinfo(dtype).max
    operand, output = np.ones((RANKS, ROWS_IN), np.float32), np.zeros((RANKS, last + 20), np.float32)
    begins, sizes, to, received = plan()
    to = to + last + 1 - (to + sizes).max()

    def body(*xs):
        operand, output, *numbers = (x[0] for x in xs)
        call = lambda output: ring_ragged_all_to_all(operand, output, *numbers, axis_name="i")  # noqa: E731
        batch = output + jnp.arange(3.0)[:, None]
        return jax.vmap(call)(batch)[None], jax.grad(lambda output: jnp.sum(call(output)))(output)[None]

    numbers = [x.astype(dtype) for x in (begins, sizes, to, received)]
    values, gradients = sharded(body, mesh=make_mesh((RANKS,)))(operand, output, *numbers)
    kept = reference(0 * operand, output + 1, begins, sizes, to, received)
    np.testing.assert_array_equal(gradients, kept)
    np.testing.assert_array_equal(values, np.stack([(1 - kept) + kept * member for member in range(3)], 1))


def test_groups(check_vma):
    operand, output = arrays()
    f = mapped(axis_index_groups=GROUPS, check_vma=check_vma)
    numbers = plan(slices=2, ranks=2)
    everyones = [np.empty((RANKS, 4), np.int32) for _ in numbers]
    for group in GROUPS:
        for own, x in zip(everyones, numbers, strict=True):
            own[group] = x
    result = np.asarray(f(operand, output, *everyones))
    for group in GROUPS:
        np.testing.assert_array_equal(result[group], reference(operand[group], output[group], *numbers))


def test_one_rank_and_no_rows():
    one = tuple(np.array([[x, y]], np.int32) for x, y in ((3, 0), (2, 1), (5, 1), (2, 1)))
    operand, output = arrays(ranks=1)
    np.testing.assert_array_equal(mapped(ranks=1)(operand, output, *one), reference(operand, output, *one))
    nothing = tuple(np.zeros((RANKS, RANKS), np.int32) for _ in range(4))
    operand, output = arrays()
    np.testing.assert_array_equal(mapped()(operand[:, :0], output, *nothing), output)
    assert mapped()(operand, output[:, :0], *nothing).shape == (RANKS, 0, 3)


def dense(operand, output, *numbers):
    """The stacked results, by a matrix of zeros and ones for each pair of ranks."""
    picks = np.zeros((RANKS, ROWS_OUT, RANKS, ROWS_IN), np.float32)
    begins, sizes, to, _ = numbers
    each = begins.shape[1] // RANKS
    for source in range(RANKS):
        for i in range(begins.shape[1]):
            for row in range(sizes[source, i]):
                picks[i // each, to[source, i] + row, source, begins[source, i] + row] = 1
    kept = 1 - picks.sum((2, 3))
    return jnp.einsum("rost,st...->ro...", picks, operand) + output * kept[:, :, None]


@pytest.mark.full
@pytest.mark.parametrize("slices", [1, 2])
def test_derivatives(slices, check_vma):
    operand, output = arrays()
    numbers = plan(slices=slices)
    f = mapped(check_vma=check_vma)

    def make_loss(f):
        def loss(operand, output):
            y = f(operand * operand, output * 2, *numbers)
            return jnp.sum(jnp.sin(y) * jnp.cos(jnp.arange(y.size).reshape(y.shape)))

        return loss

    for argnums in (0, 1, (0, 1)):
        ours, expected = (jax.grad(make_loss(fun), argnums) for fun in (f, lambda *xs: dense(*xs)))
        for a, b in zip(*map(jax.tree.leaves, (ours(operand, output), expected(operand, output))), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    tangents = np.cos(operand), np.sin(output)
    np.testing.assert_allclose(
        *(jax.jvp(jax.grad(make_loss(fun)), (operand, output), tangents)[1] for fun in (f, dense)), rtol=1e-4, atol=1e-4
    )


def test_batches():
    # Batched operands, sizes, or both; the batch is one call.
    operands = np.stack([arrays()[0], arrays()[0] + 1, -arrays()[0]], 1)
    outputs = np.stack([arrays()[1], arrays()[1] - 1, arrays()[1] * 2], 1)
    numbers = [np.stack(parts, 1) for parts in zip(*(plan(seed, 2) for seed in range(3)), strict=True)]
    for dims in ((0, 0, 0, 0, 0, 0), (0, None, 0, 0, 0, 0), (None, 0, *[None] * 4), (1, 2, *[None] * 4)):

        def body(*xs, dims=dims):
            xs = [x[0] if d is not None else x[0, 0] for x, d in zip(xs, dims, strict=True)]
            xs = [x if d is None else jnp.moveaxis(x, 0, d) for x, d in zip(xs, dims, strict=True)]
            call = lambda *xs: ring_ragged_all_to_all(*xs, axis_name="i")  # noqa: E731
            return jax.vmap(call, dims)(*xs)[None]

        f = sharded(body, mesh=make_mesh((RANKS,)))
        result = np.asarray(f(operands, outputs, *numbers))
        assert num_calls(f, operands, outputs, *numbers) == 2
        for member in range(3):
            own = [
                x[:, member if d is not None else 0]
                for x, d in zip((operands, outputs, *numbers), dims, strict=True)
            ]  # fmt: skip
            np.testing.assert_array_equal(result[:, member], reference(*own))


def test_a_batch_without_batched_operands():
    arguments = (*arrays(), *plan())

    def body(*xs):
        xs = [x[0] for x in xs]
        call = lambda _: ring_ragged_all_to_all(*xs, axis_name="i")  # noqa: E731
        return jax.vmap(call, out_axes=None)(jnp.arange(2))[None]

    np.testing.assert_array_equal(sharded(body, mesh=make_mesh((RANKS,)))(*arguments), reference(*arguments))


def test_over_a_vmap_axis_it_is_refused_as_by_lax():
    for function in (ring_ragged_all_to_all, lax.ragged_all_to_all):
        f = jax.vmap(lambda *xs, function=function: function(*xs, axis_name="v"), axis_name="v")
        with pytest.raises(NotImplementedError):
            f(*arrays(), *plan())


def test_under_the_override():
    arguments = (*arrays(), *plan())
    f = mapped(lax.ragged_all_to_all, check_vma=False)
    with override_lax():
        np.testing.assert_array_equal(f(*arguments), reference(*arguments))
        assert num_calls(f, *arguments) == 2
        gradient = jax.grad(lambda x: (f(x, *arguments[1:]) ** 2).sum())(arguments[0])
    np.testing.assert_allclose(
        gradient, jax.grad(lambda x: (dense(x, *arguments[1:]) ** 2).sum())(arguments[0]), rtol=1e-5
    )
    with pytest.raises(Exception, match=r"(?i)ragged"):
        f(*arguments)


def test_xla_serves_it_where_no_engine_can(caplog):
    mesh = make_mesh((RANKS, 2), ("i", "other"))
    arguments = (*arrays(), *plan(slices=2))
    f = jax.shard_map(
        lambda *xs: ring_ragged_all_to_all(*(x[0] for x in xs), axis_name="i")[None],
        mesh=mesh, in_specs=P("i"), out_specs=P("i"), axis_names={"i"},
    )  # fmt: skip
    with caplog.at_level("INFO", logger="jax_ring"):
        np.testing.assert_array_equal(jax.jit(f)(*arguments), reference(*arguments))
    assert "ring_ragged_all_to_all over ('i',) uses XLA's all_gather" in caplog.text
    assert "leaves the axes ['other'] to the compiler" in caplog.text
    with override_lax(partitioner=False):  # the gather that takes its place stays XLA's
        assert num_calls(jax.jit(f), *arguments) == 0
    with override_lax():
        assert num_calls(jax.jit(f), *arguments) > 0


def test_explanation():
    arguments = (*arrays(), *plan())
    f = mapped()
    found = jax_ring.explain(f, *arguments)
    assert [call.name for call in found.collectives] == ["ring_ragged_all_to_all"]
    assert [call.served_by for call in found.collectives] == ["jax_ring"]
    # A table of 4 x 4 integers, of which a rank sends its part to 3 others, and at most what the result can hold.
    assert found.predicted_bytes == found.counted_bytes == 64 * 3 + 480 * 3 / 4
    assert "ragged" in str(found)


def shapes(**changes):
    x = {name: jax.ShapeDtypeStruct((RANKS,), np.int32) for name in ("begin", "size", "to", "recv")}
    x |= {"operand": jax.ShapeDtypeStruct((12, 3), np.float32), "output": jax.ShapeDtypeStruct((40, 3), np.float32)}
    x |= {name: jax.ShapeDtypeStruct(*change) for name, change in changes.items()}
    return [x[name] for name in ("operand", "output", "begin", "size", "to", "recv")]


ERRORS = {
    "sizes of floats": (shapes(size=((RANKS,), np.float32)), r"send_sizes must be integers .* got float32\[4\]"),
    "sizes of two dimensions": (shapes(begin=((2, 2), np.int32)), r"input_offsets must be integers of shape"),
    "no sizes": (shapes(recv=((0,), np.int32)), "with K > 0"),
    "different lengths": (shapes(to=((8,), np.int32)), r"of one length, .* got \[4, 4, 8, 4\]"),
    "not for each rank": (
        shapes(**dict.fromkeys(("begin", "size", "to", "recv"), ((3,), np.int32))),
        "multiple of .* 4",
    ),
    "other rows": (shapes(output=((40, 2), np.float32)), "rows of one shape"),
    "other dtypes": (shapes(output=((40, 3), np.int32)), "operand is float32 and output int32"),
    "no rows": (shapes(operand=((), np.float32)), "rows of one shape"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_wrong_arguments(case, check_vma):
    arguments, message = ERRORS[case]

    def call(*xs):
        f = lambda i: ring_ragged_all_to_all(*xs, axis_name="i")  # noqa: E731
        return jax.shard_map(
            f, mesh=make_mesh((RANKS,)), in_specs=P("i"), out_specs=P("i"), check_vma=check_vma
        )(jnp.zeros(RANKS))  # fmt: skip

    with pytest.raises(ValueError, match=rf"ring_ragged_all_to_all: .*{message}"):
        jax.eval_shape(call, *arguments)


@pytest.mark.parametrize(
    ("which", "value", "message"),
    [(0, 11, "operand"), (0, -1, "operand"), (2, 39, "result|output"), (3, 9, "expect")],
    ids=["beyond the operand", "before the operand", "beyond the result", "not as expected"],
)
def test_wrong_sizes_are_an_error_on_all_ranks(which, value, message):
    numbers = [np.array(x) for x in plan()]
    numbers[1][2, 1] = numbers[3][1, 2] = 3  # so that the slice has rows
    numbers[which][2 if which < 3 else 1, 1 if which < 3 else 2] = value
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=rf"(?s)ragged.*({message})"):
        jax.block_until_ready(mapped()(*arrays(), *numbers))
    good = (*arrays(), *plan())
    np.testing.assert_array_equal(mapped()(*good), reference(*good))
