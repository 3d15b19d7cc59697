"""Collectives that become one equation before they are lowered, and those that are left to the combiner."""

import types
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits, make_mesh, num_calls, sharded
from jax.sharding import PartitionSpec as P
from tiers import full_but

from jax_ring import (
    _compat,
    ring_all_gather,
    ring_all_to_all,
    ring_broadcast,
    ring_pmax,
    ring_pmean,
    ring_ppermute,
    ring_psum,
    ring_psum_scatter,
    ring_reduce,
)
from jax_ring.lowering import plan
from jax_ring.lowering.passes import combiner, merge_equations, pipeline, program_id

RANKS = 4
MESH = make_mesh((RANKS,))
TREE = [
    np.random.default_rng(i).standard_normal((RANKS * 2, 1 + i)).astype(dtype)
    for i, dtype in enumerate([np.float32] * 3 + [jnp.bfloat16] * 2)
]
psum = partial(ring_psum, axis_name="i")


def lowered(body, monkeypatch, tree=TREE, **options) -> int:
    """How many calls `body` lowers one by one."""
    seen, lower = [], plan.plan_call
    monkeypatch.setattr(plan, "plan_call", lambda *args: seen.append(args) or lower(*args))
    monkeypatch.setattr(_compat, "once", lambda ctx, key, compute, *args: compute(*args))
    sharded(body, mesh=MESH, **{"check_vma": False, **options}).lower(tree)
    monkeypatch.undo()
    return len(seen)


def check(body, monkeypatch, *, num_lowered, tree=TREE, **options):
    """Asserts how many calls are lowered one by one, and that joining changes no result."""
    assert lowered(body, monkeypatch, tree, **options) == num_lowered
    make = lambda: sharded(body, mesh=MESH, **{"check_vma": False, **options})  # noqa: E731
    results = make()(tree)
    monkeypatch.setattr(merge_equations, "join", lambda jaxpr: jaxpr)
    assert_same_bits(results, make()(tree))
    monkeypatch.undo()


def test_the_leaves_of_a_tree_are_one_equation_for_each_dtype(check_vma, monkeypatch):
    check(lambda t: jax.tree.map(psum, t), monkeypatch, num_lowered=2, check_vma=check_vma, out_specs=P())


def test_means_and_what_is_between(monkeypatch):
    """Divisions stand between the sums and use them; the sums move in front of those."""
    check(lambda t: jax.tree.map(lambda x: ring_pmean(x, "i"), t), monkeypatch, num_lowered=2)


def test_a_sum_of_a_sum_comes_after_it(monkeypatch):
    check(lambda t: jax.tree.map(lambda x: psum(psum(x) / RANKS), t[:3]), monkeypatch, num_lowered=4)


def test_operands_that_come_later_are_left_to_the_combiner(monkeypatch):
    def body(t):
        return [psum(jnp.sin(x)) for x in t[:3]]

    check(body, monkeypatch, num_lowered=3)
    assert num_calls(sharded(body, mesh=MESH, check_vma=False), TREE) == 1


def test_what_may_be_equal_is_left_to_the_combiner(monkeypatch):
    """It sends equal operands once."""

    def body(t):
        operands = [jnp.sin(t[0]), jnp.sin(t[0]), t[1], t[1]]
        return [psum(x) for x in operands]

    check(body, monkeypatch, num_lowered=3)
    text = sharded(body, mesh=MESH, check_vma=False).lower(TREE).as_text()
    (line,) = (line for line in text.splitlines() if "@jax_ring_all_reduce" in line)
    assert line.split("->")[1].count("tensor<") == 2


def test_calls_of_other_lines_scopes_and_options_stay_apart(monkeypatch):
    def body(t):
        x, y, z = t[:3]
        sums = psum(x), psum(y)
        sums += (psum(z),)
        for i, value in enumerate((x, y)):
            with jax.named_scope(f"scope{i}"):
                sums += (psum(value * 2),)
        return sums, [ring_psum(each, "i", order=order) for each, order in ((x, "rank"), (y, "ring"))]

    check(body, monkeypatch, num_lowered=7)


def test_sums_and_maxima_stay_apart(monkeypatch):
    check(lambda t: [f(x, "i") for x in t[:2] for f in (ring_psum, ring_pmax)], monkeypatch, num_lowered=2)


