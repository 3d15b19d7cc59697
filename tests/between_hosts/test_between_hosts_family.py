"""The family across hosts, but for all-reduces: calls on two levels, their bits, traffic, and derivatives."""

import itertools
import logging
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits, rank_fold
from jax import lax
from jax.sharding import Mesh
from test_two_level import ON_TWO_HOSTS, TWO_HOSTS, by_host, integers, local_shards, on_mesh

import jax_ring
from jax_ring import explain, override_lax, runtime

pytestmark = pytest.mark.full  # jobs of several processes

RNG = np.random.default_rng(1)  # the same numbers in all processes


def some_bits(dtype, *shape):
    """Random bits: NaNs with payloads, infinities, subnormal numbers and zeros of both signs among them."""
    dtype = np.dtype(dtype)
    if dtype == np.bool_:
        return RNG.integers(0, 2, shape).astype(dtype)
    if dtype.name in ("int4", "uint4"):
        return RNG.integers(-8 if dtype.name == "int4" else 0, 8, shape).astype(dtype)
    return RNG.integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype)[..., 0]


def meshes():
    """Meshes of two hosts, the axes of a call, and the ranks of each group as mesh positions."""
    consecutive = by_host().reshape(8)
    positions = np.arange(8)
    yield Mesh(consecutive[[3, 4, 0, 7, 5, 1, 2, 6]], ("i",)), "i", positions.reshape(1, 8)
    yield Mesh(by_host().T, ("i", "host")), ("host", "i"), positions.reshape(4, 2).T.reshape(1, 8)
    # Two groups of two ranks on each host: those of the first are consecutive, those of the second interleaved.
    uneven = consecutive[[0, 1, 4, 5, 2, 6, 3, 7]].reshape(2, 4)
    yield Mesh(uneven, ("j", "i")), "i", positions.reshape(2, 4)


def shards_by_position(mesh, out) -> dict[int, np.ndarray]:
    """What the devices of this process hold, by mesh position."""
    position_of = {device: i for i, device in enumerate(mesh.devices.flat)}
    return {position_of[shard.device]: np.asarray(shard.data)[0] for shard in out.addressable_shards}


class Calls:
    """Calls of one program, and what each rank is to get of them."""

    def __init__(self, mesh, groups):
        self.mesh, self.groups = mesh, groups
        self.calls: list = []

    def add(self, fun, values, oracle):
        """Adds fun(operand).

        values: a pytree of arrays by mesh position.
        oracle: from the stacked operands of a group to the stacked results; for each leaf.
        """
        self.calls.append((fun, values, jax.tree.map(lambda x: by_group(self.groups, x, oracle), values)))

    def check(self):
        """Runs the program, and compares the bits with what is expected. Returns the program and its operands."""
        functions, values, expected = zip(*self.calls, strict=True)

        def body(operands):
            own = jax.tree.map(lambda x: x[0], operands)
            results = [fun(x) for fun, x in zip(functions, own, strict=True)]
            return jax.tree.map(lambda x: x[None], results)

        program, arrays = on_mesh(body, self.mesh, list(values), check_vma=False)
        found = jax.tree.leaves(program(arrays))
        for i, (out, wanted) in enumerate(zip(found, jax.tree.leaves(expected), strict=True)):
            for position, shard in shards_by_position(self.mesh, out).items():
                try:
                    assert_same_bits(shard, wanted[position])
                except AssertionError as error:
                    raise AssertionError(f"result {i} at position {position} of {self.groups}") from error
        return program, arrays


def by_group(groups, values, oracle):
    """oracle: from the stacked operands of a group to the stacked results."""
    results = {}
    for group in groups:
        for position, result in zip(group, oracle(values[group]), strict=True):
            results[int(position)] = result
    return np.stack([results[position] for position in range(len(values))])


