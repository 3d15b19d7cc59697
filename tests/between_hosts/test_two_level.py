"""All-reduce across hosts: two processes of four devices each, with a different JAX_RING_HOST_ID."""

import logging
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits, rank_fold
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jax_ring import (
    _compat,
    explain,
    override_lax,
    ring_pmax,
    ring_pmean,
    ring_pmin,
    ring_psum,
    ring_psum_scatter,
)
from jax_ring.lowering.hierarchical import all_reduce
from jax_ring.lowering.passes import exchanges

pytestmark = pytest.mark.one_pair  # native code and tables of the same steps

RNG = np.random.default_rng(0)  # the same numbers in both processes
TWO_HOSTS = [{"JAX_RING_HOST_ID": "a"}, {"JAX_RING_HOST_ID": "b"}]
SMALL_PART = all_reduce.PART_BYTES // 16
ON_TWO_HOSTS = "jax_ring within hosts, XLA across 2 hosts"


def cut_small_parts() -> None:
    """Cuts this job's messages as if they were 16 times as large: the same steps, of fewer bytes."""
    all_reduce.PART_BYTES = SMALL_PART


def by_host():
    return np.array(jax.devices()).reshape(2, 4)


def on_mesh(fun, mesh, values, *, out_specs=None, **options):
    """`fun` under jit and shard_map, and `values` as arrays whose first dimension is sharded over all mesh axes."""
    spec = P(mesh.axis_names)
    mapped = jax.shard_map(fun, mesh=mesh, in_specs=spec, out_specs=spec if out_specs is None else out_specs, **options)
    sharding = jax.NamedSharding(mesh, spec)
    make = lambda v: jax.make_array_from_callback(v.shape, sharding, lambda index: v[index])  # noqa: E731
    return jax.jit(mapped), jax.tree.map(make, values)


def call(fun, mesh, values, **options):
    fun, arrays = on_mesh(fun, mesh, values, **options)
    return fun(arrays)


def local_shards(out) -> np.ndarray:
    """The shards of this process, stacked."""
    return np.stack([np.asarray(shard.data) for shard in out.addressable_shards])


def assert_local_shards(out, expected) -> None:
    """Asserts that every device of this process holds `expected`, bit for bit."""
    same = expected.dtype, expected.shape, expected.tobytes()
    for part in local_shards(out):
        if (part.dtype, part.shape, part.tobytes()) != same:  # much faster, for large arrays
            assert_same_bits(part, expected)


def integers(*shape, dtype=np.float32):
    """Small integers, whose sums are exact in any order."""
    return RNG.integers(-5, 6, shape, dtype=np.int8).astype(dtype)


def same_as_lax():
    """With the hosts consecutive, interleaved, along their own mesh axis, and in several groups."""
    two_each = by_host().reshape(2, 2, 2).transpose(1, 0, 2)
    values = {
        "sizes that are no multiples of four": [integers(8, 3, 5), integers(8), integers(8, 0)],
        "small": [integers(8, 9, dtype=dtype) for dtype in (jnp.bfloat16, np.int8, np.uint16, jnp.float8_e4m3fn)],
        "int4": integers(8, 3).astype(jnp.int4),
    }
    for mesh, axes, check_vma in [
        (Mesh(by_host().reshape(8), ("i",)), "i", True),
        (Mesh(by_host().T.reshape(8), ("i",)), "i", False),
        (Mesh(by_host().T, ("i", "host")), ("host", "i"), True),
        (Mesh(two_each, ("j", "host", "i")), ("i", "host"), True),
    ]:

        def both(tree, axes=axes):
            extrema = {"flags": [x > 0 for x in tree["small"][:1]], **tree}
            ours = ring_psum(tree, axes), ring_pmax(extrema, axes), ring_pmin(extrema, axes), ring_pmean(tree, axes)
            theirs = lax.psum(tree, axes), lax.pmax(extrema, axes), lax.pmin(extrema, axes), lax.pmean(tree, axes)
            return ours, theirs

        ours, theirs = call(
            both, mesh, values, check_vma=check_vma, out_specs=P("j") if "j" in mesh.axis_names else P()
        )
        assert_same_bits(*jax.tree.map(local_shards, (ours, theirs)))


