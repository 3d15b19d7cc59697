"""The simulator agrees with the closed-form costs, and the cost model with the measurements."""

import pathlib
from dataclasses import astuple, replace

import chex
import numpy as np
import pytest
from model import cost, fit, simulator, topology
from model.simulator import Conditions, simulate

pytestmark = pytest.mark.one_pair  # does not depend on JAX's version

MEASURED = pathlib.Path(__file__).parents[2] / "benchmarks/results/cpu-2-cores"
ONE_HOST = topology.Topology("one host", 1 << 20, 1e-6, 1e9, 5e-6, 1, 5e8, fold_bandwidth=4e9)
HOSTS = replace(ONE_HOST, ranks_per_host=4, nics_per_host=4)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 7, 8, 15, 31, 64, 100])
@pytest.mark.parametrize("n", [0, 1e3, 1e9])
def test_closed_forms(p, n):
    for name, formula in cost.FORMULAS.items():
        for pieces in (1, 4, 64, 300) if name in ("rank_ordered_ring", "double_tree") else (None,):
            expected = formula(p, n, *([] if pieces is None else [pieces])).seconds(ONE_HOST.host_link())
            simulated = simulate(name, p, n, ONE_HOST, pieces=pieces).max()
            assert simulated == pytest.approx(expected, rel=1e-9), (name, pieces)


def test_closed_form_of_two_levels():
    for p in (4, 8, 64, 4096):
        expected = cost.two_level_seconds(p, 1e6, 4, HOSTS.host_link(), HOSTS.network_link())
        assert simulate("two_level", p, 1e6, HOSTS).max() == pytest.approx(expected, rel=1e-9)


def test_a_ring_over_hosts_waits_for_its_slowest_hop():
    expected = cost.ring(12, 1e6).seconds(HOSTS.network_link())
    assert simulate("ring", 12, 1e6, HOSTS).max() == pytest.approx(expected, rel=1e-9)
    # The shortcut for zero jitter gives the same result as simulating each step.
    machine = simulator.Machine(HOSTS, 12, Conditions())
    round_ = simulator.Rings((12, 1), 0, 1e6 / 12, True, 11)
    stepped = round_.step_by_step(np.zeros(12), round_.hop(machine), machine)
    assert stepped.max() == pytest.approx(round_.done(np.zeros(12), machine).max(), rel=1e-9)
    assert stepped.min() < stepped.max()


def test_jitter_is_worse_than_its_mean():
    # Each step waits for the later of two ranks. The longest path through n exponential delays of mean 1 has length 2n
    # (last-passage percolation from a line: Johansson, Comm. Math. Phys. 209, 2000).
    p, jitter = 4096, 1e-3
    ideal = simulate("ring", p, 0, ONE_HOST).max()
    delayed = simulate("ring", p, 0, ONE_HOST, Conditions(jitter=jitter)).max()
    assert (delayed - ideal) / (2 * (p - 1) * jitter) == pytest.approx(2, rel=0.02)


def test_one_straggler_slows_down_the_ring():
    ideal = simulate("ring", 64, 1e6, ONE_HOST).max()
    assert simulate("ring", 64, 1e6, ONE_HOST, Conditions(stragglers=1, slowdown=3)).max() == pytest.approx(3 * ideal)


def test_all_ranks_wait_for_the_last_one():
    for name in simulator.PHASES:
        done = simulate(name, 8, 1e3, HOSTS, ready=np.array([0] * 7 + [1.0]))
        assert done.min() > 1, name
        np.testing.assert_allclose(done.max(), 1 + simulate(name, 8, 1e3, HOSTS).max(), rtol=1e-4)


def test_launch_latency_is_added():
    late = replace(HOSTS, launch_latency=1e-3)
    for name in simulator.PHASES:
        assert simulate(name, 8, 1e3, late) == pytest.approx(simulate(name, 8, 1e3, HOSTS) + 1e-3)


def test_messages_share_links():
    source, to = np.array([0, 1, 2, 3]), np.array([4, 5, 6, 7])
    own_nics = HOSTS.seconds(source, to, 1e6)
    np.testing.assert_allclose(own_nics, 5e-6 + 1e6 / 5e8)
    np.testing.assert_allclose(replace(HOSTS, nics_per_host=1).seconds(source, to, 1e6), 5e-6 + 4e6 / 5e8)
    # Striped over all NICs, a message is limited by the sum of the four, or by the bandwidth within the host.
    striped = replace(HOSTS, striped=True, host_bandwidth=9e9)
    np.testing.assert_allclose(striped.seconds(source[:1], to[:1], 1e6), 5e-6 + 1e6 / 2e9)
    striped = replace(HOSTS, striped=True, host_bandwidth=1e9)
    np.testing.assert_allclose(striped.seconds(source[:1], to[:1], 1e6), 5e-6 + 1e6 / 1e9)
    # Two hosts per leaf switch, whose uplink has a quarter of their bandwidth and carries eight messages.
    tree = replace(HOSTS, hosts_per_group=2, oversubscription=4.0)
    np.testing.assert_allclose(tree.seconds(source, to, 1e6), own_nics)
    np.testing.assert_allclose(tree.seconds(np.arange(8), np.arange(8, 16), 1e6), 5e-6 + 8e6 / (8 * 5e8 / 4))
    # The leaf switch of a rail connects the NICs with the same index. Messages to another rail go through the spine.
    rails = replace(HOSTS, hosts_per_group=2, oversubscription=4.0, rails=True)
    np.testing.assert_allclose(rails.seconds(source, to, 1e6), own_nics)
    np.testing.assert_allclose(rails.seconds(source[:1], to[1:2], 1e6), 5e-6 + 1e6 / (2 * 5e8 / 4))
    bridge = replace(HOSTS, shared_bandwidth=1e9)
    np.testing.assert_allclose(bridge.seconds(np.arange(4), (np.arange(4) + 1) % 4, 1e6), 1e-6 + 4e6 / 1e9)


