"""What processes know of each other's calls: which one is missing, also after it has died, and which one is late."""

import signal

from processes import Processes, run


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


def killed_in_step(signal_name):
    import os
    import signal

    import jax

    import jax_ring

    total, largest, x = _program()
    for _ in range(3):
        total(x).block_until_ready()
    largest(x).block_until_ready()
    if jax.process_index() == 2:
        os.kill(os.getpid(), getattr(signal, signal_name))
    try:
        total(x).block_until_ready()
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        print("error:", error)
    print(jax_ring.flight_recorder())
    calls = jax_ring.flight_recorder().calls
    print("recorded:", {p: [call.state for call in calls if call.process == p] for p in range(3)})
    print("over", flush=True)
    os._exit(0)


def check(stdout, stderr, others, *, states):
    """Asserts what a process prints that has waited for process 2."""
    (error,) = [line for line in stdout.splitlines() if line.startswith("error:")]
    sentence = error[error.index("Last calls: ") :]
    assert "ring_psum of float32[4] over axis 'i'" in sentence
    assert "process 2: no call since ring_pmax of float32[4] over axis 'i'" in sentence
    table = stderr[stderr.index("jax_ring: the last calls") :].splitlines()
    assert table[1].endswith("process 2"), table
    assert table[2].lstrip().startswith("3 times ring_psum"), table
    assert table[3].lstrip().startswith("ring_pmax"), table
    assert table[4].startswith("> ring_psum"), table
    assert table[4].endswith("NOT MADE"), table
    assert stderr.count("jax_ring: the last calls") == 1
    (recorded,) = [line for line in stdout.splitlines() if line.startswith("recorded:")]
    recorded = eval(recorded.removeprefix("recorded:"))
    assert recorded[2] == ["done"] * 4
    for process in others:
        assert recorded[process][:4] == ["done"] * 4
        assert recorded[process][4] in states


def test_the_calls_of_a_killed_process_are_printed_beside_those_of_the_others():
    options = {"arguments": ["SIGKILL"], "environment": {"JAX_RING_TIMEOUT_S": "60"}}
    with Processes(killed_in_step, 3, **options) as program:
        for process in (0, 1):
            program.wait_until(process, "over")
        for process in (0, 1):
            result = program.result(process)
            check(result.stdout, result.stderr, [0, 1], states=["failed", "ready"])
            assert "Process 2 (rank 2) has ended" in result.stdout


def test_the_calls_of_a_stopped_process():
    options = {"arguments": ["SIGSTOP"], "environment": {"JAX_RING_TIMEOUT_S": "2"}}
    with Processes(killed_in_step, 3, **options) as program:
        for process in (0, 1):
            program.wait_until(process, "over")
        result = program.result(0)
        check(result.stdout, result.stderr, [0, 1], states=["failed", "ready"])
        program.popen[2].send_signal(signal.SIGCONT)


def late_process():
    import time

    import jax
    import numpy as np
    from jax.sharding import Mesh
    from jax.sharding import PartitionSpec as P

    import jax_ring

    total, _, x = _program()
    total(x).block_until_ready()
    jax_ring.statistics(reset=True)
    for _ in range(5):
        if jax.process_index() == 1:
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


def test_every_process_knows_who_was_late():
    run(late_process, 2, devices_each=2)
