"""What is recorded of the calls of one process: the last ones, and the statistics of all."""

import os
import pathlib
import re
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import pytest
from helpers import make_mesh, run_python, sharded
from jax import lax
from jax.sharding import PartitionSpec as P

import jax_ring
from jax_ring import (
    ring_all_gather,
    ring_all_to_all,
    ring_pbroadcast,
    ring_ppermute,
    ring_psum,
    ring_ragged_all_to_all,
    runtime,
)

pytestmark = pytest.mark.one_pair  # native code

# In a process of its own: the recorder names the first 4095 different calls of a process, and one worker's tests may
# have made as many before. Calls that other tests have launched and not awaited would be counted as well.
OWN_PROCESS = pytest.mark.jax_processes(1, devices=8)


@OWN_PROCESS
def test_records_the_last_256_calls_in_order():
    def body(x, _):
        return ring_psum(x * 0.5, "i"), None

    before = jax_ring.flight_recorder().calls
    sharded(lambda x: lax.scan(body, x, None, length=300)[0], check_vma=False)(jnp.ones(8)).block_until_ready()
    calls = jax_ring.flight_recorder().calls
    assert len(calls) == 256
    assert calls[-1].sequence == 300 + (before[-1].sequence if before else 0)
    assert [call.sequence for call in calls] == list(range(calls[0].sequence, calls[-1].sequence + 1))
    last = calls[-1]
    assert last.call.startswith("ring_psum of float32[1] over axis 'i', called at ")
    assert "test_flight_recorder.py:" in last.call
    assert last.state == "done"
    assert last.ranks_here == tuple(range(8))
    assert last.last in range(8)
    assert last.entered_ago >= last.ready_ago >= last.ended_ago > 0


@OWN_PROCESS
def test_each_group_has_a_call_of_its_own():
    mesh = make_mesh((2, 4), ("i", "j"))
    f = sharded(lambda x: ring_psum(x, "j"), mesh=mesh, in_specs=P("i", "j"), out_specs=P("i"))
    f(jnp.ones((2, 36))).block_until_ready()
    calls = jax_ring.flight_recorder().calls
    assert sorted(call.group for call in calls) == [0, 1]
    assert all(call.ranks_here == (0, 1, 2, 3) for call in calls)
    assert all("float32[1,9]" in call.call for call in calls)
    (of_call,) = jax_ring.statistics().calls
    assert "float32[1,9]" in of_call.call
    assert (of_call.count, of_call.num_ranks, of_call.bytes_per_rank) == (2, 4, 36)
    assert {late.position < 4 for late in of_call.late} == {True, False}


@OWN_PROCESS
def test_statistics_count_bytes_and_start_anew(monkeypatch):
    # From elsewhere paths are longer, and one that does not fit a line is not broken.
    monkeypatch.chdir(pathlib.Path(__file__).parents[2])

    def f(x):
        return ring_all_gather(x, "i", tiled=True), ring_psum(x, "i")

    step = sharded(f, out_specs=(P("i"), P("i")), check_vma=False)
    jax_ring.statistics(reset=True)
    for _ in range(3):
        jax.block_until_ready(step(jnp.ones(8 * 77)))
    statistics = jax_ring.statistics(reset=True)
    by_kind = {each.kind: each for each in statistics.calls}
    assert by_kind.keys() == {"all_gather", "all_reduce"}
    for kind, bus_bytes in {"all_gather": 7 * 308, "all_reduce": 2 * 7 / 8 * 308}.items():
        each = by_kind[kind]
        assert (each.count, each.failures, each.num_ranks, each.bytes_per_rank) == (3, 0, 8, 308)
        assert each.bytes == 3 * 308
        assert each.busy > 0
        assert each.bus_bandwidth == pytest.approx(3 * bus_bytes / each.busy)
        assert sum(late.count for late in each.late) == 3
        assert sum(late.seconds for late in each.late) <= each.waited
    assert sum(late.count for late in statistics.late) == 6
    assert "came last" in str(statistics)
    assert "ring_all_gather of float32[77]" in str(statistics)
    assert max(map(len, str(statistics).splitlines())) <= 80
    assert "called at tests/inspect/test_flight_recorder.py:" in " ".join(str(statistics).split())
    # Joined calls with the same first operands, on the same line.
    for size in (77, 99):
        step = sharded(lambda tree: jax.tree.map(lambda x: ring_psum(x, "i"), tree))
        jax.block_until_ready(step([jnp.ones(8)] * 4 + [jnp.ones(8 * size)]))
    (each,) = jax_ring.statistics(reset=True).calls
    assert (each.count, each.bytes, each.bytes_per_rank) == (2, 4 * (81 + 103), 4 * 92)
    assert jax_ring.statistics().calls == ()
    assert "no calls" in str(jax_ring.statistics())


