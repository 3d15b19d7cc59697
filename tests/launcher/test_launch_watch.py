"""Jobs whose processes hang in XLA's collectives, in Python or because they are stopped: reported once, and ended."""

import re

import pytest
from launches import reserved_ports, run, start

pytestmark = pytest.mark.timeout(400)

STEP = """
import ctypes, os, signal, sys, time
import jax, numpy as np
from jax.sharding import PartitionSpec as P

jax.distributed.initialize()
mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
rank, is_first = jax.process_index(), os.environ["JAX_RING_RESTART"] == "0"

@jax.jit
@jax.shard_map(mesh=mesh, in_specs=P("data"), out_specs=P())
def step(x):
    return jax.lax.psum(x @ x, "data")  # enough for an execution that is not part of its launch

def batch():
    return jax.make_array_from_process_local_data(jax.NamedSharding(mesh, P("data")), np.eye(64, dtype=np.float32))
"""

WATCHED = (
    STEP
    + """
import jax_ring
from jax_ring.progress.watch import progress
step = jax_ring.watch(step, seconds=float(sys.argv[1]), on_stuck="end")

def load_batch(number):
    if is_first and number == 4 and rank == 1:
        time.sleep(300)
    if is_first and number == 4 and rank == 2:
        while progress().page.read().completed < number:
            time.sleep(0.01)
        hold_lock()
    return batch()

def hold_lock():
    while True:
        ctypes.PyDLL(None).sleep(300)  # a signal ends it

for number in range(6):
    result = step(load_batch(number)).block_until_ready()
print("sum", float(result.addressable_data(0)[0, 0]))
"""
)

UNEDITED = """
import os, re, signal, sys, time
import jax, numpy as np
from jax.sharding import PartitionSpec as P

jax.distributed.initialize()
assert "jax_ring" in sys.modules  # for the hook
import jax_ring
psum = {"lax": jax.lax.psum, "ring": jax_ring.ring_psum}[sys.argv[1]]
mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
rank, is_first = jax.process_index(), os.environ["JAX_RING_RESTART"] == "0"
is_large = sys.argv[3] == "large"

@jax.jit
@jax.shard_map(mesh=mesh, in_specs=P("data"), out_specs=P())
def step(x):
    if is_large:
        x = x @ x @ x @ x
    return psum(x, "data")

values = np.eye(64 if is_large else 2, dtype=np.float32)
x = jax.make_array_from_process_local_data(jax.NamedSharding(mesh, P("data")), values)
for number in range(6):
    if is_first and number == 4 and rank == 1:
        match sys.argv[2]:
            case "stops":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "sleeps":
                time.sleep(300)
            case "holds":
                re.match("(a+)+$", "a" * 60 + "b")
    result = step(x)
    if is_large:
        result.block_until_ready()
print("sum", float(result.addressable_data(0)[0, 0]))
"""

ALL_IN_PYTHON = (
    STEP
    + """
import jax_ring
if "JAX_RING_WATCH" not in os.environ:
    step = jax_ring.watch(step, seconds=3)
for number in range(2):
    result = step(batch()).block_until_ready()
    step.lower(batch())
    time.sleep(8)
print("sum", float(result.addressable_data(0)[0, 0]))
"""
)

# Rank 1 blocks in a callback of its program, and the other in Gloo. It gets an error then, but does not leave by it.
ELASTIC = """
import os, sys, threading
import jax, jax_ring, numpy as np
from jax.sharding import PartitionSpec as P

jax.distributed.initialize()
state = jax_ring.elastic.State(step=0)
hangs = os.environ["JAX_RING_LAUNCHED"] == "1"

def block(x):
    if hangs and x >= 4:
        threading.Event().wait()
    return x

@jax_ring.elastic.run(min_processes=2)
def train(state):
    print("begins with step", state.step, flush=True)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    @jax_ring.watch
    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=False)
    def step(x):
        return jax.lax.psum(jax.pure_callback(block, jax.ShapeDtypeStruct((1,), np.float32), x), "data")

    sharding = jax.NamedSharding(mesh, P("data"))
    while state.step < 6:
        x = jax.make_array_from_process_local_data(sharding, np.full(1, state.step, np.float32))
        try:
            total = float(step(x).addressable_data(0)[0])
        except Exception:
            threading.Event().wait()
        state.step += 1
        state.commit()
    print("ends with", total, jax.process_count())

train(state)
"""


def sums(out):
    """Among the lines that Gloo writes."""
    return re.findall(r"sum \d\.\d", "\n".join(out))


def launched(*arguments):
    status, out, err = run("--backoff", "0", "--failure-grace", "0.1", *arguments)
    assert status == 0, [*out, err]
    return out, err


@pytest.mark.full
@pytest.mark.one_pair
def test_ranks_that_wait_and_ranks_that_do_not_come(script):
    """Of a collective of XLA. One is in Python, another holds Python's lock there, and the job starts again."""
    out, err = launched("-n", "3", "--max-restarts", "1", script(WATCHED), "8")
    assert sums(out) == ["sum 3.0"] * 3
    assert err.count("have not completed") == 1, err
    assert "ranks 0, 1, 2 have not completed step 5 (step) within 8 s (jax_ring.watch)\n" in err, err
    assert re.search(r"rank 1 \(pid \d+\): in Python; began 4 steps, completed 4, the last \d+\.\d s ago\n", err), err
    assert re.search(r"rank 1 .*MainThread:.* line \d+, in load_batch\n.*rank 2", err, re.DOTALL), err
    assert re.search(r"rank 2 \(pid \d+\): in Python; .*; its threads do not answer, as if one held Python's", err), err
    assert re.search(r"rank 2 .* in load_batch\n.*rank 0", err, re.DOTALL), err
    assert re.search(r"rank 0 \(pid \d+\): in the device's program; began 5 steps, completed 4,", err), err
    assert re.search(r"failed: rank 1 \(pid \d+\) is stuck in step 5 \(step\): in Python; restart 1 of 1", err), err