def exchanged(split, concat, tiled):
    def oracle(values):
        size = len(values)
        if tiled:
            blocks = [np.split(x, size, split) for x in values]
            return [np.concatenate([blocks[s][r] for s in range(size)], concat) for r in range(size)]
        return [np.stack([np.take(x, r, split) for x in values], concat) for r in range(size)]

    return oracle


def gathered(axis, tiled):
    return lambda values: [np.concatenate(values, axis) if tiled else np.stack(values, axis)] * len(values)


def permuted(perm):
    def oracle(values):
        results = np.zeros_like(values)
        for source, receiver in perm:
            results[receiver] = values[source]
        return results

    return oracle


def sent_by(root):
    return lambda values: [values[root]] * len(values)


def scattered(dimension, tiled):
    def oracle(values):
        blocks = np.split(values.sum(0, dtype=values.dtype), len(values), dimension)
        return blocks if tiled else [block.squeeze(dimension) for block in blocks]

    return oracle


def on_root(root):
    def oracle(values):
        results = np.zeros_like(values)
        results[root] = values.sum(0, dtype=values.dtype)
        return results

    return oracle


# Each move is of the next of them, around.
DTYPES = itertools.cycle([
    "float32", "bool", "bfloat16", "int4", "complex64", "uint8", "float16", "int16", "float8_e4m3fn", "uint32", "int8",
])  # fmt: skip


