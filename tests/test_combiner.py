"""The combiner: which calls under override_lax() are combined into one, and which are not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits, make_mesh, num_calls, rank_fold, sharded
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_ring import override_lax
from jax_ring.lowering import combiner

RANKS = 4
MESH = make_mesh((RANKS,))
X = np.random.default_rng(0).standard_normal(RANKS * 2).astype(np.float32)


def psum(x):
    return lax.psum(x, "i")


def check(body, *, calls, **options):
    """Asserts that `body` under the override makes `calls` calls, with the same results as without it."""
    f = sharded(body, mesh=MESH, **{"out_specs": P(), **options})
    expected = f(X)
    with override_lax():
        assert num_calls(f, X) == calls
        assert_same_bits(f(X), expected)


def test_a_tree_is_one_call(check_vma):
    check(lambda x: psum([x * k for k in range(20)]), calls=1, check_vma=check_vma)


def test_gradients_of_layers_are_one_call():
    def body(w, x):
        def loss(w):
            hidden = x
            for layer in w:
                hidden = jnp.tanh(hidden * layer["w"] + layer["b"])
            return (hidden**2).sum()

        return jax.grad(loss)(w)

    weights = [{"w": jnp.float32(k + 1), "b": jnp.ones(2)} for k in range(5)]
    f = sharded(body, mesh=MESH, in_specs=(P(), P("i")), out_specs=P())
    expected = f(weights, X)
    with override_lax():
        assert num_calls(f, weights, X) == 1
        assert_same_bits(f(weights, X), expected)


def test_using_a_result_closes_the_combined_call():
    check(lambda x: psum(psum(x) * x), calls=2)

    def body(x):
        a, b = psum(x), psum(x + 1)
        c = a * 2
        return a, b, c, psum(x + 2), psum(x + 3)

    check(body, calls=2)


def test_unrelated_work_does_not_close_the_combined_call():
    check(lambda x: [psum(x), jnp.sin(x).sum() + psum(x * x), psum(jnp.cos(x))], calls=2, check_vma=False)


def test_equal_operands_are_sent_once():
    def body(x):
        y = x + 1
        return psum(y), psum(x), psum(y)

    f = sharded(body, mesh=MESH, out_specs=P())
    with override_lax():
        assert num_calls(f, X) == 1
        text = f.lower(X).as_text()
        (line,) = (line for line in text.splitlines() if "@jax_ring_all_reduce" in line)
        assert line.split("->")[1].count("tensor<2xf32>") == 2
        np.testing.assert_array_equal(f(X)[0], f(X)[2])


def test_only_compatible_calls_are_combined(check_vma):
    check(lambda x: [lax.psum(x, "i"), lax.pmax(x, "i"), lax.pmin(x, "i")], calls=3, check_vma=False, out_specs=P("i"))
    check(lambda x: psum([x, x.astype(jnp.int32), x * 2, x > 0]), calls=2, check_vma=check_vma)
    groups = [[0, 1], [2, 3]]
    check(
        lambda x: [lax.psum(x, "i"), lax.psum(x, "i", axis_index_groups=groups), lax.psum(x + 1, "i")],
        calls=2, check_vma=False, out_specs=P("i"),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [jnp.int4, jnp.float8_e8m0fnu], ids=lambda d: d.__name__)
def test_widened_dtypes_are_combined(dtype):
    values = np.ones((RANKS, 3)).astype(dtype)

    def body(x):
        a, b = psum((x, x[:, :1]))
        return a.astype(jnp.float32), b.astype(jnp.float32)

    f = sharded(body, mesh=MESH, out_specs=P())
    with override_lax():
        assert num_calls(f, values) == 1
        # The call for the first operand alone is gone, and each operand is widened once.
        text = f.lower(values).as_text()
        assert text.count("@jax_ring_all_reduce") == text.count("stablehlo.partition_id") == 1
        assert text.count("stablehlo.convert") == 6
        for total in f(values):
            np.testing.assert_array_equal(total, rank_fold(values.astype(np.float32))[None, : total.shape[1]])


def test_calls_are_not_combined_across_blocks(check_vma):
    def body(x):
        def step(carry, _):
            return sum(psum((carry, carry * 2))) / 8 + x, psum(carry)

        y, ys = lax.scan(step, x, length=3)
        z = lax.cond(psum(x)[0] > 0, lambda: psum((x, x + 1)), lambda: psum((x + 2, x)))
        return y, ys, jax.jit(lambda x: psum((x, x * x)))(x), z, jax.checkpoint(psum)(x * 3)

    f = sharded(body, mesh=MESH, out_specs=(P("i"), P(None), P(), P(), P()), check_vma=check_vma)
    expected = f(X)
    with override_lax():
        assert_same_bits(f(X), expected)


@pytest.mark.parametrize("inner", ["scan", "jit"])
def test_a_call_outside_is_not_combined_with_one_inside(inner, check_vma):
    def body(x):
        outside = psum(x)
        if inner == "scan":
            inside = lax.scan(lambda carry, _: (psum(carry + x) * 0.1 + x, None), x, length=2)[0]
        else:
            inside = jax.jit(lambda x: psum(x + 1))(x)
        return outside * 2, inside

    check(body, calls=2, out_specs=P("i"), check_vma=check_vma)


def test_thresholds_limit_a_combined_call(monkeypatch):
    monkeypatch.setattr(combiner, "COMBINE_THRESHOLD_BYTES", 16)
    check(lambda x: psum([x * k for k in range(6)]), calls=3)
    monkeypatch.setattr(combiner, "COMBINE_THRESHOLD_COUNT", 1)
    check(lambda x: psum([x * k for k in range(6)]), calls=6)


def test_dead_results(check_vma):
    check(lambda x: psum([x * k for k in range(6)])[4], calls=1, check_vma=check_vma)


@pytest.mark.filterwarnings("ignore:override_lax")
def test_calls_served_by_xla_are_left_to_its_combiner():
    mesh = make_mesh((2, 2), ("i", "auto"))
    body = lambda x: psum([x, x + 1])  # noqa: E731
    f = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P(), axis_names={"i"}))
    with override_lax():
        text = f.lower(X).as_text()
    assert text.count("stablehlo.all_reduce") == 2