def float_rounding():
    """Sums are rounded once, from float32. NaNs and signs of zeros are kept."""
    mesh = Mesh(by_host().reshape(8), ("i",))
    values = RNG.standard_normal((8, 1001)).astype(np.float32)
    special = np.float32([[1, 0.0, -0.0, np.inf, -3]] * 7 + [[np.nan, -0.0, 0.0, -np.inf, -2]])
    small = values.astype(jnp.bfloat16)

    def body(tree):
        values, small, special = tree
        return (
            ring_psum((values, small, small.astype(jnp.float16)), "i"),
            ring_pmax(special, "i"),
            ring_pmin(special, "i"),
        )

    sums, largest, smallest = call(body, mesh, (values, small, special), out_specs=P(None))
    folds = lambda x: rank_fold(np.stack([rank_fold(x[:4].astype(np.float32)), rank_fold(x[4:].astype(np.float32))]))  # noqa: E731
    assert_local_shards(sums[0], folds(values)[None])
    assert_local_shards(sums[1], folds(small).astype(jnp.bfloat16)[None])
    assert_local_shards(sums[2], folds(small.astype(np.float16)).astype(np.float16)[None])
    assert_local_shards(largest, np.float32([[np.nan, 0.0, 0.0, np.inf, -2]]))
    assert_local_shards(smallest, np.float32([[np.nan, -0.0, -0.0, -np.inf, -3]]))


def transformations():
    mesh = Mesh(by_host().T.reshape(8), ("i",))
    values = integers(8, 3, 2)

    def both(x):
        loss = lambda psum: lambda x: (psum(x * x, "i") * x).sum()  # noqa: E731
        batched = lambda psum: jax.vmap(lambda x: psum(x, "i"), in_axes=2, out_axes=1)(x)  # noqa: E731
        return [(jax.grad(loss(psum))(x), batched(psum)) for psum in (ring_psum, lax.psum)]

    ours, theirs = call(both, mesh, values, check_vma=False)
    assert_same_bits(*jax.tree.map(local_shards, (ours, theirs)))


def traffic_across_hosts():
    """All operands share a reduce-scatter, one collective of XLA for a quarter of the bytes, and an all-gather."""
    mesh = Mesh(by_host().T.reshape(8), ("i",))
    medium = exchanges.SMALL_BYTES // 4 + 4  # elements
    for sizes, crossing in [
        ((64, 10), ("all-to-all", ("u32[1,19]", "u32[1,19]"), (2, 2, 2, 2))),
        ((medium - 4 - 12, 10), ("all-to-all", (f"u32[1,{medium // 4 - 1}]",) * 2, (2, 2, 2, 2))),
        ((medium, 10), ("all-reduce", (f"f32[{medium // 4 + 3}]",), (2, 2, 2, 2))),
    ]:
        values = [integers(8, size) for size in sizes]
        fun, arrays = on_mesh(lambda tree: ring_psum(tree, "i"), mesh, values)
        for out, x in zip(fun(arrays), values, strict=True):
            assert_local_shards(out, x.sum(0)[None])
        found = explain(fun, arrays)
        shards = [math.ceil(size / 4) for size in sizes]
        assert [(i.name, i.operands, i.group_sizes) for i in found.instructions] == [
            ("jax_ring_reduce_scatter", tuple(f"f32[{size}]" for size in shards), (4, 4)),
            crossing,
            ("jax_ring_all_gather", tuple(f"f32[4,{size}]" for size in shards), (4, 4)),
        ]
        (written,) = found.collectives
        assert written.served_by == ON_TWO_HOSTS
        assert written.why == ""
        # Of V bytes, 3/4 V in the reduce-scatter, 3/4 V in the all-gather, and a shard of V/4 across hosts.
        assert found.predicted_bytes == found.counted_bytes == 4 * 4 * sum(shards) * (3 / 4 + 3 / 4 + 1 / 4)
        assert written.wire_bytes_across_hosts == found.instructions[1].wire_bytes == 4 * sum(shards)
        assert f"{4 * sum(shards):,} across hosts" in str(found)


