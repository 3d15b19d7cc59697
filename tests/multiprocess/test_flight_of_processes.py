"""What processes know of each other's calls: which one is missing, also after it has died, and which one is late."""

import pytest

from pytest_jax_ring import fault_point, kill, stop

pytestmark = [pytest.mark.full, pytest.mark.one_pair]  # jobs of several processes; native code and Python's


def _program():
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    import jax_ring

    mesh = Mesh(np.array(jax.devices()), ("i",))
    sharding = NamedSharding(mesh, P("i"))

    def jitted(f):
        return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False))

    x = jax.make_array_from_process_local_data(sharding, np.ones(4 * jax.local_device_count(), np.float32))
    return jitted(lambda x: jax_ring.ring_psum(x, "i")), jitted(lambda x: jax_ring.ring_pmax(x, "i")), x


def _states(processes) -> dict[int, list[str]]:
    import jax_ring

    calls = jax_ring.flight_recorder().calls
    return {process: [call.state for call in calls if call.process == process] for process in processes}


def check_what_is_known_without_process_2(capfd, deadline=60) -> str:
    """Process 2 does not make the last of five calls. Asserts what the others know; returns the error in words."""
    import time

    import jax

    from jax_ring import _ffi_cpu

    total, largest, x = _program()
    for _ in range(3):
        total(x).block_until_ready()
    largest(x).block_until_ready()
    _ffi_cpu.set_deadline(deadline)  # now that all have compiled, which takes them different times
    if jax.process_index() == 2:  # the others wait in the last call before it ends: whoever is first fails at once
        while not all({"ready", "failed"} & {*states[4:]} for states in _states((0, 1)).values()):
            time.sleep(0.001)
    fault_point("the last call")
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError)) as raised:
        total(x).block_until_ready()
    recorded = _states(range(3))
    assert recorded[2] == ["done"] * 4
    for process in (0, 1):
        assert recorded[process][:4] == ["done"] * 4
        assert recorded[process][4] in ("failed", "ready")
    error = str(raised.value)
    sentence = error[error.index("Last calls: ") :]
    assert "ring_psum of float32[4] over axis 'i'" in sentence
    assert "process 2: no call since ring_pmax of float32[4] over axis 'i'" in sentence
    stderr = capfd.readouterr().err
    table = stderr[stderr.index("jax_ring: the last calls") :].splitlines()
    assert table[1].startswith("  3 times ring_psum"), table
    assert table[3].startswith("  ring_pmax"), table
    assert table[5].startswith("> ring_psum"), table
    assert "process 2: NOT MADE" in "".join(table[6:]), table
    assert stderr.count("jax_ring: the last calls") == 1
    return error


@pytest.mark.jax_processes(3, faults=[kill(2, at="the last call")])
def test_the_calls_of_a_killed_process_are_printed_beside_those_of_the_others(capfd):
    assert "Process 2 (rank 2) has ended" in check_what_is_known_without_process_2(capfd)


@pytest.mark.jax_processes(3, faults=[stop(2, at="the last call")])
def test_the_calls_of_a_stopped_process(capfd):
    check_what_is_known_without_process_2(capfd, deadline=2)


@pytest.mark.jax_processes(2, devices=2)
def test_every_process_knows_who_was_late():
    import time

    import jax
    import numpy as np
    from jax.sharding import Mesh
    from jax.sharding import PartitionSpec as P

    import jax_ring

    total, _, x = _program()
    total(x).block_until_ready()
    jax_ring.statistics(reset=True)
    seen = set()
    for _ in range(5):
        if jax.process_index() == 1:
            # Both ranks of the other process wait from here on, however slow it is. A call that it waited in before may
            # not have ended there.
            while not (ready := {each.sequence for each in jax_ring.flight_recorder().calls
                                 if (each.process, each.state) == (0, "ready")} - seen):  # fmt: skip
                time.sleep(0.001)
            seen |= ready
            time.sleep(0.1)
        total(x).block_until_ready()
    statistics = jax_ring.statistics()
    (call,) = statistics.calls
    assert (call.count, call.num_ranks, call.bytes_per_rank) == (5, 4, 16), call
    late = {process: sum(each.seconds for each in call.late if each.process == process) for process in (0, 1)}
    assert late[1] > 0.4, statistics
    assert statistics.late[0].process == 1, statistics
    assert statistics.late[0].position in (2, 3), statistics
    # The process that waits, waits for the other; both see the same.
    assert call.waited > 0.4 if jax.process_index() == 0 else call.waited < late[1], statistics
    assert np.isfinite(call.bus_bandwidth)
    records = jax_ring.flight_recorder().calls
    assert {record.process for record in records} == {0, 1}
    own = [record for record in records if record.process == jax.process_index()]
    assert all(record.last in (2, 3) for record in own[-3:]), own

    # A group within each process, and groups of both.
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("process", "i"))

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=P(), out_specs=P("process"), check_vma=False)
    def f(x):
        return jax_ring.ring_psum(jax_ring.ring_psum(x, "i"), "process")

    jax_ring.statistics(reset=True)
    f(np.ones(3, np.float32)).block_until_ready()
    by_axis = {call.call.split("'")[1]: call for call in jax_ring.statistics().calls}
    within, between = by_axis["i"], by_axis["process"]
    assert (within.count, between.count) == (1, 2), (within, between)
    assert {late.process for late in within.late} == {jax.process_index()}
