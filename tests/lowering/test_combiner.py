"""The combiner: which calls become one, of jax_ring and under override_lax(), and which do not."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_gpus import pretend_gpus
from helpers import assert_same_bits, make_mesh, num_calls, rank_fold, sharded
from jax import lax
from jax.experimental import compute_on as compute_on_module
from jax.sharding import PartitionSpec as P

from jax_ring import (
    override_lax,
    ring_all_gather,
    ring_all_to_all,
    ring_broadcast,
    ring_pmax,
    ring_ppermute,
    ring_psum,
    ring_psum_scatter,
    ring_reduce,
    sync_gradients,
)
from jax_ring.lowering import plan
from jax_ring.lowering.custom_call import engine
from jax_ring.lowering.passes import combiner, merge_equations

RANKS = 4
compute_on = getattr(compute_on_module, "compute_on2", compute_on_module.compute_on)  # as each version of JAX spells it
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


def test_a_call_is_not_joined_with_one_that_it_depends_on():
    check(lambda x: psum(psum(x) * x), calls=2)
    check(lambda x: lax.pmax(lax.pmax(x, "i"), "i"), calls=2)
    check(lambda x: psum(psum(x)), calls=2, check_vma=False)


def test_what_uses_a_result_moves_behind_the_joined_call():
    def body(x):
        a, b = psum(x), psum(x + 1)
        c = jnp.sin(a) * 2
        return a, b, c, psum(x + 2), psum(x + 3) * c

    check(body, calls=1)


def test_unrelated_work_does_not_keep_calls_apart():
    check(lambda x: [psum(x), jnp.sin(x).sum() + psum(x * x), psum(jnp.cos(x))], calls=1, check_vma=False)


def test_joined_calls_form_no_circle():
    """A second sum of each kind waits for the first of the other: only one of the pairs can be joined."""

    def body(x):
        total, largest = psum(x), lax.pmax(x + 1, "i")
        return psum(largest * 2), lax.pmax(total * 3, "i"), total, largest

    check(body, calls=3, check_vma=False, out_specs=P("i"))


def test_a_circle_through_a_joined_call_is_seen():
    def body(x):
        of_g = jnp.sin(ring_psum(x, "i"))
        of_h = jnp.cos(ring_pmax(x, "i"))
        second_g = ring_psum(of_h + x, "i")  # from here on the sums wait for the maximum
        second_h = ring_pmax(of_g + x, "i")
        return of_g, of_h, second_g, second_h

    f = sharded(body, mesh=MESH, check_vma=False)
    assert num_calls(f, X) == 3
    expected = sharded(body_of_lax(body), mesh=MESH, check_vma=False)(X)
    jax.tree.map(np.testing.assert_allclose, f(X), expected)


def body_of_lax(body):
    """A function of which the collectives are those of lax."""
    names = {**body.__globals__, "ring_psum": lax.psum, "ring_pmax": lax.pmax}
    return type(body)(body.__code__, names, closure=body.__closure__)


def random_program(rng: np.random.Generator):
    """A function of many sums, maxima and other operations on values that random earlier ones have computed."""
    steps = [(int(rng.integers(6)), *map(int, rng.integers(1 << 30, size=2))) for _ in range(40)]

    def run(x, psum, pmax):
        values = [x, x + 1, x * 2]
        for kind, i, j in steps:
            a, b = values[i % len(values)], values[j % len(values)]
            within = [a, b]
            value = [
                lambda a=a: psum(a),
                lambda a=a: psum(a),
                lambda a=a: pmax(a),
                lambda a=a, b=b: a * 3 - b,
                lambda w=within: lax.cond(w[0][0] > 0, lambda: w[0] + w[1], lambda: w[1]),
                lambda w=within: lax.fori_loop(0, 2, lambda _, c: c + psum(w[0] + w[1]), w[0]),
            ][kind]()
            values.append(value % 1009)
        return values

    return run


@pytest.mark.full
@pytest.mark.parametrize("seed", range(3))
def test_random_programs(seed):
    program = random_program(np.random.default_rng(seed))
    x = np.arange(RANKS * 2, dtype=np.int32) ** 3 % 101
    ours = sharded(lambda x: program(x, lambda v: ring_psum(v, "i"), lambda v: ring_pmax(v, "i")), mesh=MESH,
                   check_vma=False)  # fmt: skip
    theirs = sharded(lambda x: program(x, lambda v: lax.psum(v, "i"), lambda v: lax.pmax(v, "i")), mesh=MESH,
                     check_vma=False)  # fmt: skip
    assert num_calls(ours, x) < theirs.lower(x).as_text().count("stablehlo.all_reduce")
    assert_same_bits(ours(x), theirs(x))


FAMILY = {
    "psum": lambda x: ring_psum(x, "i"),
    "psum in the order of a ring": lambda x: ring_psum(x, "i", order="ring"),
    "psum along the tree": lambda x: ring_psum(x, "i", order="tree"),
    "psum_scatter": lambda x: ring_psum_scatter(x, "i", tiled=True),
    "psum_scatter of columns": lambda x: ring_psum_scatter(x, "i", scatter_dimension=1),
    "all_gather": lambda x: ring_all_gather(x, "i", axis=1),
    "all_to_all": lambda x: ring_all_to_all(x, "i", 0, 1, tiled=True),
    "ppermute": lambda x: ring_ppermute(x, "i", [(0, 2), (2, 3)]),
    "reduce": lambda x: ring_reduce(x, "i", root=1),
    "broadcast": lambda x: ring_broadcast(x, "i", root=1),
}


@pytest.mark.parametrize("name", FAMILY)
def test_a_call_for_each_leaf(name, monkeypatch):
    """They become one, with the same bits as if they stayed apart."""
    rng = np.random.default_rng(0)
    tree = [rng.standard_normal((RANKS * 8, RANKS), np.float32), rng.standard_normal((RANKS * 4, RANKS), np.float32)]
    tree.append(tree[0].astype(jnp.bfloat16))
    mapped = lambda t: jax.tree.map(FAMILY[name], t)  # noqa: E731
    make = lambda: sharded(lambda t: mapped(jax.tree.map(lambda x: x * 3, t)), mesh=MESH, check_vma=False)  # noqa: E731
    joined = make()
    assert num_calls(joined, tree) == 2  # one for each dtype
    monkeypatch.setattr(combiner, "COMBINE_THRESHOLD_COUNT", 1)
    apart = make()
    assert num_calls(apart, tree) == 3
    assert_same_bits(joined(tree), apart(tree))


def test_operands_that_are_computed_twice_are_sent_once():
    def body(x):
        return [ring_psum(jnp.sin(x + k % 2), "i") for k in range(4)]

    f = sharded(body, mesh=MESH, check_vma=False)
    (line,) = (line for line in f.lower(X).as_text().splitlines() if "@jax_ring_all_reduce" in line)
    assert line.split("->")[1].count("tensor<2xf32>") == 2
    results = f(X)
    for k in range(4):
        np.testing.assert_array_equal(results[k], results[k % 2])
    assert not np.array_equal(np.asarray(results[0]), np.asarray(results[1]))


def test_complex_constants_are_compared():
    f = sharded(lambda x: [ring_psum(x * k, "i") for k in (2j, 3j, 2j)], mesh=MESH, check_vma=False)
    (line,) = (line for line in f.lower(X).as_text().splitlines() if "@jax_ring_all_reduce" in line)
    assert line.split("->")[1].count("tensor<2xcomplex<f32>>") == 2
    doubled, tripled, again = f(X)
    np.testing.assert_array_equal(doubled, again)
    np.testing.assert_allclose(tripled, doubled * 1.5, rtol=1e-6)


def test_random_numbers_of_the_host_are_not_taken_for_equal():
    numbers = iter(range(100))

    def drawn():
        return jax.experimental.io_callback(
            lambda: np.float32(next(numbers)), jax.ShapeDtypeStruct((), jnp.float32)
        )  # fmt: skip

    f = sharded(lambda x: [ring_psum(x + drawn(), "i") for _ in range(2)], mesh=MESH, check_vma=False)
    first, second = f(X)
    assert not np.array_equal(np.asarray(first), np.asarray(second))


def test_options_keep_calls_apart():
    def body(x):
        orders = [ring_psum(x + k, "i", order=order) for k, order in enumerate(("rank", "ring", "tree", "rank"))]
        shifts = [ring_ppermute(x, "i", [(0, to)]) for to in (1, 2)]
        return [*orders, *shifts, ring_broadcast(x, "i", root=0), ring_broadcast(x, "i", root=1)]

    assert num_calls(sharded(body, mesh=MESH, check_vma=False), X) == 7


def test_buckets_of_gradients_stay_apart():
    tree = [np.ones(8, np.float32), np.ones(8, np.float32)]
    f = sharded(lambda t: sync_gradients(t, "i", bucket_bytes=32, first_bucket_bytes=1), mesh=MESH, in_specs=P(),
                check_vma=False, out_specs=P())  # fmt: skip
    assert num_calls(f, tree) == 2


@pytest.mark.parametrize("prints", [False, True])
def test_prints_do_not_change_what_is_joined(prints):
    """A program may print in one of its processes alone, and all must join the same calls."""

    def body(x):
        total = ring_psum(x, "i")
        if prints:
            jax.debug.print("{}", total[0])
        from_host = jax.experimental.io_callback(lambda: np.float32(1), jax.ShapeDtypeStruct((), jnp.float32))
        return total, ring_psum(x + from_host, "i")

    f = sharded(body, mesh=MESH, check_vma=False)
    assert num_calls(f, X) == 1
    np.testing.assert_allclose(f(X)[1], f(X)[0] + RANKS)


def test_a_gradient_of_many_uses_is_joined_with_others():
    """Autodiff sums a parameter's gradients where it has them, between the others."""

    def body(w, x):
        def loss(w):
            hidden = x
            for _ in range(3):  # each layer has the same parameters
                hidden = jnp.tanh(hidden * w["a"] + w["b"]) * w["c"]
            return (hidden**2).sum()

        return jax.grad(loss)(w)

    weights = {"a": jnp.float32(1.5), "b": jnp.ones(2), "c": jnp.float32(0.5)}
    f = sharded(body, mesh=MESH, in_specs=(P(), P("i")), out_specs=P())
    expected = f(weights, X)
    with override_lax():
        assert num_calls(f, weights, X) == 1
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), f(weights, X), expected)


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


