"""Calls of the engine that jax_ring did not write: by `jax.ffi`, or in an exported program that comes from elsewhere.

XLA takes a custom call's types as they are. Before they were checked, each of these ended the process, or returned
memory that belonged to another array.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.errors import JaxRuntimeError

import jax_ring  # noqa: F401 (registers the calls)


def numbers(*values):
    return np.array(values, np.int64)


def attributes(collective, **changes):
    """The attributes of a call of one rank."""
    return {
        "call": "the call",
        "site": "train.py:7",
        "collective": collective,
        "op": "sum",
        "order": "rank",
        "root": np.int64(0),
        "sources": numbers(),
        "algorithm": "auto",
        "group_sizes": numbers(1),
        "members": numbers(0),
        "processes": numbers(0),
        "one_shot_bytes": numbers(),
        "two_shot_bytes": numbers(),
        "tree_shards": numbers(),
        "tree_sizes": numbers(),
        "tree_ranks": numbers(),
        "program": "",
        "part": numbers(),
        "rounds_to": "",
        "blocks_apart": np.int64(0),
        "lane": np.int64(0),
        **changes,
    }


def call(collective, result_dtypes, *operands, position=0, aliases=None, **changes):
    """The results, of the shapes of the operands. aliases: the result in the buffer of an operand."""
    results = [jax.ShapeDtypeStruct(x.shape, dtype) for x, dtype in zip(operands, result_dtypes, strict=False)]
    # Behind the mesh position.
    aliases = {1 + operand: result for operand, result in (aliases or {}).items()}
    function = jax.ffi.ffi_call(f"jax_ring_{collective}", results, input_output_aliases=aliases)
    return function(jnp.uint32(position), *operands, **attributes(collective, **changes))


def refused(text):
    return pytest.raises(JaxRuntimeError, match=text)


def run(fun, *operands):
    return jax.block_until_ready(jax.jit(fun)(*operands))


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "all_to_all", "broadcast"])
@pytest.mark.parametrize(
    ("given", "returned", "size"), [("float32", "int8", 1 << 20), ("float32", "int8", 4096), ("int8", "float32", 4096)]
)
def test_a_result_of_another_type(collective, given, returned, size):
    with refused(rf"the call, called at train.py:7: operand 0 is {given}\[{size}\], result 0 is {returned}\[{size}\]"):
        run(lambda x: call(collective, [returned], x), jnp.ones(size, given))


def test_a_part_whose_result_is_in_other_memory():
    """The rest of the result is that of the array with the parts before, and not what was in memory."""
    gather = jax.ffi.ffi_call("jax_ring_all_gather", jax.ShapeDtypeStruct((1 << 16,), jnp.float32))  # without an alias

    def part(x, before):
        return gather(jnp.uint32(0), x, before, **attributes("all_gather", part=numbers(8, 4)))

    x, before = np.arange(1, 5, dtype=np.float32), np.arange(1 << 16, dtype=np.float32)
    expected = before.copy()
    expected[8:12] = x
    for _ in range(10):
        used = [jax.block_until_ready(jnp.full(1 << 16, 7.0) + i) for i in range(4)]
        del used
        np.testing.assert_array_equal(run(part, x, before), expected)


def test_operands_of_several_types():
    x, y = jnp.ones(1 << 16, jnp.float32), jnp.ones(1 << 16, jnp.int8)
    with refused(r"operand 0 is float32\[65536\], operand 1 is int8\[65536\]: they must have one element type"):
        run(lambda x, y: call("all_reduce", [x.dtype, y.dtype], x, y), x, y)


@pytest.mark.parametrize("dtype", ["int4", "uint4", "int2"])
def test_elements_that_share_bytes(dtype):
    x = jnp.ones((3, 16, 1600), dtype)
    with refused(rf"operand 0 is {dtype}\[3,16,1600\].*Convert it to one whose elements are whole bytes"):
        run(lambda x: call("all_to_all", [x.dtype], x), x)


def in_place(collective, aliases, **changes):
    """The results of a call of two ranks, with these aliases, for [0, 1, 2, 3], [4, 5, 6, 7] and ten times these."""
    both = {"group_sizes": numbers(2), "members": numbers(0, 1), "processes": numbers(0, 0), **changes}

    def of_rank(x):
        position = jax.lax.axis_index("i").astype(jnp.uint32)
        operands = [x + 0, 10 * x]  # computed here, so that their buffers are free
        return call(collective, [x.dtype] * 2, *operands, position=position, aliases=aliases, **both)

    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.P("i")
    fun = jax.shard_map(of_rank, mesh=mesh, in_specs=spec, out_specs=[spec, spec], check_vma=False)
    return [np.asarray(x).tolist() for x in run(fun, jnp.arange(8.0))]


@pytest.mark.parametrize(
    ("collective", "aliases"),
    [("all_to_all", {0: 0}), ("permute", {1: 1}), ("all_reduce", {1: 0}), ("broadcast", {0: 1})],
)
def test_a_result_in_the_buffer_of_an_operand_that_is_still_read(collective, aliases):
    """Before it was refused, it held values of other places."""
    changes = {"sources": numbers(1, 0)} if collective == "permute" else {}
    ((operand, result),) = aliases.items()
    with refused(f"^INVALID_ARGUMENT: the call, .*: operand {operand} .*, result {result} .*: they share memory"):
        in_place(collective, aliases, **changes)


def test_a_result_in_the_buffer_of_its_own_operand():
    assert in_place("all_reduce", {0: 0, 1: 1}) == [[4, 6, 8, 10] * 2, [40, 60, 80, 100] * 2]
    assert in_place("broadcast", {1: 1}) == [[0, 1, 2, 3] * 2, [0, 10, 20, 30] * 2]


def test_an_exported_program_from_elsewhere():
    x = jax.ShapeDtypeStruct((1 << 20,), jnp.float32)
    unsafe = [export.DisabledSafetyCheck.custom_call("jax_ring_all_reduce")]
    made = export.export(jax.jit(lambda x: call("all_reduce", ["int8"], x)), disabled_checks=unsafe)(x)
    loaded = export.deserialize(bytearray(made.serialize()))
    with refused(r"operand 0 is float32\[1048576\], result 0 is int8\[1048576\]"):
        jax.block_until_ready(loaded.call(jnp.ones(x.shape, x.dtype)))


def test_numbers_of_operands():
    x = jnp.ones(8)
    with refused("one result per operand, and at least one operand; it has 2 operands and 1 results"):
        run(lambda x: call("all_reduce", [x.dtype], x, x), x)


def test_a_rank_of_another_process():
    elsewhere = {"group_sizes": numbers(2), "members": numbers(0, 1), "processes": numbers(5, 5)}
    with refused("partition 0 is in another process"):
        run(lambda x: call("all_reduce", [x.dtype], x, **elsewhere), jnp.ones(1000))


def test_a_copy_of_another_type():
    """Of the calls around XLA's collectives between hosts."""
    of_call = {"call": "the call", "site": "", "members": numbers(0), "processes": numbers(0)}

    def copy(x, returned, group_size):
        result = jax.ShapeDtypeStruct(x.shape, returned)
        function = jax.ffi.ffi_call("jax_ring.between_hosts", result)
        return function(jnp.uint32(0), x, begins=np.int64(1), group_sizes=numbers(group_size), **of_call)

    with refused(r"the call: operand 0 is float32\[8388608\], result 0 is int8\[8388608\]"):
        run(lambda x: copy(x, "int8", 1), jnp.ones(1 << 23))
    with refused("a group of -1 of the 1 members"):
        run(lambda x: copy(x, x.dtype, -1), jnp.ones(8))
