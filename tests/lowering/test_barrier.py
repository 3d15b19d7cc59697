"""The barrier at the end of a program whose ranks may leave out a call: where it is, and that all fail together."""

import jax
import numpy as np
import pytest
from helpers import make_mesh, run_python, sharded
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_ring import explain, ring_psum

BARRIER = '"jax_ring.barrier"'
MESH = make_mesh((4,))
X = np.arange(8, dtype=np.float32)


def psum(x):
    return ring_psum(x, "i")


def in_branch(x):
    return lax.cond(lax.axis_index("i") < 4, psum, lambda x: x, x)


def in_loop(x):
    return lax.while_loop(lambda x: x[0] < 1, lambda x: psum(x) + 1, psum(x))


def in_loop_of_unknown_length(x):
    return lax.fori_loop(0, 2 + lax.axis_index("i") // 4, lambda _, x: psum(x), x)


def in_loop_from_an_unknown_index(x):
    return lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, psum(s[1])), (lax.axis_index("i") // 4, x))[1]


def in_loop_of_unknown_steps(x):
    step = 1 + lax.axis_index("i") // 4
    return lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + step, psum(s[1])), (0, x))[1]


def in_function_in_branch(x):
    return lax.switch(lax.axis_index("i") * 0, [jax.jit(psum), lambda x: x], x)


def in_branch_in_function(x):
    return jax.jit(in_branch)(x)


def in_branch_in_counted_loop(x):
    return lax.scan(lambda x, _: (in_branch(x), None), x, length=2)[0]


def in_recomputed_branch(x):
    return jax.grad(lambda x: jax.checkpoint(in_branch)(x).sum())(x)


def in_counted_loop(x):
    return lax.fori_loop(0, 3, lambda _, x: psum(x) / 4, x)


def other_collective_in_branch(x):
    return psum(lax.cond(lax.axis_index("i") < 4, lambda x: lax.pmax(x, "i"), lambda x: x, x))


OPTIONAL = [
    in_branch, in_loop, in_loop_of_unknown_length, in_loop_from_an_unknown_index, in_loop_of_unknown_steps,
    in_function_in_branch, in_branch_in_function, in_branch_in_counted_loop, in_recomputed_branch,
]  # fmt: skip
CERTAIN = [psum, jax.jit(psum), in_counted_loop, other_collective_in_branch, lambda x: jax.checkpoint(psum)(x)]


def program(f, **options):
    return sharded(f, mesh=MESH, check_vma=False, **options).lower(X).compile().as_text()


@pytest.mark.parametrize("f", OPTIONAL)
def test_a_call_that_may_be_left_out_ends_in_a_barrier(f):
    assert program(f).count(BARRIER) == 1


@pytest.mark.parametrize("f", CERTAIN)
def test_other_programs_have_none(f):
    assert BARRIER not in program(f)


def test_only_the_shard_map_with_the_call_has_one():
    def twice(x):
        for f in (psum, in_branch, psum):
            x = jax.shard_map(f, mesh=MESH, in_specs=P("i"), out_specs=P("i"), check_vma=False)(x)
        return x

    assert jax.jit(twice).lower(X).compile().as_text().count(BARRIER) == 1
    assert jax.jit(jax.vmap(twice)).lower(X.reshape(1, 8)).compile().as_text().count(BARRIER) == 1


def test_explain_leaves_it_out():
    found = explain(sharded(in_branch, mesh=MESH, check_vma=False), X)
    assert [instruction.name for instruction in found.instructions] == ["jax_ring_all_reduce"]


def test_no_export_has_one():
    check = jax.export.DisabledSafetyCheck.custom_call("jax_ring_all_reduce")
    f = sharded(in_branch, mesh=MESH, check_vma=False)
    assert BARRIER[1:-1] not in jax.export.export(f, disabled_checks=[check])(X).mlir_module()


RUN = """
import time
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P
from jax_ring import ring_psum

mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("group", "i"))

def mapped(f):
    specs = P(("group", "i"))
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False))

x = jnp.arange(16.0)
"""


@pytest.mark.full
def test_groups_may_make_different_numbers_of_calls():
    # The ranks of one group wait at the barrier for several deadlines.
    result = run_python(
        RUN
        + """
def f(x):
    many = lax.axis_index("group") * 80
    def wait(_):
        time.sleep(0.02)
        return np.float32(0)
    def body(state):
        i, x = state
        return i + 1, ring_psum(x, "i") / 4 + jax.pure_callback(wait, jax.ShapeDtypeStruct((), np.float32), i)
    return lax.while_loop(lambda state: state[0] < many, body, (0, x))[1]
found = mapped(f)(x)
np.testing.assert_array_equal(found[:8], x[:8])
np.testing.assert_array_equal(found[8:], np.tile(np.asarray(x[8:]).reshape(4, 2).mean(0), 4))
""",
        JAX_RING_TIMEOUT_S="0.5",
    )
    assert result.returncode == 0, result.stderr


def test_an_error_of_one_rank_is_raised():
    result = run_python(
        RUN
        + """
def fail():
    raise RuntimeError("no such file")
def f(x):
    x = lax.cond(lax.axis_index("i") < 4, lambda x: ring_psum(x, "i"), lambda x: x, x)
    read = lambda: jax.pure_callback(fail, jax.ShapeDtypeStruct((), np.float32))
    return x + lax.cond((lax.axis_index("i") == 2) & (lax.axis_index("group") == 0), read, lambda: np.float32(0))
try:
    jax.block_until_ready(mapped(f)(x))
except (jax.errors.JaxRuntimeError, ValueError) as error:
    assert "no such file" in str(error), error
else:
    raise AssertionError("no error")
""",
        JAX_RING_TIMEOUT_S="0.5",
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.full
def test_programs_that_depend_on_a_failed_one_fail_too():
    # They contain a collective of XLA, which would wait for the ranks that failed, and then end the process.
    result = run_python(
        RUN
        + """
def branch(x):
    return lax.cond((lax.axis_index("i") == 2) & (lax.axis_index("group") == 0), lambda x: x, call, x)
def call(x):
    return ring_psum(x, "i")
def loop(x):
    number = 2 + (lax.axis_index("i") == 2) * (lax.axis_index("group") == 0)
    return lax.while_loop(lambda state: state[0] < number, lambda state: (state[0] + 1, call(state[1])), (0, x))[1]
def scan(x):
    return lax.scan(lambda x, _: (branch(x), None), x, length=2)[0]

shift = mapped(lambda x: lax.ppermute(x, ("group", "i"), [(i, (i + 1) % 8) for i in range(8)]))
expected = np.roll(x, 2)
np.testing.assert_array_equal(shift(x), expected)
for f in (branch, loop, scan, lambda x: jax.jit(branch)(x)):
    failed = mapped(f)(x)
    dependent = shift(failed)
    for value, start in ((dependent, "INTERNAL: Error dispatching computation: "), (failed, "DEADLINE_EXCEEDED: ")):
        for shard in value.addressable_shards:
            try:
                shard.data.block_until_ready()
            except (jax.errors.JaxRuntimeError, ValueError) as error:
                assert str(error).startswith(start + "ring_psum"), error
                assert "rank 2 (mesh position 2)" in str(error) or f is loop, error
            else:
                raise AssertionError(f"{shard} has a value")
    np.testing.assert_array_equal(shift(x), expected)
""",
        JAX_RING_TIMEOUT_S="0.5",
        XLA_FLAGS="--xla_cpu_collective_call_warn_stuck_timeout_seconds=3 "
        "--xla_cpu_collective_call_terminate_timeout_seconds=3",
    )
    assert result.returncode == 0, result.stderr