@OWN_PROCESS
def test_statistics_have_a_row_of_each_kind():
    def body(x):
        x = ring_ppermute(x, "i", [(0, 1)])
        x = ring_pbroadcast(ring_all_to_all(x, "i", 0, 0, tiled=True), "i", 2)
        begins, ones, to = jnp.arange(8), jnp.ones(8, int), jnp.full(8, lax.axis_index("i"))
        return ring_ragged_all_to_all(x, x, begins, ones, to, ones, axis_name="i")  # gathers the sizes first

    jax.block_until_ready(sharded(body, check_vma=False)(jnp.ones(64)))
    counts = {call.kind: call.count for call in jax_ring.statistics().calls}
    kinds = ("permute", "all_to_all", "broadcast", "all_gather", "ragged_all_to_all")
    assert counts == dict.fromkeys(kinds, 1)


@OWN_PROCESS
def test_at_most_ten_rows_are_printed():
    jax_ring.statistics(reset=True)
    for size in range(1, 13):
        sharded(lambda x: ring_psum(x, "i"))(jnp.ones(8 * size)).block_until_ready()
    text = str(jax_ring.statistics(reset=True))
    assert text.count("ring_psum of float32") == 10
    assert "... 2 more in .calls" in text


@OWN_PROCESS
def test_the_straggler_is_named():
    def until_all_others_wait(x):  # however slow they are
        until = time.monotonic() + 60
        while all(call.ranks_here != (0, 1, 2, 3, 4, 6, 7) for call in jax_ring.flight_recorder().calls):
            assert time.monotonic() < until, jax_ring.flight_recorder()
            time.sleep(0.001)
        return x

    def f(x):
        x = lax.cond(lax.axis_index("i") == 5, lambda x: jax.pure_callback(until_all_others_wait, x, x), lambda x: x, x)
        return ring_psum(x, "i")

    step = sharded(f, check_vma=False)
    step(jnp.ones(32)).block_until_ready()
    jax_ring.statistics(reset=True)
    for _ in range(3):
        step(jnp.ones(32)).block_until_ready()
    statistics = jax_ring.statistics()
    assert (statistics.late[0].process, statistics.late[0].position) == (0, 5)
    assert statistics.late[0].count == 3
    assert statistics.calls[0].late[0] == statistics.late[0]


MISSING = """
import sys
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P
import jax_ring
from jax_ring import ring_psum, ring_pmax

mesh = Mesh(jax.devices(), ("i",))

def skipped_by_3(x):
    x = ring_pmax(x, "i")
    return lax.cond(lax.axis_index("i") == 3, lambda x: x, lambda x: ring_psum(x, "i"), x)

f = jax.jit(jax.shard_map(skipped_by_3, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False))
for _ in range(2):
    try:
        f(jnp.ones(8)).block_until_ready()
    except jax.errors.JaxRuntimeError as error:
        print(error)
print(jax_ring.flight_recorder())
print(len(jax_ring.flight_recorder().calls), [call.failures for call in jax_ring.statistics().calls])
"""


