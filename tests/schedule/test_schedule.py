"""Every schedule is an all-reduce, sends as many bytes as its formula says, and folds in its specified order."""

from functools import partial

import numpy as np
import pytest
from model import cost, schedules
from model.interpreter import run as run_schedule
from model.schedules import double_binary_tree
from tiers import full_but

from jax_ring import _ffi_cpu

pytestmark = pytest.mark.one_pair  # does not depend on JAX's version

# Every small number, and larger ones around powers of two, with many and with few divisors.
RANKS = full_but([*range(1, 10), 12, 15, 16, 17, 24, 31, 33, 36, 48, 64], [1, 2, 3, 5, 8, 12, 17])


def variants(p):
    """All schedules for p ranks, with their options."""
    for name, algorithm in schedules.ALGORITHMS.items():
        if name != "two_level":
            yield name, algorithm
    if p <= 20:
        yield "ring in 3 pieces", partial(schedules.ring, pieces=3)
        yield "tree in 4 pieces", partial(schedules.double_tree, pieces=4)
        yield "chain with the shortest lag", partial(schedules.rank_ordered_ring, pieces=5, lag=1)
    for i, ranks_per_host in enumerate(d for d in range(1, p) if p % d == 0):
        between = (schedules.ring, schedules.double_tree)[(i + p) % 2]
        name = f"hosts of {ranks_per_host}, {between.__name__} between them"
        yield name, partial(schedules.two_level, ranks_per_host=ranks_per_host, between=between)