def test_limits(monkeypatch):
    monkeypatch.setattr(combiner, "COMBINE_THRESHOLD_BYTES", 16)
    check(lambda x: psum([x * k for k in range(6)]), calls=3)
    # A call that is too large on its own stays alone, and those around it are joined.
    check(lambda x: [psum(x), psum(jnp.tile(x, 3)), psum(x + 1)], calls=2)
    monkeypatch.setattr(combiner, "COMBINE_THRESHOLD_COUNT", 1)
    check(lambda x: psum([x * k for k in range(6)]), calls=6)


def test_the_size_of_a_gather_is_that_of_its_result(monkeypatch):
    monkeypatch.setattr(combiner, "COMBINE_THRESHOLD_BYTES", 2 * RANKS * 8)
    f = sharded(lambda x: [ring_all_gather(x + k, "i") for k in range(4)], mesh=MESH, check_vma=False)
    assert num_calls(f, X) == 2


def test_the_time_to_lower_is_linear(monkeypatch):
    """Each call is built once, and each joined call once more."""
    built, build = [], engine.build_call
    monkeypatch.setattr(engine, "build_call", lambda *args: built.append(args) or build(*args))
    monkeypatch.setattr(combiner, "COMBINE_THRESHOLD_COUNT", 50)
    sharded(lambda x: [ring_psum(x * k, "i") for k in range(200)], mesh=MESH, check_vma=False).lower(X)
    assert len(built) == 200 + 4