@pytest.mark.full
@pytest.mark.one_pair
@pytest.mark.parametrize("nnodes", ["2", "2:2"])
@pytest.mark.usefixtures("secret")
def test_processes_of_several_hosts(nnodes, script):
    """The launcher that leads compares all, and the other one ends those of its host that hang."""
    options = ["--nnodes", nnodes, "--max-restarts", "1", "--backoff", "0", "--failure-grace", "0.1"]
    launchers = []
    with reserved_ports(len(nnodes.split(":"))) as ports:
        options += ["--coordinator", ",".join(f"127.0.0.1:{port}" for port in ports)]
        try:
            launchers.append(start("-n", "1", *options, "--node-rank", "0", script(WATCHED), "8"))
            if len(ports) == 2:  # the first one is to have the first address
                assert "this launcher leads" in launchers[0].stderr.readline()
            launchers.append(start("-n", "2", *options, "--node-rank", "1", script(WATCHED), "8"))
            found = [launcher.communicate(timeout=200) for launcher in launchers]
        finally:
            for launcher in launchers:
                launcher.kill()
    (out, err), (others_out, others_err) = found
    assert [launcher.returncode for launcher in launchers] == [0, 0], found
    assert sums(out.splitlines()) + sums(others_out.splitlines()) == ["sum 3.0"] * 3
    assert "have not completed" not in others_err
    assert err.count("ranks 0, 1, 2 have not completed step 5 (step) within 8 s (jax_ring.watch)\n") == 1, err
    assert re.search(
        r"rank 1 \(pid \d+\) of host 1: in Python; began 4 steps, completed 4, the last \d+\.\d s ago\n", err
    ), err
    assert re.search(r"rank 1 .*MainThread:.* line \d+, in load_batch\n.*rank 2", err, re.DOTALL), err
    assert re.search(r"rank 2 \(pid \d+\) of host 1: in Python; .*; its threads do not answer", err), err
    assert re.search(r"rank 0 \(pid \d+\): in the device's program; began 5 steps, completed 4,", err), err
    assert re.search(r"failed: rank 1 \(pid \d+\) of host 1 is stuck in step 5 \(step\): in Python", err), err


# A small program is executed within its launch, which then blocks. Of a larger one the wait for its results does.
@pytest.mark.full
@pytest.mark.parametrize(
    "arguments",
    [
        ["lax", "stops", "large"],
        *[["lax", what, "small"] for what in ("stops", "sleeps", "holds")],
        ["ring", "sleeps", "small"],
    ],
    ids=" ".join,
)
def test_a_program_that_is_not_edited(arguments, script, monkeypatch):
    monkeypatch.setenv("JAX_RING_TIMEOUT_S", "600")
    options = "-n", "2", "--max-restarts", "1", "--watch", "6", "--on-stuck", "end"
    out, err = launched(*options, script(UNEDITED), *arguments)
    assert sums(out) == ["sum 2.0"] * 2
    assert err.count("a program has not completed within 6 s (--watch)") == 1, err
    where = "stopped" if arguments[1] == "stops" else "in Python"
    assert re.search(rf"rank 1 \(pid \d+\): {where}; ", err), err
    if arguments[1] != "stops":
        assert re.search(r"rank 1 .*MainThread:.* line \d+, in <module>\n.*rank 0", err, re.DOTALL), err
    if arguments[2] == "small":
        assert re.search(r"rank 0 .*, in <module>\n +result = step\(x\)\n", err, re.DOTALL), err
    assert ("as if one held Python's lock" in err) == (arguments[1] == "holds"), err
    assert re.search(r"rank 0 \(pid \d+\): in the device's program; waits for a program", err), err
    assert re.search(rf"failed: rank 1 \(pid \d+\) is stuck in an execution: {where}; restart 1", err), err


@pytest.mark.full
@pytest.mark.one_pair
@pytest.mark.parametrize("options", [["--watch", "3"], []])
def test_all_in_python(options, script):
    """Nobody is in a program, so nobody waits for another."""
    out, err = launched("-n", "2", *options, script(ALL_IN_PYTHON))
    assert sums(out) == ["sum 2.0"] * 2
    assert "not completed" not in err, err


@pytest.mark.one_pair
def test_a_call_that_cannot_be_left(script):
    """The launcher ends both processes, and others go on from the commits that it has kept."""
    options = "-n", "2", "--max-restarts", "2", "--watch", "8", "--on-stuck", "end", "--leave-timeout", "2"
    out, err = launched(*options, script(ELASTIC))
    assert sorted(re.findall(r"begins with step \d|ends with .*", "\n".join(out))) == [
        *["begins with step 0"] * 2, *["begins with step 4"] * 2, *["ends with 10.0 2"] * 2,
    ], [*out, err]  # fmt: skip
    assert err.count("have not completed step 5 (step)") == 1, err
    assert re.search(r"rank 1 \(pid \d+\): in a callback of the device's program; .* in block\n", err, re.DOTALL), err
    assert re.search(r"rank 1 \(pid \d+\) is stuck in step 5 \(step\): in a callback .*; killing ranks 0, 1", err), err


@pytest.mark.one_pair
@pytest.mark.parametrize("arguments", [["--watch", "0"], ["--watch", "-1"], ["--on-stuck", "raise"]])
def test_refused_options(arguments, script):
    status, _, err = run("-n", "1", *arguments, script(""))
    assert status == 2, err
    assert f"{arguments[0]}" in err