@pytest.mark.parametrize("name", topology.names())
def test_all_algorithms_run_on_all_topologies(name):
    described = topology.load(name)
    p = 4 * described.ranks_per_host
    times = {a: simulate(a, p, 1 << 20, described, Conditions(1e-6, 2)).max() for a in simulator.PHASES}
    assert all(0 < seconds < 1 for seconds in times.values())
    assert times["two_level"] < times["ring"]


def test_a_hundred_thousand_ranks():
    hosts = topology.load("nvswitch8")
    ring = simulate("ring", 100_000, 1 << 30, hosts)
    two_level = simulate("two_level_tree", 100_000, 1 << 30, hosts)
    chex.assert_shape([ring, two_level], (100_000,))
    assert ring.max() > 2 * (100_000 - 1) * hosts.network_latency
    assert two_level.max() < ring.max() / 50


def test_errors(tmp_path):
    with pytest.raises(ValueError, match="no algorithm 'rnig': choose one of ring, "):
        simulate("rnig", 8, 8, HOSTS)
    with pytest.raises(ValueError, match="6 ranks do not fill hosts of 4; give a multiple of 4"):
        simulate("two_level", 6, 8, HOSTS)
    with pytest.raises(ValueError, match="all pairs of 5000 ranks are too many"):
        simulate("one_shot", 5000, 8, HOSTS)
    with pytest.raises(ValueError, match=r"no topology 'nvl73': choose one of fat_tree_4to1, .*nvl72"):
        topology.load("nvl73")
    file = tmp_path / "mine.toml"
    text = (
        'name = "mine"\n[host]\nranks = 2\nlatency_us = 1\ngb_per_s = 1\n[network]\nlatency_us = 1\nnics_per_host = 1\n'
    )
    for line, message in (
        ("", "has no 'network.nic_gb_per_s'"),
        ("nic_gb_per_s = 1\nnics = 2", "unknown keys .'network.nics'."),
        ("nic_gb_per_s = -1", "nic_bandwidth must be positive"),
        ("nic_gb_per_s = 1\n[extra]\nlaunch_us = 1", "unknown keys .'extra'."),
    ):
        file.write_text(text + line)
        with pytest.raises(ValueError, match=message):
            topology.load(str(file))
    file.write_text("launch_us = -1\n" + text + "nic_gb_per_s = 1")
    with pytest.raises(ValueError, match="launch_latency must not be negative"):
        topology.load(str(file))


def test_the_cost_model_by_hand():
    model = fit.Model(2e-6, 1e-6, 2e-11, 6e-11, 1e7)
    assert model.seconds(4, 1e6) == pytest.approx(2e-6 + 4e-6 + 4e6 * 2e-11)
    assert model.seconds(4, 1e7) == pytest.approx(2e-6 + 4e-6 + 1e7 * 2e-11 + 3e7 * 6e-11)


def test_fit_recovers_the_parameters():
    model = fit.Model(2e-6, 1e-6, 2e-11, 6e-11, float(1 << 24))
    cases = [(p, n) for p in (2, 4, 8) for n in (16, 4096, 1 << 16, 1 << 20, 1 << 22, 1 << 24)]
    found = fit.fit([fit.Measurement(p, n, model.seconds(p, n)) for p, n in cases])
    assert astuple(found) == pytest.approx(astuple(model))


def test_the_model_predicts_held_out_device_counts():
    measured = fit.read(sorted(MEASURED.glob("allreduce-p*.json")))
    assert sorted({m.num_ranks for m in measured}) == [2, 4, 8, 16]
    held_out = fit.leave_out_each(measured)
    errors = np.abs(np.concatenate([errors for _, errors in held_out.values()]))
    assert len(errors) == len(measured)
    assert np.median(errors) < 0.15


def test_fit_needs_measurements():
    with pytest.raises(ValueError, match="the measurements have no in_loop of nobody in float32"):
        fit.read(MEASURED.glob("allreduce-p2-1.json"), implementation="nobody")
    with pytest.raises(ValueError, match=r"is no file of benchmarks/allreduce\.py --json"):
        fit.read([__file__])
    with pytest.raises(ValueError, match="got 1 measurements, at least 5"):
        fit.fit([fit.Measurement(2, 4, 1e-6)])