@pytest.mark.parametrize("p", RANKS)
def test_all_ranks_get_the_sum(p):
    # Blocks of two sizes, and fewer elements than ranks.
    for n in (p + 1, p // 2):
        inputs = np.random.default_rng(p).integers(-99, 99, (p, n))
        for name, algorithm in variants(p):
            outputs = run_schedule(algorithm, inputs).outputs
            np.testing.assert_array_equal(outputs, np.broadcast_to(inputs.sum(0), (p, n)), err_msg=name)


@pytest.mark.parametrize("p", RANKS)
def test_steps_and_bytes_match_the_formulas(p):
    n = 64 * p
    power = 1 << (p.bit_length() - 1)
    inputs = np.zeros((p, n), np.int8)

    def counted(name, **options):
        return run_schedule(partial(schedules.ALGORITHMS[name], **options), inputs)

    for name in ("ring", "one_shot", "two_shot"):
        run, terms = counted(name), cost.FORMULAS[name](p, n)
        assert run.bytes_sent() == run.bytes_received() == [terms.sent] * p, name
        assert run.steps == terms.steps, name
    for half in (schedules.reduce_scatter, schedules.all_gather):
        run, terms = run_schedule(half, inputs), getattr(cost, half.__name__)(p, n)
        assert (set(run.bytes_sent()), run.steps) == ({terms.sent}, terms.steps)

    run, terms = counted("halving_doubling"), cost.halving_doubling(p, n)
    if p == power:
        assert run.bytes_sent() == [terms.sent] * p
    else:
        # In the extra first step, a rank on the critical path receives one message more and sends one less.
        odd = 2 * n * (power - 1) // power + n
        assert max(run.bytes_sent()) == max(run.bytes_received()) == odd == terms.sent - n
    assert run.steps == terms.steps

    for pieces in (1, 3, 16):
        run = counted("rank_ordered_ring", pieces=pieces, lag=p)
        assert run.steps == cost.rank_ordered_ring(p, n, pieces).steps
        assert max(run.bytes_sent()) == (0 if p == 1 else n if p == 2 else 2 * n)

    run = counted("double_tree")
    assert run.steps == cost.double_tree(p, n).steps
    assert sum(run.bytes_sent()) == 2 * (p - 1) * n
    assert max(run.bytes_sent()) == max(run.bytes_received()) == {1: 0, 2: n, 3: 3 * n // 2}.get(p, 2 * n)


@pytest.mark.parametrize("p", full_but([2, 3, 8, 13], [2, 3, 8]))
def test_total_traffic_is_minimal_for_any_size(p):
    for n in (1, p - 1, p, 7 * p + 3):
        for name in ("ring", "rank_ordered_ring", "two_shot", "double_tree", "halving_doubling"):
            run = run_schedule(schedules.ALGORITHMS[name], np.zeros((p, n), np.int8))
            assert sum(run.bytes_sent()) == 2 * (p - 1) * n, name


def test_a_ring_loads_its_links_equally():
    links = run_schedule(schedules.ring, np.zeros((6, 60), np.int8)).bytes_per_link()
    assert links == {(r, (r + 1) % 6): 2 * 5 * 10 for r in range(6)}


def test_two_levels_send_a_shard_between_hosts():
    hosts, on_host, n = 4, 8, 320
    algorithm = partial(schedules.two_level, ranks_per_host=on_host)
    run = run_schedule(algorithm, np.zeros((hosts * on_host, n), np.int8))
    between = sum(count for (a, b), count in run.bytes_per_link().items() if a // on_host != b // on_host)
    assert between == hosts * on_host * cost.ring(hosts, n / on_host).sent
    assert run.steps == 2 * (on_host - 1) + 2 * (hosts - 1)


def fold_order(algorithm, p):
    """The order of the fold of each of p blocks, as a parenthesized expression."""

    def join(a, b):
        return np.array([f"({x}{y})" for x, y in zip(a, b, strict=True)], object)

    run = run_schedule(algorithm, [np.array([f"{rank}"] * p, object) for rank in range(p)], join)
    assert all((output == run.outputs[0]).all() for output in run.outputs)
    return list(run.outputs[0])


def test_fold_order():
    in_order = ["(((01)2)3)"] * 4
    for name in ("rank_ordered_ring", "one_shot", "two_shot"):
        assert fold_order(schedules.ALGORITHMS[name], 4) == in_order
    assert fold_order(schedules.ring, 4) == ["(((12)3)0)", "(((23)0)1)", "(((30)1)2)", "(((01)2)3)"]
    assert fold_order(schedules.halving_doubling, 4) == ["((01)(23))"] * 4
    assert fold_order(schedules.halving_doubling, 5) == ["(((01)2)(34))"] * 5
    assert fold_order(schedules.double_tree, 6) == ["((((01)2)3)(45))"] * 3 + ["(((01)2)((34)5))"] * 3


@pytest.mark.parametrize("p", full_but(range(2, 40), [2, 3, 5, 8, 12, 17]))
def test_no_rank_is_an_inner_node_of_both_trees(p):
    for first, second in zip(*double_binary_tree(p), strict=True):
        assert not first.children or not second.children
        assert len(first.children) <= 2


def native_events(p, rank, blocks, pieces, *, rank_order, lag):
    """The receives and sends of the ring of the native engine, in its order."""
    left, right = (rank - 1) % p, (rank + 1) % p
    for chunk, hop in _ffi_cpu.ring_hops(rank_order, p, rank, pieces if rank_order else p * pieces, lag):
        where = blocks[chunk] if rank_order else blocks[chunk % p * pieces + chunk // p]
        if hop > 0:
            yield "receive", where, (left, rank) if hop < p else (left,)
        if hop < 2 * p - 2:
            yield "send", where, right


def events(steps):
    for step in steps:
        yield from (("receive", tuple(receive.chunk), receive.sources) for receive in step.receives)
        yield from (("send", tuple(send.chunk), send.to) for send in step.sends)


@pytest.mark.parametrize("p", full_but([*range(2, 17), 32, 64], [2, 3, 5, 8, 12]))
def test_the_native_ring_follows_the_same_schedule(p):
    for rank in range(p):
        for pieces in (1, 3):
            blocks = [(i, i + 1) for i in range(p * pieces)]
            ours = schedules.ring(p, p * pieces, rank, pieces=pieces)
            assert list(events(ours)) == list(native_events(p, rank, blocks, pieces, rank_order=False, lag=7))
        for pieces, lag in ((1, 7), (20, 7), (20, 1)):
            blocks = [(i, i + 1) for i in range(pieces)]
            ours = schedules.rank_ordered_ring(p, pieces, rank, pieces=pieces, lag=lag)
            assert list(events(ours)) == list(native_events(p, rank, blocks, pieces, rank_order=True, lag=lag))


def test_errors():
    with pytest.raises(ValueError, match="rank 4 of 4"):
        schedules.ring(4, 8, 4)
    with pytest.raises(ValueError, match="6 ranks do not fill hosts of 4; give a divisor of 6"):
        schedules.two_level(6, 8, 0, ranks_per_host=4)
    with pytest.raises(RuntimeError, match="wait for messages that were not sent"):
        run_schedule(lambda p, n, rank: schedules.ring(p, n, rank) if rank == 0 else [], np.zeros((2, 4)))