def several_messages_cross_as_one():
    """Without concatenating those from a size on."""
    mesh = Mesh(by_host().reshape(8), ("i",))
    limit = all_reduce.JOINED_BYTES // 4  # elements
    values = [integers(8, size) for size in (limit, limit + 4, 3, limit)]
    fun, arrays = on_mesh(lambda tree: ring_psum(tree, "i"), mesh, values)
    for out, x in zip(fun(arrays), values, strict=True):
        assert_local_shards(out, x.sum(0)[None])
    found = explain(fun, arrays)
    (crossing,) = [i for i in found.instructions if not i.name.startswith("jax_ring")]  # joined by XLA
    assert sorted(crossing.operands) == [f"f32[{limit // 2 + 1}]", f"f32[{limit // 4 + 1}]"]
    assert found.predicted_bytes == found.counted_bytes


def small_calls_cross_together(monkeypatch):
    """Of one kind of words, up to a limit, in program order; what depends on a result comes later. Bits are kept."""
    mesh = Mesh(by_host().T.reshape(8), ("i",))
    values = [RNG.standard_normal((8, size)).astype(np.float32) for size in (5, 301, 64, 400)]

    def body(tree):
        a, b, c, d = (x[0] for x in tree)
        first, largest = ring_psum(a, "i"), ring_pmax(b, "i")
        later = ring_psum(first * 2, "i")
        narrow = ring_psum(c.astype(jnp.bfloat16), "i").astype(np.float32)
        short = ring_psum(c.astype(np.int16), "i").astype(np.float32)
        scattered = ring_psum_scatter(c, "i", tiled=True)
        another, last = ring_psum(b, "i"), ring_psum(d, "i")
        return [x[None] for x in (first, largest, later, narrow, short, scattered, another, last)]

    def run(limit, expected):
        monkeypatch.setattr(exchanges, "SMALL_BYTES", limit)
        fun, arrays = on_mesh(lambda tree: body(tree), mesh, values, check_vma=False)
        found = explain(fun, arrays)
        exchanged = sorted(i.operands[0] for i in found.instructions if i.name == "all-to-all")
        assert exchanged == sorted(f"{words}[1,{size}]" for words, size in expected), exchanged
        assert found.predicted_bytes == found.counted_bytes
        return [local_shards(out) for out in fun(arrays)]

    # Shards of 2, 76, 2, 16, 16, 8, 76 and 100 elements.
    alone = [("s32", 76), ("u32", 2), ("s16", 16)]
    joined = run(192 << 10, [("u32", 2 + 16 + 8 + 76 + 100), *alone])
    # The last crosses by an all-reduce. Its reduce-scatter is joined with those of the others, which wait for it.
    in_two = run(4 * 4 * 78, [("u32", 2 + 16 + 8), ("u32", 76), *alone])
    by_all_reduce = run(0, [("u32", 8)])  # the scatter
    assert_same_bits(joined, in_two)
    assert_same_bits(joined, by_all_reduce)


def one_message_along_the_tree():
    mesh = Mesh(by_host().T.reshape(8), ("i",))
    whole = exchanges.SMALL_BYTES // 4 // 4  # elements; a host of alternate ranks has four roots
    for size, names in ((whole, ["all-to-all"]), (whole + 4, ["all-to-all", "all-gather"])):
        values = RNG.standard_normal((8, size)).astype(np.float32)
        fun, arrays = on_mesh(lambda x: ring_psum(x, "i", order="tree"), mesh, values)
        pairs = values[::2] + values[1::2]
        assert_local_shards(fun(arrays), ((pairs[0] + pairs[1]) + (pairs[2] + pairs[3]))[None])
        found = explain(fun, arrays)
        assert [i.name for i in found.instructions if not i.name.startswith("jax_ring")] == names
        assert found.predicted_bytes == found.counted_bytes


