"""The passes over a shard_map's body, on the mesh that `jax.make_mesh` returns: one with explicit axes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import num_calls, rank_fold, sharded
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ring import ring_psum

MESH = jax.make_mesh((4,), ("i",))
VALUES = np.arange(4000, dtype=np.float32)
TOTAL = rank_fold(VALUES.reshape(4, 1000))


def fresh():
    """A new array, which the test may donate."""
    return jax.device_put(jnp.asarray(VALUES) * 1, NamedSharding(MESH, P("i")))


def mapped(f, **options):
    return sharded(f, mesh=MESH, **options)


def test_the_axes_are_explicit():
    assert MESH.axis_types == (AxisType.Explicit,)


@pytest.mark.parametrize("out_specs", [P(), (P(), P("i"))])
def test_calls_are_joined(out_specs):
    def f(x):
        total = ring_psum(x, "i")
        product = ring_psum(2 * x, "i")  # ready only after the first call
        return total + product if out_specs == P() else (total + product, x)

    program = mapped(f, out_specs=out_specs)
    assert num_calls(program, fresh()) == 1
    np.testing.assert_array_equal(jax.tree.leaves(program(fresh()))[0], 3 * TOTAL)


def test_equal_calls_name_both_lines():
    def f(x):
        total = ring_psum(x, "i")
        return total, ring_psum(x, "i")

    line = f.__code__.co_firstlineno
    (site,) = [
        part.partition('"')[0] for part in mapped(f, out_specs=P()).lower(fresh()).as_text().split('site = "')[1:]
    ]
    assert f":{line + 1} (" in site
    assert f":{line + 2} (" in site


def test_a_call_that_may_be_left_out_ends_in_a_barrier():
    def f(x):
        return lax.cond(lax.axis_index("i") < 4, lambda x: ring_psum(x, "i"), lambda x: x, x)

    assert mapped(f, check_vma=False).lower(fresh()).compile().as_text().count('"jax_ring.barrier"') == 1


@pytest.mark.parametrize("out_specs", [P("i"), P()])
def test_a_donated_argument_is_summed_in_place(out_specs):
    # XLA finds a taker of a donated buffer among results of its size on a device.
    body = mapped(lambda x: ring_psum(x, "i"), out_specs=out_specs, check_vma=False, jit=False)
    program = jax.jit(body, donate_argnums=0)
    text = program.lower(fresh()).compile().as_text()
    assert "output_to_operand_aliasing={{}: (1" in text
    assert " copy(" not in text
    x = fresh()
    buffers = {shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards}
    result = program(x)
    assert {shard.data.unsafe_buffer_pointer() for shard in result.addressable_shards} == buffers
    np.testing.assert_array_equal(result, np.tile(TOTAL, 4 if out_specs == P("i") else 1))
