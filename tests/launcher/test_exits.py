"""A process that ends has completed what it has launched, and is named where others wait for more."""

import os
import re
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from launches import run

from jax_ring.launcher.coordinator.client import Programs

# Arguments: the function that sums, the numbers of steps of processes 0 and 1, and what process 1 does at the end.
STEPS = """
import os, sys
import jax, jax.numpy as jnp, numpy as np
which, *counts, end = sys.argv[1:]
if which == "ring_psum":
    from jax_ring import ring_psum as psum
else:
    psum = jax.lax.psum
if which == "imported":
    import jax_ring
jax.distributed.initialize()
mesh, me = jax.make_mesh((jax.device_count(),), ("i",)), jax.process_index()
f = jax.jit(jax.shard_map(lambda x: psum(jnp.sort(x * 1.5), "i"), mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P()))
sharding = jax.NamedSharding(mesh, jax.P("i"))
x = jax.make_array_from_callback((mesh.size, 1 << 18), sharding, lambda i: np.ones((1, 1 << 18), np.float32))
for _ in range(int(counts[me])):
    y = f(x)
if me == 0:
    print(float(y.addressable_data(0)[0, 0]))
elif end == "drops the results":
    del y
elif end == "shuts down":
    jax.distributed.shutdown()
"""
OWN_HOSTS = "import os; os.environ['JAX_RING_HOST_ID'] = os.environ['JAX_PROCESS_ID']"


@pytest.mark.parametrize(
    ("which", "devices", "hosts", "end"),
    [
        ("lax.psum", 1, 1, ""),
        pytest.param("lax.psum", 2, 1, "drops the results", marks=pytest.mark.full),
        pytest.param("lax.psum", 1, 1, "shuts down", marks=pytest.mark.full),
        pytest.param("ring_psum", 1, 1, "drops the results", marks=pytest.mark.full),
        pytest.param("ring_psum", 2, 2, "", marks=pytest.mark.full),
        pytest.param("imported", 1, 1, "", marks=pytest.mark.full),
    ],
)
def test_steps_in_flight_at_exit_complete(script, which, devices, hosts, end):
    path = script(OWN_HOSTS * (hosts - 1) + STEPS)
    status, out, err = run("-n", "2", "--devices", str(devices), path, which, "12", "12", end)
    assert status == 0, err
    assert f"[0] {3.0 * devices}" in out


@pytest.mark.full
@pytest.mark.parametrize(("which", "hosts"), [("ring_psum", 1), ("ring_psum", 2), ("imported", 1)])
def test_a_process_that_has_made_fewer_steps_is_named(script, which, hosts):
    path = script(OWN_HOSTS * (hosts - 1) + STEPS)
    status, _, err = run("-n", "2", path, which, "12", "9", "")
    assert status == 1
    assert re.search(r"Process 1 (\(rank 1\) )?has exited\.", err), err


@pytest.mark.full
def test_the_wait_for_a_process_that_hangs_ends(script):
    """Process 1 has launched a step, for which process 0 is late, and then waits for the end of process 1."""
    begin = STEPS.partition("for _ in")[0]
    path = script(
        f"""{begin}
f(x).block_until_ready()
import pathlib, time
there = pathlib.Path(__file__).parent / str(os.getppid())
if me == 0:
    until = time.monotonic() + 60
    while not there.exists() or pathlib.Path("/proc", there.read_text(), "cmdline").exists():
        assert time.monotonic() < until
        time.sleep(0.1)
else:
    f(x)
    there.write_text(str(os.getpid()))
"""
    )
    status, _, err = run("-n", "2", path, "lax.psum", "0", "0", "", env={"JAX_RING_TIMEOUT_S": "1"})
    assert status == 0, err


def slow(devices, iterations=100):
    """A jitted function that takes a moment, and its argument."""

    def repeat(x):
        y = jnp.ones((300, 300)) * x.sum()
        return jax.lax.fori_loop(0, iterations, lambda i, y: jnp.sin(y @ y * 1e-3), y).sum()[None]

    sharding = jax.NamedSharding(Mesh([jax.devices()[i] for i in devices], ("i",)), P("i"))
    x = jax.device_put(np.ones(len(devices), np.float32), sharding)
    return jax.jit(jax.shard_map(repeat, mesh=sharding.mesh, in_specs=P("i"), out_specs=P("i"))), x


@pytest.fixture
def programs():
    jax.devices()  # else there is nothing to wait for
    programs = Programs()
    yield programs
    programs.end()


@pytest.mark.parametrize("devices", [[0], [3], [1, 2]])
@pytest.mark.parametrize("thread", ["main", "another", "another, whose results are kept"])
def test_launched_programs_have_ended_after_the_wait(programs, devices, thread):
    (f, x), kept = slow(devices), []

    def launch():
        for _ in range(3):
            y = f(x)
        if "kept" in thread:
            kept.append(y)

    def processor_seconds(launch_and_wait):
        began = time.process_time()
        launch_and_wait()
        return time.process_time() - began

    def wait():
        if thread == "main":
            launch()
        else:
            other = threading.Thread(target=launch)
            other.start()
            other.join()
        assert programs.wait(60)

    jax.block_until_ready(f(x))
    assert programs.wait(60)
    expected = processor_seconds(lambda: [jax.block_until_ready(f(x)) for _ in range(3)])
    assert processor_seconds(wait) > 0.7 * expected


@pytest.mark.parametrize("devices", [[0], [1, 2]])
@pytest.mark.parametrize("is_kept", [True, False])
def test_the_wait_for_a_program_that_takes_too_long_ends(programs, devices, is_kept):
    f, x = slow(devices, iterations=5000)
    f = f.lower(x).compile()
    jax.block_until_ready(x)
    assert programs.wait(60)
    y = f(x)
    if not is_kept:
        del y
    began = time.monotonic()
    assert not programs.wait(0.2)
    assert time.monotonic() - began < 1.5
    assert programs.wait(120)


FAILS = """
import os
import jax, numpy as np
from jax_ring.launcher.coordinator.client import Programs
jax.config.update("jax_num_cpu_devices", 2)
def fail(x): raise ValueError("bad batch")
mesh = jax.make_mesh((2,), ("i",))
f = lambda x: jax.pure_callback(fail, jax.typeof(x), x)
f = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P("i")))
y = f(jax.device_put(np.ones(2), jax.NamedSharding(mesh, jax.P("i"))))
print(Programs().wait(60), flush=True)
try:
    jax.block_until_ready(y)
except Exception as error:
    print("bad batch" in str(error), flush=True)
os._exit(0)
"""


def test_the_wait_for_a_program_that_fails_ends():
    command = [sys.executable, "-P", "-c", FAILS]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.stdout == "True\nTrue\n", result.stderr


def test_a_busy_thread_of_the_program_is_not_waited_for(programs):
    is_over = []

    def spin():
        while not is_over:
            sum(range(1000))

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        assert programs.wait(30)
    finally:
        is_over.append(1)
        thread.join()


def test_a_thread_of_python_is_known_in_a_namespace_of_processes():
    """Where /proc is that of another one, with other numbers."""
    code = "from jax_ring.launcher.coordinator import client; print(sum(client._is_computing() for _ in range(9)))"
    namespace = ["unshare", "--pid", "--fork", *([] if os.geteuid() == 0 else ["--user"])]
    if subprocess.run([*namespace, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this user may make no namespaces")
    result = subprocess.run(
        [*namespace, sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (result.returncode, result.stdout) == (0, "0\n"), result.stderr