def large_messages_cross_in_parts():
    """Their bits are those of whole messages: padded ones, small ones beside them, donated ones, and in a loop."""
    mesh = Mesh(by_host().T.reshape(8), ("i",))
    large = 2 * all_reduce.PART_BYTES // 4 + 1001
    values = [integers(8, 5), integers(8, large), integers(8, large).astype(jnp.bfloat16), integers(8, 3000, 3)]
    fun, arrays = on_mesh(lambda tree: ring_psum(tree, "i"), mesh, values)
    for out, x in zip(fun(arrays), values, strict=True):
        assert_local_shards(out, x.astype(np.float32).sum(0).astype(x.dtype)[None])
    found = explain(fun, arrays)
    assert found.predicted_bytes == found.counted_bytes
    names = [i.name for i in found.instructions]
    # Two large operands, in two parts and in twice as many, and the small ones.
    assert names.count("jax_ring_reduce_scatter") == names.count("jax_ring_all_gather") == 7
    assert {i.group_sizes for i in found.instructions} == {(4, 4), (2, 2, 2, 2)}

    rounded = RNG.standard_normal((8, large)).astype(np.float32)
    in_rank_order = lambda x: rank_fold(np.stack([rank_fold(x[::2]), rank_fold(x[1::2])]))  # noqa: E731
    once = in_rank_order(rounded)
    fun, arrays = on_mesh(
        lambda x: lax.fori_loop(0, 2, lambda _, x: ring_psum(x, "i") / 8, x), mesh, rounded, check_vma=False
    )
    assert_local_shards(fun(arrays), (in_rank_order(np.stack([once / 8] * 8)) / 8)[None])
    for reduce, oracle in ((ring_pmax, np.maximum.reduce), (ring_pmin, np.minimum.reduce)):
        fun, arrays = on_mesh(lambda x, reduce=reduce: reduce(x, "i"), mesh, rounded)
        assert_local_shards(fun(arrays), oracle(rounded)[None])
    fun, arrays = on_mesh(lambda x: ring_psum(x, "i"), mesh, rounded)
    names = [i.name for i in explain(fun, arrays).instructions]
    assert names.count("all-reduce") == 2  # XLA has not combined them
    assert_local_shards(jax.jit(fun, donate_argnums=0)(arrays), once[None])
    # In ring order, what a rank adds first depends on where an element is.
    fun, arrays = on_mesh(lambda x: ring_psum(x, "i", order="ring"), mesh, rounded)
    names = [i.name for i in explain(fun, arrays).instructions]
    assert names == ["jax_ring_reduce_scatter", "all-reduce", "jax_ring_all_gather"]