FAMILY = {
    "psum_scatter": partial(ring_psum_scatter, axis_name="i", tiled=True),
    "psum_scatter, ring order": partial(ring_psum_scatter, axis_name="i", scatter_dimension=1, order="ring"),
    "all_gather": partial(ring_all_gather, axis_name="i"),
    "all_gather, tiled": partial(ring_all_gather, axis_name="i", axis=1, tiled=True),
    "all_to_all": partial(ring_all_to_all, axis_name="i", split_axis=0, concat_axis=1, tiled=True),
    "ppermute": partial(ring_ppermute, axis_name="i", perm=[(0, 1), (1, 0), (2, 3)]),
    "broadcast": partial(ring_broadcast, axis_name="i", root=2),
    "reduce": partial(ring_reduce, axis_name="i", root=1),
}


@pytest.mark.parametrize("name", FAMILY)
def test_other_collectives(name, monkeypatch):
    tree = [
        jnp.asarray(np.random.default_rng(i).standard_normal((RANKS**2, RANKS)), leaf.dtype)
        for i, leaf in enumerate(TREE)
    ]
    check(lambda t: jax.tree.map(FAMILY[name], t), monkeypatch, num_lowered=2, tree=tree)


def test_other_dimensions_and_ranks_stay_apart(monkeypatch):
    def body(t):
        x, y = t
        gathered = [ring_all_gather(each, "i", axis=axis) for each, axis in ((x, 0), (y, 1))]
        sent = [ring_broadcast(each, "i", root=root) for each, root in ((x, 0), (y, 1))]
        return gathered, sent, [ring_ppermute(each, "i", [(i, 3)]) for i, each in enumerate(t)]

    check(body, monkeypatch, num_lowered=6, tree=TREE[:2])


def test_the_bytes_of_a_gather_are_those_of_its_results(monkeypatch):
    tree = [np.ones((RANKS, 2), np.float32) * i for i in range(6)]
    for limit, expected in ((16 * RANKS, 3), (16, 6)):
        with monkeypatch.context() as patch:
            patch.setattr(combiner, "COMBINE_THRESHOLD_BYTES", limit)
            check(lambda t: jax.tree.map(FAMILY["all_gather"], t), patch, num_lowered=expected, tree=tree)


def test_limits(monkeypatch):
    tree = [np.ones((RANKS, 2), np.float32) * i for i in range(6)]
    for name, limit, expected in (("BYTES", 16, 3), ("COUNT", 4, 2), ("COUNT", 1, 6)):
        with monkeypatch.context() as patch:
            patch.setattr(combiner, f"COMBINE_THRESHOLD_{name}", limit)
            mapped = sharded(lambda t: jax.tree.map(psum, t), mesh=MESH, check_vma=False)
            assert num_calls(mapped, tree) == expected


def test_trees_count_by_their_leaves(monkeypatch):
    monkeypatch.setattr(combiner, "COMBINE_THRESHOLD_COUNT", 3)
    f = sharded(lambda t: (psum(t[:2]), psum(t[2])), mesh=MESH, check_vma=False)
    assert num_calls(f, TREE) == 1
    monkeypatch.setattr(combiner, "COMBINE_THRESHOLD_COUNT", 2)
    f = sharded(lambda t: (psum(t[:2]), psum(t[2])), mesh=MESH, check_vma=False)
    assert num_calls(f, TREE) == 2


def test_several_processes_do_not_look_at_lines(monkeypatch):
    """Each joins the same operands in the same order, though their lines may differ."""
    before = jax.make_jaxpr(lambda t: jax.tree.map(psum, t), axis_env=[("i", RANKS)])(TREE).jaxpr
    lower = pipeline.rule(lambda ctx, jaxpr: [jaxpr])
    ctx = types.SimpleNamespace(traceback=None, module_context=types.SimpleNamespace(cached_primitive_lowerings={}))
    monkeypatch.setattr(program_id, "note_body", lambda *args: None)
    for processes, num_equations in ((1, 2), (2, 5)):
        monkeypatch.setattr(jax, "process_count", lambda count=processes: count)
        (jaxpr,) = lower(ctx, jaxpr=before)
        assert len(jaxpr.eqns) == num_equations


@pytest.mark.parametrize("seed", full_but(range(6), [0]))
def test_random_programs(seed, monkeypatch):
    """Sums of what is there, in any order, of results of others too."""
    rng = np.random.default_rng(seed)
    steps = [(rng.integers(3), rng.integers(10), rng.integers(10)) for _ in range(20)]

    def body(t):
        values = [x[:1, :1] for x in t[:3]]
        for kind, a, b in steps:
            left, right = values[a % len(values)], values[b % len(values)]
            if kind == 0:
                values.append(left * 0.5 + right)
            else:
                values.append(psum(left) / RANKS)
        return values

    make = lambda: sharded(body, mesh=MESH, check_vma=False)  # noqa: E731
    results = make()(TREE)
    monkeypatch.setattr(merge_equations, "join", lambda jaxpr: jaxpr)
    assert_same_bits(results, make()(TREE))
