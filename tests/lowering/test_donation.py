"""A sum of a donated argument is in place where nothing else reads the argument, and right in every case."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import SHARDED, TARGET, make_mesh, rank_fold
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ring import ring_all_gather, ring_psum

N = 1000
VALUES = np.arange(8 * N, dtype=np.float32).reshape(8, N)
TOTAL = np.tile(rank_fold(VALUES), 8)


def fresh(factor=1.0, spec=SHARDED):
    """A new array, which the test may donate."""
    return jax.device_put(jnp.asarray(VALUES.ravel() * np.float32(factor)), NamedSharding(make_mesh(), spec))


def mapped(fun, **specs):
    return jax.shard_map(fun, mesh=make_mesh(), **{"in_specs": SHARDED, "out_specs": SHARDED, **specs}, check_vma=False)


def donating(fun, argnums=0, **options):
    return jax.jit(fun, donate_argnums=argnums, **options)


def text_of(program, *arguments) -> str:
    return program.lower(*arguments).compile().as_text()


def num_in_place(text: str) -> int:
    """The number of results of sums that have the buffers of their operands."""
    calls = [line for line in text.splitlines() if f'custom_call_target="{TARGET}"' in line]
    assert calls
    aliases = [line.partition("output_to_operand_aliasing={")[2].partition("}, api_version")[0] for line in calls]
    return sum(text.count(": (") for text in aliases)


def assert_in_place(program, *arguments):
    text = text_of(program, *arguments)
    assert num_in_place(text) == len(arguments)
    assert " copy(" not in text


def ring(x):
    return ring_psum(x, "i")


def test_a_donated_argument_is_summed_in_place():
    program = donating(mapped(ring))
    assert_in_place(program, fresh())
    x = fresh()
    buffers = {shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards}
    result = program(x)
    assert x.is_deleted()
    assert {shard.data.unsafe_buffer_pointer() for shard in result.addressable_shards} == buffers
    np.testing.assert_array_equal(result, TOTAL)


def test_without_donation_the_argument_is_kept():
    program = jax.jit(mapped(ring))
    x = fresh()
    assert num_in_place(text_of(program, x)) == 0
    assert " copy(" not in text_of(program, x)
    np.testing.assert_array_equal(program(x), TOTAL)
    np.testing.assert_array_equal(x, VALUES.ravel())


def test_out_shardings_name_the_result_of_an_argument():
    # JAX then says which result gets the buffer, instead of leaving it to XLA.
    program = donating(mapped(ring), out_shardings=NamedSharding(make_mesh(), SHARDED))
    assert "tf.aliasing_output" in program.lower(fresh()).as_text()
    assert_in_place(program, fresh())
    np.testing.assert_array_equal(program(fresh()), TOTAL)


def test_a_result_that_all_ranks_share():
    program = donating(mapped(ring, out_specs=P()))
    assert_in_place(program, fresh())
    np.testing.assert_array_equal(program(fresh()), TOTAL[:N])


def test_a_reshaped_argument_is_not_summed_in_place():
    # XLA would copy it before the call, and the sum after it.
    program = donating(mapped(lambda x: ring_psum(x.reshape(10, -1), "i").ravel()))
    text = text_of(program, fresh())
    assert num_in_place(text) == 0
    assert text.count(" copy(") == 1
    np.testing.assert_array_equal(program(fresh()), TOTAL)


def test_a_tree_of_arguments_in_one_call():
    program = donating(lambda tree: jax.tree.map(mapped(ring), tree))
    tree = {"a": fresh(), "b": [fresh(2), fresh(3)]}
    assert num_in_place(text_of(program, tree)) == 3
    assert " copy(" not in text_of(program, tree)
    result = program(tree)
    np.testing.assert_array_equal(result["a"], TOTAL)
    np.testing.assert_array_equal(result["b"], [2 * TOTAL, 3 * TOTAL])


@pytest.mark.parametrize(("argnums", "num"), [((0,), 1), ((0, 1), 2)])
def test_joined_calls_of_donated_and_kept_arguments(argnums, num):
    program = donating(mapped(lambda x, y: (ring(x), ring(y))), argnums)
    x, y = fresh(), fresh(2)
    text = text_of(program, x, y)
    assert text.count(f'custom_call_target="{TARGET}"') == 1
    assert num_in_place(text) == num
    sums = program(x, y)
    np.testing.assert_array_equal(sums, [TOTAL, 2 * TOTAL])
    assert y.is_deleted() == (num == 2)
    if num == 1:
        np.testing.assert_array_equal(y, 2 * VALUES.ravel())


@pytest.mark.parametrize(
    ("fun", "expected"),
    [
        (lambda x: mapped(lambda x: ring(x) - x)(x), TOTAL - VALUES.ravel()),  # within the shard_map
        (lambda x: mapped(ring)(x) - x, TOTAL - VALUES.ravel()),  # behind it
        (lambda x: jnp.flip(x) + mapped(ring)(x), VALUES.ravel()[::-1] + TOTAL),  # in front of it
        (lambda x: mapped(ring)(x) + mapped(lambda x: ring_psum(x, "i", order="ring"))(x), 2 * TOTAL),
        (lambda x: (mapped(ring)(x), x), (TOTAL, VALUES.ravel())),  # returned as it is
        (lambda x: mapped(lambda x: sum(ring_psum((x, x), "i")))(x), 2 * TOTAL),
    ],
)
def test_an_argument_that_is_needed_elsewhere_is_not_summed_in_place(fun, expected):
    program = donating(fun)
    assert num_in_place(text_of(program, fresh())) == 0
    np.testing.assert_array_equal(jnp.stack(jax.tree.leaves(program(fresh()))).squeeze(), expected)


def test_a_sum_that_the_program_goes_on_with():
    program = donating(mapped(lambda x: ring(x) * 2 + 1))
    assert_in_place(program, fresh())
    np.testing.assert_array_equal(program(fresh()), TOTAL * 2 + 1)


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_a_buffer_that_no_result_can_have():
    program = donating(mapped(lambda x: ring(x).sum(keepdims=True)))
    text = text_of(program, fresh())
    assert num_in_place(text) == 0
    assert " copy(" not in text
    np.testing.assert_allclose(program(fresh()), np.full(8, TOTAL[:N].sum()), rtol=1e-6)


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_two_buffers_for_one_result():
    # XLA gives the result one of the buffers, and may not write to the other.
    program = donating(mapped(lambda x, y: ring(x) + 2 * y), (0, 1))
    assert num_in_place(text_of(program, fresh(), fresh())) == 0
    np.testing.assert_array_equal(program(fresh(), fresh()), TOTAL + 2 * VALUES.ravel())


def test_results_that_change_places():
    program = donating(mapped(lambda x, y: (ring(y), ring(x))), (0, 1))
    np.testing.assert_array_equal(program(fresh(), fresh(2)), [2 * TOTAL, TOTAL])


def test_a_function_within_the_program():
    inner = jax.jit(mapped(ring))
    program = donating(lambda x: inner(x))
    assert_in_place(program, fresh())
    np.testing.assert_array_equal(program(fresh()), TOTAL)


def test_a_function_that_is_called_several_times():
    inner = jax.jit(mapped(ring))
    program = donating(lambda x, y, z: (inner(x), inner(y), inner(z)))  # y and z are not donated
    x, y, z = fresh(), fresh(2), fresh(3)
    # In place, each that is not donated would be copied first: XLA makes the function a part of each caller.
    text = text_of(program, x, y, z)
    assert num_in_place(text) == 0
    assert text.count(" copy(") == 1  # of the sum, into the donated buffer
    np.testing.assert_array_equal(program(x, y, z), [TOTAL, 2 * TOTAL, 3 * TOTAL])
    np.testing.assert_array_equal([y, z], [2 * VALUES.ravel(), 3 * VALUES.ravel()])


def test_a_donation_within_the_program_counts_for_nothing():
    inner = donating(mapped(ring))
    program = jax.jit(lambda x: inner(x))
    x = fresh()
    assert num_in_place(text_of(program, x)) == 0
    np.testing.assert_array_equal(program(x), TOTAL)
    np.testing.assert_array_equal(x, VALUES.ravel())


@pytest.mark.parametrize("is_scan", [True, False])
def test_loops(is_scan):
    def step(x, _=None):
        return ring_psum(x, "i") * 0.125, None

    def loop(x):
        if is_scan:
            return lax.scan(step, x, length=3)[0]
        return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, step(c[1])[0]), (0, x))[1]

    program = donating(mapped(loop))
    copies = [line for line in text_of(program, fresh()).splitlines() if " copy(" in line]
    assert not any(f"f32[{N}]" in line for line in copies)
    np.testing.assert_allclose(program(fresh()), TOTAL / 8, rtol=1e-6)


def test_other_collectives_and_dtypes():
    program = donating(mapped(lambda x: ring_all_gather(x, "i", tiled=True)[:N]))
    np.testing.assert_array_equal(program(fresh()), np.tile(VALUES[0], 8))
    program = donating(mapped(ring))
    for dtype in (jnp.bfloat16, jnp.int32, jnp.float8_e4m3fn):
        x = jnp.ones(8 * N, dtype)
        assert num_in_place(text_of(program, x)) == 1
        np.testing.assert_array_equal(program(x).astype(np.float32), np.full(8 * N, 8.0))


def test_the_sum_along_a_tree():
    program = donating(mapped(lambda x: ring_psum(x, "i", order="tree")))
    assert_in_place(program, fresh())
    np.testing.assert_array_equal(program(fresh()), TOTAL)


def test_an_exported_program_leaves_it_to_who_calls_it():
    checks = [jax.export.DisabledSafetyCheck.custom_call(TARGET)]
    exported = jax.export.export(donating(mapped(ring)), disabled_checks=checks)(fresh())
    assert "output_operand_aliases = [" not in exported.mlir_module()
    x = fresh()
    np.testing.assert_array_equal(jax.jit(exported.call)(x), TOTAL)
    np.testing.assert_array_equal(x, VALUES.ravel())


def test_a_buffer_that_someone_else_holds_is_copied():
    # XLA cannot give away memory that NumPy reads. It then copies the argument in front of the program.
    x = fresh()
    held = [np.asarray(shard.data) for shard in x.addressable_shards]
    result = donating(mapped(ring))(x)
    np.testing.assert_array_equal(result, TOTAL)
    np.testing.assert_array_equal(held, VALUES)