def small_floats_in_many_parts():
    """They are converted part by part, and rounded once, after they have crossed; also where shards are padded."""
    mesh = Mesh(by_host().reshape(8), ("i",))
    part = all_reduce.PART_BYTES
    sizes = {jnp.bfloat16: 5 * part // 4 + 1001, np.float16: part, jnp.float8_e5m2: part // 2 + 3}
    for dtype, size in sizes.items():
        values = RNG.standard_normal((8, size)).astype(np.float32).astype(dtype)
        fun, arrays = on_mesh(lambda x: ring_psum(x, "i"), mesh, values)
        exact = values.astype(np.float32)
        expected = (rank_fold(exact[:4]) + rank_fold(exact[4:])).astype(dtype)
        for _ in range(2):
            assert_local_shards(fun(arrays), expected[None])
        found = explain(fun, arrays)
        names = [i.name for i in found.instructions]
        # Hosts exchange float32, half of it with two hosts, and gather what is rounded.
        num_parts = size * 8 // part
        assert names.count("all-to-all") == names.count("all-gather") == num_parts
        assert "all-reduce" not in names
        assert found.predicted_bytes == found.counted_bytes
        across = sum(i.wire_bytes for i in found.instructions if not i.name.startswith("jax_ring"))
        each = (4 + jnp.dtype(dtype).itemsize) / 2
        assert across == found.collectives[0].wire_bytes_across_hosts == each * all_reduce.chunk_size(size, 4, 2)


def explained_as_lowered():
    """What explain() says of how an array crosses is what is lowered: whether it is exchanged, and its bytes."""
    devices = by_host()
    # Nothing that crosses is enclosed where an axis is the compiler's, even one of a single rank.
    manual, automatic = Mesh(devices.reshape(8), ("i",)), Mesh(devices.reshape(8, 1), ("i", "automatic"))
    large = 2 * all_reduce.PART_BYTES // 4
    reduced, exchanged, sent = {"all-reduce"}, {"all-to-all", "all-gather"}, {"all-to-all"}
    for mesh, function, dtype, size, options, expected in [
        (manual, ring_psum, jnp.bfloat16, large, {}, exchanged),
        (manual, ring_psum, jnp.bfloat16, large // 2 - 1, {}, reduced),
        (manual, ring_psum, jnp.bfloat16, large, {"order": "ring"}, reduced),
        (manual, ring_pmax, jnp.bfloat16, large, {}, reduced),
        (manual, ring_psum, np.float32, large, {}, reduced),
        (automatic, ring_psum, jnp.bfloat16, large, {}, reduced),
        (manual, ring_psum, jnp.bfloat16, 9, {"order": "ring"}, sent),
        (automatic, ring_psum, jnp.bfloat16, 9, {}, sent),
        (automatic, ring_psum, jnp.bfloat16, 9, {"order": "tree"}, sent),
        (automatic, ring_psum, jnp.bfloat16, large, {"order": "tree"}, exchanged),
    ]:
        fun = jax.shard_map(
            lambda x, function=function, options=options: function(x, "i", **options),
            mesh=mesh, in_specs=P("i"), out_specs=P(), axis_names={"i"}, check_vma=False,
        )  # fmt: skip
        sharding = jax.NamedSharding(mesh, P("i"))
        found = explain(fun, jax.ShapeDtypeStruct((8 * size,), dtype, sharding=sharding))
        names = {i.name for i in found.instructions if not i.name.startswith("jax_ring")}
        case = (mesh, function, dtype, size, options, found)
        assert names == expected, case
        assert found.predicted_bytes == found.counted_bytes, case
        if size == 9:
            values = integers(72, dtype=dtype)
            x = jax.make_array_from_callback(values.shape, sharding, lambda index, values=values: values[index])
            assert_local_shards(jax.jit(fun)(x), values.reshape(8, 9).astype(np.float32).sum(0).astype(dtype))


def large_sums_beside_each_other():
    """The parts of one call cross in turn, whatever XLA runs first."""
    mesh = Mesh(by_host().reshape(8), ("i",))
    values = [integers(8, 3 * all_reduce.PART_BYTES // 4 + i) for i in range(3)]
    fun, arrays = on_mesh(lambda tree: [ring_psum(x, "i") for x in tree] + ring_psum(tree, "i"), mesh, values)
    sums = [x.sum(0)[None] for x in values]
    for _ in range(3):
        for out, expected in zip(fun(arrays), sums * 2, strict=True):
            assert_local_shards(out, expected)


def under_override_lax():
    mesh = Mesh(by_host().reshape(8), ("i",))
    fun, tree = on_mesh(lambda tree: lax.psum(tree, "i"), mesh, [integers(8, 3), integers(8, 5)], out_specs=P())
    expected = fun(tree)
    with override_lax():
        assert {call.served_by for call in explain(fun, tree).collectives} == {ON_TWO_HOSTS}
        out = fun(tree)
    assert_same_bits(*jax.tree.map(local_shards, (out, expected)))


def groups_within_hosts():
    """Groups within each host of a two-host mesh, and a mesh of one process."""
    mesh = Mesh(by_host(), ("host", "i"))
    values = integers(8, 3)
    fun, arrays = on_mesh(lambda x: ring_psum(x, "i") + x, mesh, values)
    assert explain(fun, arrays).collectives[0].served_by == "jax_ring"
    expected = np.repeat(values.reshape(2, 4, 3).sum(1), 4, axis=0) + values
    own = slice(4 * jax.process_index(), 4 * jax.process_index() + 4)
    assert_same_bits(local_shards(fun(arrays))[:, 0], expected[own])

    alone = Mesh(by_host()[jax.process_index()], ("i",))
    assert_local_shards(call(lambda x: ring_psum(x, "i"), alone, values[own], out_specs=P()), values[own].sum(0)[None])


def fallback_to_xla():
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("jax_ring").addHandler(handler)
    logging.getLogger("jax_ring").setLevel(logging.INFO)

    def check(fun, mesh, values, expected, why, **options):
        fun, arrays = on_mesh(fun, mesh, values, **options)
        assert_local_shards(fun(arrays), expected)
        (call,) = explain(fun, arrays).collectives
        assert call.served_by == "XLA"
        assert call.wire_bytes_across_hosts is None
        assert why in call.why
        assert why in messages[-1]

    six = Mesh(by_host().reshape(8)[:6], ("i",))
    values = integers(6, 5)
    unequal = "the ranks of a group are on 2 hosts, with unequal numbers of ranks per host"
    check(lambda x: ring_psum(x, "i", order="ring"), six, values, values.sum(0)[None], unequal, out_specs=P())
    assert "ignores order='ring'" in messages[-1]
    one_each = Mesh(by_host()[:, 1], ("i",))
    check(lambda x: ring_psum(x, "i"), one_each, values[:2], values[:2].sum(0)[None], "one rank on each", out_specs=P())

    eight = Mesh(by_host().reshape(8), ("i",))
    values = integers(8, 8)
    uneven = [[0, 1, 4, 5], [2, 3], [6, 7]]
    fun, arrays = on_mesh(lambda x: ring_psum(x, "i", axis_index_groups=uneven), eight, values, check_vma=False)
    own = [sum(values[i] for group in uneven if rank in group for i in group) for rank in range(8)]
    assert_same_bits(local_shards(fun(arrays))[:, 0], np.stack(own)[4 * jax.process_index() :][:4])
    # An abstract mesh does not reveal the processes at lowering.
    sharding = jax.NamedSharding(eight, P("i"))
    array = jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])
    mapped = jax.shard_map(lambda x: ring_psum(x, "i"), mesh=eight.abstract_mesh, in_specs=P("i"), out_specs=P())
    assert_local_shards(jax.jit(mapped)(array), values.sum(0)[None])
    assert "the mesh is abstract, so the devices of 2 processes" in messages[-1]


def large_psum_scatters():
    """Blocks of 32 MiB, for which Gloo's reduce-scatter of older jaxlibs returns wrong sums."""
    mesh = Mesh(by_host().T, ("i", "host"))
    block = 8 << 20
    every = np.arange(2 * block, dtype=np.int32)  # in NumPy, because XLA's code is not optimized in tests

    def check(psum_scatter, repetition):
        of_hosts = [every * (host + 1) + repetition for host in range(2)]
        sharding = jax.NamedSharding(mesh, P("host"))
        x = jax.make_array_from_callback((4 * block,), sharding, lambda index: of_hosts[(index[0].start or 0) > 0])
        scatter = lambda x: psum_scatter(x, "host", tiled=True)  # noqa: E731
        fun = jax.jit(jax.shard_map(scatter, mesh=mesh, in_specs=P("host"), out_specs=P("host"), check_vma=False))
        has_reduce_scatter = "reduce-scatter(" in fun.lower(x).compile().as_text()
        assert has_reduce_scatter != _compat.WRONG_REDUCE_SCATTER_ON_CPU
        total = 3 * every + 2 * repetition
        shards = fun(x).addressable_shards
        assert len(shards) == 4
        for shard in shards:
            np.testing.assert_array_equal(shard.data, total[shard.index])

    check(ring_psum_scatter, 1)
    with override_lax():
        check(lax.psum_scatter, 2)


@pytest.mark.full
@pytest.mark.jax_processes(2, devices=4, environment=TWO_HOSTS)
def test_two_hosts_join_small_calls(monkeypatch):
    small_calls_cross_together(monkeypatch)


@pytest.mark.jax_processes(2, devices=4, environment=TWO_HOSTS)
def test_two_hosts():
    for part in (
        float_rounding, traffic_across_hosts, several_messages_cross_as_one, one_message_along_the_tree,
        explained_as_lowered, fallback_to_xla,
    ):  # fmt: skip
        part()
        print(f"{part.__name__} passed")


@pytest.mark.full
@pytest.mark.jax_processes(2, devices=4, environment=TWO_HOSTS)
def test_two_hosts_by_all_reduces(monkeypatch):
    """Small messages as if they were larger."""
    monkeypatch.setattr(exchanges, "SMALL_BYTES", 0)
    float_rounding()
    same_as_lax()


@pytest.mark.full
@pytest.mark.jax_processes(2, devices=4, environment=TWO_HOSTS)
def test_two_hosts_transformations_every_dtype_and_large_messages():
    large_sums_beside_each_other()
    cut_small_parts()
    for part in (
        transformations, under_override_lax, groups_within_hosts, same_as_lax, large_messages_cross_in_parts,
        small_floats_in_many_parts, large_psum_scatters,
    ):  # fmt: skip
        part()
        print(f"{part.__name__} passed")