def test_dead_results(check_vma):
    check(lambda x: psum([x * k for k in range(6)])[4], calls=1, check_vma=check_vma)


@pytest.mark.filterwarnings("ignore:override_lax")
@pytest.mark.usefixtures("left_to_xla")
def test_calls_served_by_xla_are_left_to_its_combiner():
    mesh = make_mesh((2, 2), ("i", "auto"))
    body = lambda x: psum([x, x + 1])  # noqa: E731
    f = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P(), axis_names={"i"}))
    with override_lax():
        text = f.lower(X).as_text()
    assert text.count("stablehlo.all_reduce") == 2


# ---- GPUs -----------------------------------------------------------------------------------------------------------


def lowered_for_gpus(monkeypatch, body, *args) -> str:
    pretend_gpus(monkeypatch)
    f = sharded(body, mesh=MESH, in_specs=P(), out_specs=P(), check_vma=False)
    return f.trace(*args).lower(lowering_platforms=("cuda",)).as_text()


TREE = {"a": np.ones(8, np.float32), "b": np.ones((2, 3), np.float32)}


def test_calls_on_the_main_stream_of_a_gpu_are_joined(monkeypatch):
    text = lowered_for_gpus(monkeypatch, lambda t: jax.tree.map(lambda x: jnp.sin(ring_psum(x, "i")), t), TREE)
    (line,) = (line for line in text.splitlines() if "@jax_ring_all_reduce" in line)
    assert line.endswith("(tensor<8xf32>, tensor<2x3xf32>) -> (tensor<8xf32>, tensor<2x3xf32>)")