def test_a_failure_says_what_the_missing_rank_did_last():
    result = run_python(MISSING, JAX_RING_TIMEOUT_S="1")
    assert result.returncode == 0, result.stderr
    assert " Last calls: mesh position 3: no call since ring_pmax of float32[1] over axis 'i'" in result.stdout
    # Once per process, however often a call fails.
    assert result.stderr.count("jax_ring: the last calls") == 1
    # With the error, which nobody sees who does not await the result.
    assert result.stderr.count("7 of 8 ranks arrived") == 1
    table = result.stderr[result.stderr.index("jax_ring: the last calls") :].splitlines()
    assert table[1].startswith("  ring_pmax")
    assert re.fullmatch(r"      mesh positions 0-7: done \d\.\d+ s ago", table[2])
    assert table[3].startswith("> ring_psum")
    assert re.fullmatch(r"      mesh positions 0-2, 4-7: waits, \d\.\d+ s; mesh position 3: NOT MADE", table[4])
    # On demand, after the failure.
    assert result.stdout.count("> ring_psum") == 2
    assert "failed" in result.stdout


@pytest.mark.full
def test_it_can_be_turned_off():
    result = run_python(MISSING, JAX_RING_TIMEOUT_S="1", JAX_RING_RECORDER="0")
    assert result.returncode == 0, result.stderr
    assert "7 of 8 ranks arrived" in result.stdout
    assert "Last calls" not in result.stdout
    assert "the last calls" not in result.stderr
    assert result.stdout.splitlines()[-1] == "0 []"
    assert runtime.recorder_from("")
    with pytest.raises(ValueError, match=r"JAX_RING_RECORDER must be 0 .* or 1, the default; got 'no'"):
        runtime.recorder_from("no")


@OWN_PROCESS
def test_tables_of_running_processes():
    ring_psum_here = sharded(lambda x: ring_psum(x, "i"))(jnp.ones(8 * 123))
    ring_psum_here.block_until_ready()
    shown = subprocess.run(
        [sys.executable, "-P", "-m", "jax_ring", "flight"],
        env=os.environ, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert shown.returncode == 0, shown.stderr
    own = [table for table in shown.stdout.split("\n\n") if f"pid {os.getpid()}\n" in table]
    assert len(own) == 1
    assert "ring_psum of float32[123]" in own[0]


@pytest.mark.parametrize("scope", ["sum of gradients", None])
def test_calls_have_the_users_name_in_compiled_programs(scope):
    def reduce_loss(x):
        if scope is None:
            return ring_psum(x, "i")
        with jax.named_scope("outer"), jax.named_scope(scope):
            return ring_psum(x, "i")

    text = sharded(reduce_loss).lower(jnp.ones(8)).compile().as_text()
    (call,) = [line for line in text.splitlines() if 'custom_call_target="jax_ring_all_reduce"' in line]
    name = "reduce_loss" if scope is None else "sum_of_gradients"
    assert call.split()[0].lstrip("%").startswith(f"{name}_ring_psum") or call.split()[1].startswith(
        f"%{name}_ring_psum"
    )


def test_profiles_show_the_users_name(tmp_path):
    if not hasattr(jax.profiler, "ProfileData"):
        pytest.skip("this JAX cannot read profiles")

    def step(x):
        with jax.named_scope("mean loss"):
            return jax_ring.ring_pmean(x, "i")

    f = sharded(step)
    f(jnp.ones(8)).block_until_ready()
    with jax.profiler.trace(str(tmp_path)):
        f(jnp.ones(8)).block_until_ready()
    (file,) = tmp_path.rglob("*.xplane.pb")
    planes = jax.profiler.ProfileData.from_file(str(file)).planes
    names = {event.name for plane in planes for line in plane.lines for event in line.events}
    assert any(name.startswith("mean_loss_ring_psum") for name in names)