def permutations(size):
    """In a ring, between and within hosts in various ways, and nothing."""
    yield [(i, (i + 1) % size) for i in range(size)]
    yield [(i, size - 1 - i) for i in range(size)]
    yield [(0, 1), (1, 0), (size // 2, size // 2), (size - 1, size // 2 + 1)]
    yield [(0, size - 1), (2, 1)]
    yield []


def everywhere_and_any_dtype():
    """Every way in which ranks lie on hosts; several operands, sizes that nothing divides, and an empty one.

    What is moved keeps its bits. Sums are of small integers, and exact.
    """
    moved = DTYPES
    summed = itertools.cycle([(np.float32, np.int8), (jnp.bfloat16, np.complex64)])
    for mesh, axes, groups in meshes():
        size, calls = len(groups[0]), Calls(mesh, groups)

        def bits(*shapes):
            dtype = next(moved)
            return [some_bits(dtype, 8, *shape) for shape in shapes]

        for axis, tiled in ((0, False), (1, True)):
            fun = partial(jax_ring.ring_all_gather, axis_name=axes, axis=axis, tiled=tiled)
            calls.add(fun, bits((3, 2, 5), (1, 7), (0, 5)), gathered(axis, tiled))
        for split, concat, tiled in ((1, 0, True), (0, 2, False)):
            fun = partial(jax_ring.ring_all_to_all, axis_name=axes, split_axis=split, concat_axis=concat, tiled=tiled)
            calls.add(fun, bits((size, size, 3), (size, 2 * size, 1)), exchanged(split, concat, tiled))
        # JAX counts the ranks of a permutation in the order of the mesh, or refuses another order of axes.
        for perm in permutations(size) if isinstance(axes, str) else ():
            calls.add(partial(jax_ring.ring_ppermute, axis_name=axes, perm=perm), bits((3, 5), (1,)), permuted(perm))
        fun = partial(jax_ring.ring_broadcast, axis_name=axes, root=size - 2)
        calls.add(fun, bits((3, 5), ()), sent_by(size - 2))
        for tiled, dtype in enumerate(next(summed)):
            tree = [integers(8, size, 2 * size, 3, dtype=dtype), integers(8, size, size, dtype=dtype)]
            fun = partial(jax_ring.ring_psum_scatter, axis_name=axes, scatter_dimension=tiled, tiled=bool(tiled))
            calls.add(fun, tree, scattered(tiled, bool(tiled)))
        for order in ("rank", "tree"):
            fun = partial(jax_ring.ring_reduce, axis_name=axes, root=size - 1, order=order)
            calls.add(fun, [integers(8, 3, 5), integers(8)], on_root(size - 1))
        calls.check()


def traffic():
    """What crosses hosts is a rank's operand, or a part of the message for each rank of a host."""
    mesh = Mesh(by_host().T.reshape(8), ("i",))
    within = [(0, 2), (2, 4), (4, 0), (7, 7)]
    for fun, shape, steps, num_bytes in [
        (
            lambda x: jax_ring.ring_all_gather(x, "i"),
            (6,),
            [("all-gather", ("u32[2,6]",)), ("jax_ring_all_gather", ("u32[4,2,6]",))],
            24,
        ),
        (
            lambda x: jax_ring.ring_psum_scatter(x, "i"),
            (8, 6),
            [("jax_ring_reduce_scatter", ("f32[12]",)), ("all-to-all", ("u32[1,6]", "u32[1,6]"))],
            24,
        ),
        (
            lambda x: jax_ring.ring_all_to_all(x, "i", 0, 0),
            (8, 6),
            [("jax_ring_all_to_all", ("u32[4,12]",)), ("all-to-all", ("u32[1,24]", "u32[1,24]"))],
            96,
        ),
        (
            lambda x: jax_ring.ring_broadcast(x, "i"),
            (24,),
            [
                ("jax_ring_reduce_scatter", ("u32[6]",)),
                ("all-to-all", ("u32[1,6]", "u32[1,6]")),
                ("jax_ring_all_gather", ("u32[4,6]",)),
            ],
            24,
        ),
        (
            lambda x: jax_ring.ring_reduce(x, "i"),
            (24,),
            [
                ("jax_ring_reduce_scatter", ("f32[6]",)),
                ("all-to-all", ("u32[1,6]", "u32[1,6]")),
                ("jax_ring_all_gather", ("f32[4,6]",)),
            ],
            24,
        ),
        (
            lambda x: jax_ring.ring_ppermute(x, "i", [*within, (3, 6)]),
            (6,),
            [("jax_ring_permute", ("u32[6]",)), ("collective-permute", ("u32[6]",))],
            3,  # 24 by one rank of eight
        ),
        (lambda x: jax_ring.ring_ppermute(x, "i", within), (6,), [("jax_ring_permute", ("u32[6]",))], 0),
        # The places on one host and on the other are permuted differently.
        (lambda x: jax_ring.ring_ppermute(x, "i", [(0, 2), (1, 7)]), (6,), [("jax_ring_permute", ("u32[6]",))] * 2, 0),
    ]:
        program, x = on_mesh(lambda x, fun=fun: fun(x[0]), mesh, np.zeros((8, *shape), np.float32), check_vma=False)
        found = explain(program, x)
        (call,) = found.collectives
        assert call.served_by == (ON_TWO_HOSTS if num_bytes else "jax_ring"), call
        assert call.wire_bytes_across_hosts == num_bytes, call
        listed = [(each.name, each.operands) for each in found.instructions]
        assert listed == steps, listed
        assert found.predicted_bytes == found.counted_bytes


def several_operands():
    """They share the custom call, and what crosses hosts is one collective."""
    mesh = Mesh(by_host().reshape(8), ("i",))
    small = [some_bits("bfloat16", 8, 5), some_bits("bfloat16", 8, 2, 3)]
    for function, tree, steps in [
        (
            jax_ring.ring_all_gather,
            small,
            [("all-gather", ("u16[2,11]",)), ("jax_ring_all_gather", ("u16[4,2,5]", "u16[4,2,6]"))],
        ),
        (
            jax_ring.ring_broadcast,  # several numbers in each word
            small,
            [
                ("jax_ring_reduce_scatter", ("u32[1]", "u32[1]")),
                ("all-to-all", ("u32[1,2]", "u32[1,2]")),
                ("jax_ring_all_gather", ("u32[4,1]", "u32[4,1]")),
            ],
        ),
        (
            jax_ring.ring_all_gather,
            [some_bits("complex64", 8, 3)],
            [("all-gather", ("u32[2,6]",)), ("jax_ring_all_gather", ("u32[4,2,6]",))],
        ),
    ]:
        found = explain(*on_mesh(lambda tree, function=function: function(tree, "i"), mesh, tree, check_vma=False))
        listed = [(each.name, each.operands) for each in found.instructions]
        assert listed == steps, listed
        assert found.predicted_bytes == found.counted_bytes


def transformations():
    """Derivatives, batches, groups and loops, as of lax; forward and under the override."""
    mesh = Mesh(by_host().T.reshape(8), ("i",))
    x = integers(8, 8, 2)
    groups = [[0, 3, 5, 6], [1, 2, 4, 7]]

    def body(gather, scatter, exchange, permute):
        def run(x):
            linear = [
                lambda x: gather(x, "i", axis=1, tiled=True),
                lambda x: scatter(x, "i", axis_index_groups=groups, tiled=True),
                lambda x: exchange(x, "i", 0, 1, axis_index_groups=groups, tiled=True),
                lambda x: permute(x, "i", [(0, 2), (2, 1), (1, 3), (6, 5), (5, 4)]),
            ]
            results = [jax.vmap(lambda x: exchange(x, "i", 0, 0), in_axes=1)(x[0])]
            for fun in linear:
                y, vjp = jax.vjp(fun, x[0])
                results += [y, vjp(y * y)[0]]
            results.append(lax.scan(lambda y, _: (permute(y, "i", [(0, 2), (2, 5), (5, 0)]), None), x[0], length=3)[0])
            return [y[None] for y in results]

        return run

    ours, arrays = on_mesh(
        body(jax_ring.ring_all_gather, jax_ring.ring_psum_scatter, jax_ring.ring_all_to_all, jax_ring.ring_ppermute),
        mesh, x,
    )  # fmt: skip
    by_lax, _ = on_mesh(body(lax.all_gather, lax.psum_scatter, lax.all_to_all, lax.ppermute), mesh, x)
    wanted = jax.tree.map(local_shards, by_lax(arrays))
    assert_same_bits(jax.tree.map(local_shards, ours(arrays)), wanted)
    with override_lax():
        assert_same_bits(jax.tree.map(local_shards, by_lax(arrays)), wanted)
        served = {call.served_by for call in explain(by_lax, arrays).collectives}
    assert served == {ON_TWO_HOSTS}, served


def steps_of_xla_under_the_override():
    """They stay XLA's, which JAX_RING_STRICT allows."""
    mesh = Mesh(by_host().reshape(8), ("i",))
    calls = {
        "tree": lambda x: jax_ring.ring_psum(x, "i", order="tree"),
        "int8": lambda x: jax_ring.sync_gradients(x, "i", wire="int8"),
        "gather": lambda x: jax_ring.ring_all_gather(x, "i"),
    }
    runtime.STRICT = True
    for name, fun in calls.items():
        program, x = on_mesh(fun, mesh, np.zeros((8, 3), np.float32), check_vma=False)
        alone = program.lower(x).as_text()
        with override_lax():
            under_the_override = program.lower(x).as_text()
        for text in ("jax_ring.between_hosts", "all_to_all", "all_gather", "@jax_ring_"):
            assert under_the_override.count(text) == alone.count(text), (name, text)
    runtime.STRICT = False


def left_to_xla():
    """With the reason in the log and in `explain()`, and with the right results."""
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("jax_ring").addHandler(handler)
    logging.getLogger("jax_ring").setLevel(logging.INFO)
    six, eight = Mesh(by_host().reshape(8)[:6], ("i",)), Mesh(by_host().reshape(8), ("i",))
    one_each = Mesh(by_host()[:, 1], ("i",))
    across = [(i, (i + 4) % 8) for i in range(8)]
    gather = partial(jax_ring.ring_all_gather, axis_name="i")
    for fun, mesh, oracle, why in [
        (gather, six, gathered(0, False), "on 2 hosts, with unequal numbers of ranks per host"),
        (gather, one_each, gathered(0, False), "on 2 hosts, one rank on each"),
        (partial(jax_ring.ring_broadcast, axis_name="i", root=1), one_each, sent_by(1), "one rank on each"),
        (
            partial(jax_ring.ring_ppermute, axis_name="i", perm=across),
            eight,
            permuted(across),
            "on 2 hosts, between which every pair of the permutation crosses",
        ),
    ]:
        calls = Calls(mesh, np.arange(mesh.size)[None])
        calls.add(fun, integers(mesh.size, 3), oracle)
        (call,) = explain(*calls.check()).collectives
        assert call.served_by == "XLA", call
        assert why in call.why, call
        assert why in messages[-1], messages

    def ragged(x):
        ones = jnp.ones(8, np.int32)
        rank = jnp.full(8, lax.axis_index("i"), np.int32)
        return jax_ring.ring_ragged_all_to_all(x, 0 * x, 0 * ones + jnp.arange(8), ones, rank, ones, axis_name="i")

    calls = Calls(eight, np.arange(8)[None])
    calls.add(ragged, integers(8, 8), lambda values: values.T)
    calls.check()
    assert any("on 2 hosts, and a ragged all-to-all is not split between them" in text for text in messages), messages


@pytest.mark.one_pair
@pytest.mark.jax_processes(4, devices=2, environment=[{"JAX_RING_HOST_ID": name} for name in "abcd"])
def test_four_hosts():
    """Sums: on each host in rank order, then in the order of the hosts, rounded once; whatever the number of hosts."""
    num_hosts = jax.process_count()
    each = 8 // num_hosts
    mesh = Mesh(np.array(jax.devices()), ("i",))

    def oracle(values):
        of_hosts = [rank_fold(values[i : i + each].astype(np.float32)) for i in range(0, 8, each)]
        return np.split(rank_fold(np.stack(of_hosts)).astype(values.dtype), 8)

    calls = Calls(mesh, np.arange(8)[None])
    values = [RNG.standard_normal((8, 24)).astype(dtype) for dtype in (np.float32, jnp.bfloat16)]
    calls.add(lambda tree: jax_ring.ring_psum_scatter(tree, "i", tiled=True), values, oracle)
    calls.add(lambda x: jax_ring.ring_all_gather(x, "i"), some_bits(np.float32, 8, 3), gathered(0, False))
    calls.add(lambda x: jax_ring.ring_all_to_all(x, "i", 0, 1), some_bits(np.float32, 8, 8, 3), exchanged(0, 1, False))
    calls.add(lambda x: jax_ring.ring_broadcast(x, "i", root=5), some_bits(np.float32, 8, 3), sent_by(5))
    perm = [(0, 1), (1, 4), (3, 6), (4, 5), (5, 0)]
    calls.add(lambda x: jax_ring.ring_ppermute(x, "i", perm), some_bits(np.float32, 8, 3), permuted(perm))
    explanation = explain(*calls.check())
    assert {call.served_by for call in explanation.collectives} == {
        f"jax_ring within hosts, XLA across {num_hosts} hosts"
    }
    assert explanation.predicted_bytes == explanation.counted_bytes
    assert explanation.collectives[0].order == "rank by host"


@pytest.mark.jax_processes(2, devices=4, environment=TWO_HOSTS)
def test_two_hosts():
    for part in (traffic, several_operands, transformations, left_to_xla, steps_of_xla_under_the_override):
        part()
        print(f"{part.__name__} passed")


@pytest.mark.jax_processes(2, devices=4, environment=TWO_HOSTS)
@pytest.mark.filterwarnings("ignore:invalid value encountered in not_equal:RuntimeWarning")  # of signalling NaNs
def test_two_hosts_everywhere_and_any_dtype():
    everywhere_and_any_dtype()