def test_calls_beside_the_computation_of_a_gpu_stay_apart(monkeypatch):
    def body(tree):
        return jax.tree.map(lambda x: jnp.sin(sync_gradients(x, "i")), tree)

    assert lowered_for_gpus(monkeypatch, body, TREE).count("@jax_ring_all_reduce_async(") == 2

    def on_stream_of_user(tree):
        on = partial(compute_on, compute_type="gpu_stream:7", out_memory_spaces=jax.memory.Space.Device)
        return [on(lambda x: ring_psum(x, "i"))(x) for x in tree.values()]

    assert lowered_for_gpus(monkeypatch, on_stream_of_user, TREE).count("@jax_ring_all_reduce_async(") == 2


def test_calls_of_one_part_on_a_stream_are_joined(monkeypatch):
    on = partial(compute_on, compute_type="gpu_stream:7", out_memory_spaces=jax.memory.Space.Device)
    text = lowered_for_gpus(monkeypatch, on(lambda tree: jax.tree.map(lambda x: ring_psum(x, "i"), tree)), TREE)
    assert text.count("@jax_ring_all_reduce_async(") == 1


@pytest.mark.parametrize("sum_over", [psum, lambda x: ring_psum(x, "i")], ids=["override", "ring_psum"])
def test_calls_of_one_type_are_planned_once(sum_over, monkeypatch):
    monkeypatch.setattr(merge_equations, "join", lambda jaxpr: jaxpr)
    planned = []
    plan_call = plan.plan_call
    monkeypatch.setattr(plan, "plan_call", lambda *args: planned.append(args) or plan_call(*args))

    def body(x):
        return [sum_over(y) for k in range(5) for y in (x * k, x[:, :1] * k)]

    with override_lax():
        text = sharded(body, mesh=MESH, out_specs=P()).lower(X.reshape(RANKS, 2)).as_text()
    assert len(planned) == 2
    assert text.count("@jax_ring_all_reduce") == 1


def test_calls_that_stay_apart_share_the_mesh_position():
    def body(x):
        return ring_pmax(ring_psum(x, "i") + x, "i")

    text = sharded(body, mesh=MESH, out_specs=P()).lower(X).as_text()
    assert text.count("@jax_ring_all_reduce") == 2
    assert text.count("stablehlo.partition_id") == 1


def test_calls_of_one_line_and_other_types_stay_apart():
    # They are lowered by one answer for each type, and must not get that of another.
    def body(x):
        return [ring_psum(y, "i") for y in (x, x.astype(jnp.bfloat16), x.astype(jnp.int32), x.reshape(2, 1))]

    f = sharded(body, mesh=MESH, out_specs=P())
    assert num_calls(f, X) == 3
    parts = X.reshape(RANKS, 2)
    whole, half, integers, column = f(X)
    assert_same_bits((whole, column), (rank_fold(parts), rank_fold(parts).reshape(2, 1)))
    np.testing.assert_array_equal(integers, parts.astype(np.int32).sum(0))
    assert half.dtype == jnp.bfloat16
