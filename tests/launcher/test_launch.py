"""The launcher: the environment of scripts, labeled output, signals, and cleanup after failures."""

import os
import signal
import tempfile
import time

import pytest
from launches import FAILS_BESIDE_A_SLOW_ONE, MODULE, WAITS, assert_gone, command_with, pids, run, start

from jax_ring import launch
from jax_ring.launcher import environment
from jax_ring.launcher.protocol import MEMORY_VARIABLE

pytestmark = pytest.mark.one_pair  # the launcher is Python's


def test_scripts_run_as_under_python(script):
    script("value = 'of a module beside it'", "beside.py")
    path = script(
        """
import os, sys
assert "jax" not in sys.modules
import beside
names = ("PROCESS_ID", "NUM_PROCESSES", "LOCAL_DEVICE_IDS", "NUM_CPU_DEVICES")
print(__name__, __file__ == sys.argv[0], sys.argv[1:], beside.value, *(os.environ["JAX_" + name] for name in names))
print("no newline", end="", file=sys.stderr)
"""
    )
    status, out, err = run("-n", "2", "--devices", "3", path, "-n", "x", command=MODULE)
    assert status == 0, err
    found = "__main__ True ['-n', 'x'] of a module beside it"
    assert out == [f"[0] {found} 0 2 0,1,2 3", f"[1] {found} 1 2 3,4,5 3"]
    assert sorted(err.splitlines()) == ["[0] no newline", "[1] no newline"]


@pytest.mark.full
def test_initialize_without_arguments(script):
    """jax.distributed.initialize() finds all processes and devices; a psum over all devices.

    Nothing listens at the proxy, which is for other hosts.
    """
    path = script(
        """
import os
os.environ["JAX_PLATFORMS"] = "cpu"
import jax
from jax.sharding import PartitionSpec as P
jax.distributed.initialize()
mesh = jax.make_mesh((jax.device_count(),), ("i",))
own = 10.0**jax.process_index() * jax.numpy.ones(2)
x = jax.make_array_from_process_local_data(jax.NamedSharding(mesh, P("i")), own)
total = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "i"), mesh=mesh, in_specs=P("i"), out_specs=P()))(x)
import jax_ring
from jax_ring import _compat
from jax_ring.launcher import protocol
ours = jax.jit(jax.shard_map(lambda x: jax_ring.ring_psum(x, "i"), mesh=mesh, in_specs=P("i"), out_specs=P()))(x)
assert float(ours[0]) == float(total[0])
assert protocol.memory_prefix()
token = _compat.distributed_client().key_value_try_get("jax_ring/token")
label, key = protocol.memory_label(protocol.own_key(), token), protocol.memory_key(protocol.own_key(), token)
assert len(protocol.own_key()) == 32
assert label.startswith(protocol.memory_prefix())
with open("/proc/self/maps") as maps: names = {line.split()[5] for line in maps if "/dev/shm/jax_ring" in line}
assert names and all(name.startswith(f"/dev/shm/jax_ring-{label}-") for name in names)
assert not [name for name in names if token in name or key.hex() in name]
print(jax.process_count(), jax.local_device_count(), jax.device_count(), float(total[0]))
"""
    )
    status, out, err = run(
        "-n", "2", "--devices", "2", path, command=MODULE, env={"http_proxy": "http://127.0.0.1:1", "no_proxy": ""}
    )
    assert status == 0, err
    # Gloo may write partial lines before the output of the script.
    assert [line[:3] for line in out if line.endswith("2 2 4 22.0")] == ["[0]", "[1]"], out


@pytest.mark.full
def test_a_handler_of_sigterm_is_kept(script):
    """JAX's preemption service has one of its own."""
    path = script(
        """
import os, signal
os.environ["JAX_PLATFORMS"] = "cpu"
signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b"handled\\n"), os._exit(0)))
import jax
jax.distributed.initialize()
os.kill(os.getpid(), signal.SIGTERM)
signal.pause()
"""
    )
    status, out, err = run("-n", "2", path, command=MODULE)
    assert status == 0, err
    assert "[1] handled" in out


def test_processes_have_no_terminal(script):
    """They have a session each. As a group in the launcher's, one that asks for a password would be stopped."""
    status, out, err = run("-n", "1", script("import os; print(os.getsid(0) == os.getpgid(0) == os.getpid())"))
    assert status == 0, err
    assert out == ["[0] True"]


def test_lines_stay_whole(script):
    path = script("import sys\nfor i in range(300): print('x' * i * 10, file=[sys.stdout, sys.stderr][i % 2])")
    status, out, err = run("-n", "3", path)
    assert status == 0
    for stream, first in ((out, 0), (err.splitlines(), 1)):
        expected = sorted(f"[{rank}] " + "x" * i * 10 for rank in range(3) for i in range(first, 300, 2))
        assert sorted(stream) == expected


@pytest.mark.parametrize(
    ("dies", "status", "why"),
    [
        ("sys.exit(7)", 7, "exited with status 7"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 128 + 9, "was killed by SIGKILL"),
        ("raise ValueError('bad batch')", 1, "exited with status 1"),
    ],
)
def test_a_failed_process_terminates_the_others(script, dies, status, why):
    path = script(WAITS.format(f"if os.environ['JAX_PROCESS_ID'] == '1': time.sleep(0.3); {dies}"))
    # Its exit is the reason, however long it takes after the report of its exception.
    result, out, err = run("-n", "3", "--failure-grace", "60", path)
    assert result == status
    assert "jax_ring.launch: rank 1 (pid " in err
    assert f"{why}; sending SIGTERM to ranks 0, 2" in err
    assert ("bad batch" in err) == ("bad batch" in dies)
    assert_gone([int(line.split()[-1]) for line in out])


def test_a_failure_beside_a_success_is_not_lost(script, tmp_path):
    """The launcher sees both exits at once, the success first."""
    end = tmp_path / "end"
    launcher = start("-n", "2", script(WAITS.replace("time.sleep(60)", f"""sys.stdout.flush()
while not os.path.exists({str(end)!r}):
    time.sleep(0.01)
sys.exit(3 * int(os.environ["JAX_PROCESS_ID"]))""").format("")))  # fmt: skip
    processes = pids(launcher, 2)
    launcher.send_signal(signal.SIGSTOP)
    try:
        end.touch()
        assert_gone(processes)
    finally:
        launcher.send_signal(signal.SIGCONT)
    _, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 3, err
    assert "rank 1" in err.splitlines()[-1], err


def test_processes_that_ignore_sigterm_are_killed_with_their_children(script):
    stubborn = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nif os.environ['JAX_PROCESS_ID'] == '0': os.fork()"
    launcher = start("-n", "2", "--grace", "0.2", script(WAITS.format(stubborn)))
    started = pids(launcher, 3)
    launcher.send_signal(signal.SIGTERM)
    _, err = launcher.communicate(timeout=30)
    assert launcher.returncode == 128 + signal.SIGTERM
    assert "received SIGTERM; sending SIGTERM to ranks 0, 1" in err
    assert "killing ranks 0, 1" in err
    assert_gone(started)


@pytest.mark.parametrize(("seconds", "ended"), [(60, "[0] ended\n"), (0, "")])
def test_a_second_signal_kills_unless_it_is_the_same(script, tmp_path, seconds, ended):
    """A terminal and a wrapper may both send one."""
    path = script(FAILS_BESIDE_A_SLOW_ONE.replace('== "0"', '== "1"') + "print('ended')")
    change = f"from jax_ring.launcher import attempt; attempt._PATIENCE_SECONDS = {seconds}"
    launcher = start("-n", "1", "--grace", "60", path, command=command_with(change))
    while not (tmp_path / "there").exists():
        time.sleep(0.01)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.stdout.readline() == "[0] told\n"
    launcher.send_signal(signal.SIGTERM)
    if ended:
        (tmp_path / "end").touch()
    out, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 128 + signal.SIGTERM, err
    assert out == ended


@pytest.mark.parametrize("held_by", ["its group", "another session"])
def test_a_death_is_noticed_while_its_output_is_held_open(script, held_by):
    leaves = "os.setsid()" if held_by == "another session" else "pass"
    dies = f"if os.fork(): time.sleep(60)\n{leaves}; print(os.getpid()); os.kill(os.getppid(), signal.SIGKILL)"
    launcher = start("-n", "1", script(WAITS.format(dies)))
    (left,) = pids(launcher, 1)
    _, err = launcher.communicate(timeout=30)
    assert launcher.returncode == 128 + signal.SIGKILL
    assert "was killed by SIGKILL" in err
    if held_by == "another session":
        os.kill(left, signal.SIGKILL)
    assert_gone([left])


@pytest.mark.parametrize(
    "ends",
    ["pass", "os.kill(os.getpid(), signal.SIGKILL)", "os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)"],
    ids=["by itself", "by a signal", "by the launcher"],
)
def test_shared_memory_of_a_script_does_not_outlive_it(script, request, ends):
    """A helper process of Python's removes the name after the end of the script's process."""
    name = f"test-{os.getpid()}-{request.node.callspec.id.replace(' ', '-')}"
    path = script(
        f"""
import os, signal, time
from multiprocessing import shared_memory
signal.signal(signal.SIGTERM, signal.SIG_IGN)
memory = shared_memory.SharedMemory({name!r}, create=True, size=1)
print("created", flush=True)
{ends}
"""
    )
    change = "from jax_ring.launcher import processes; processes._DESCENDANTS_SECONDS = 30"
    _, out, err = run("-n", "1", "--grace", "0", path, command=command_with(change))
    assert out == ["[0] created"], err
    assert not os.path.exists(f"/dev/shm/{name}"), err


def test_memory_that_cannot_be_removed_fails_no_job(script):
    """Another user may have taken the name, or a folder has it."""
    path = script(f"import os; print(name := '/dev/shm/jax_ring-' + os.environ[{MEMORY_VARIABLE!r}]); os.mkdir(name)")
    status, out, err = run("-n", "1", path)
    name = out[0].split()[1]
    os.rmdir(name)
    assert status == 0
    (line,) = err.splitlines()
    assert line.startswith("jax_ring.launch: shared memory could not be removed: [Errno ")
    assert line.endswith(f": '{name}'")


def test_a_process_that_truncates_what_it_inherits(script):
    """The launcher and the next generation have it in memory."""
    path = script(
        """
import os, sys
links = {file: f"/proc/self/fd/{file}" for file in map(int, os.listdir("/proc/self/fd"))}
for file, link in links.items():
    if os.path.lexists(link) and "memfd:jax_ring" in os.readlink(link):
        try: os.ftruncate(file, 0)
        except OSError: pass
if os.environ["JAX_RING_RESTART"] == "0": sys.exit(3)
import time; time.sleep(2)
"""
    )
    status, _, err = run("-n", "2", "--watch", "60", "--max-restarts", "1", "--backoff", "0", path)
    assert status == 0, err
    assert "restart 1 of 1" in err


def test_a_signal_that_comes_when_the_launcher_ends_is_not_mentioned(script):
    """One that a thread takes may come so late: the system gives it to any that does not block it."""
    change = """
import asyncio, os, signal
close = asyncio.SelectorEventLoop._close_self_pipe
def close_and_signal(loop):
    close(loop)
    os.kill(os.getpid(), signal.SIGCHLD)
asyncio.SelectorEventLoop._close_self_pipe = close_and_signal
"""
    assert run("-n", "1", script("print('done')"), command=command_with(change)) == (0, ["[0] done"], "")


def test_signals_are_passed_on(script):
    # Not print: the signal may come before the print of the pid has returned, and Python refuses one within the other.
    handler = r"lambda *_: (os.write(1, b'interrupted\n'), sys.exit(0))"
    path = script(WAITS.format(f"signal.signal(signal.SIGINT, {handler})"))
    launcher = start("-n", "2", path)
    started = pids(launcher, 2)
    launcher.send_signal(signal.SIGINT)
    out, err = launcher.communicate(timeout=30)
    assert launcher.returncode == 128 + signal.SIGINT, err
    assert sorted(out.splitlines()) == ["[0] interrupted", "[1] interrupted"], err
    assert "killing" not in err
    assert_gone(started)


def test_other_signals(script):
    """SIGUSR1 is for the script, and not for its children. SIGQUIT ends the job, with them."""
    code = r"os.fork(); handler = lambda *_: os.write(1, b'handled by %d\n' % os.getpid())"
    launcher = start("-n", "1", script(WAITS.format(f"{code}; signal.signal(signal.SIGUSR1, handler)")))
    started = pids(launcher, 2)
    launcher.send_signal(signal.SIGUSR1)
    assert pids(launcher, 1)[0] in started
    launcher.send_signal(signal.SIGQUIT)
    out, err = launcher.communicate(timeout=30)
    assert launcher.returncode == 128 + signal.SIGQUIT, err
    assert not out
    assert "received SIGQUIT; sending SIGQUIT to ranks 0" in err
    assert_gone(started)


@pytest.mark.parametrize("option", ["--block-signal=CHLD,TERM", "--ignore-signal=CHLD"])
def test_a_starter_that_blocks_or_ignores_signals(script, option):
    """As daemons do. The launcher sees its processes end, and they get the signals that it passes on."""
    ends = start("-n", "2", script("import sys; sys.exit(3)"), starter=["env", option])
    _, err = ends.communicate(timeout=30)
    assert ends.returncode == 3, err
    assert "exited with status 3" in err

    launcher = start("-n", "2", script(WAITS.format("")), starter=["env", option])
    started = pids(launcher, 2)
    launcher.send_signal(signal.SIGTERM)
    _, err = launcher.communicate(timeout=30)
    assert launcher.returncode == 128 + signal.SIGTERM, err
    assert "killing" not in err
    assert_gone(started)


def test_an_exception_with_a_text_that_utf_8_cannot_hold(script):
    """As the names of files have it, from os.listdir. Restarts go on, and the right rank is named."""
    path = script(
        r"""
import os
if os.environ["JAX_PROCESS_ID"] == "1" and os.environ["JAX_RING_RESTART"] == "0":
    raise ValueError("no such file: a\udcffb \ud800")
"""
    )
    status, _, err = run("-n", "2", "--max-restarts", "1", path)
    assert status == 0, err
    assert r"jax_ring.launch: failed: rank 1" in err
    assert r"ValueError: no such file: a\udcffb \ud800" in err


def test_no_orphans_of_a_killed_launcher(script):
    launcher = start("-n", "2", script(WAITS.format("signal.signal(signal.SIGTERM, signal.SIG_IGN)")))
    started = pids(launcher, 2)
    launcher.kill()
    launcher.communicate(timeout=30)
    assert_gone(started)


def test_closed_output_pipe(script):
    launcher = start("-n", "2", script("import time\nwhile True: print('.'); time.sleep(0.01)"))
    launcher.stdout.readline()
    launcher.stdout.close()
    assert launcher.wait(30) == 128 + signal.SIGPIPE
    assert "received SIGPIPE; sending SIGTERM to ranks 0, 1" in launcher.stderr.read()
    launcher.stderr.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-n", "0", __file__], "-n must be at least 1, got 0"),
        (["-n", "4:3", __file__], "-n MIN:MAX needs MIN <= MAX, got 4:3"),
        (["-n", "3:4", "--nnodes", "2", __file__], "-n MIN:MAX is for one host; with --nnodes 2 give -n 4"),
        (["-n", "3:4", "--nnodes", "1:2", __file__], "-n MIN:MAX is for one host; with --nnodes 1:2 give -n 4"),
        (["-n", "few", __file__], "-n must be a number or MIN:MAX, as in 3:4; got few"),
        (["-n", "2", "--max-restarts", "-1", __file__], "--max-restarts must be at least 0, got -1"),
        (["-n", "2", "--nnodes", "2", __file__], "--nnodes 2 needs --coordinator HOST:PORT, got None"),
        (["-n", "2", "--nnodes", "2", "--node-rank", "2", __file__], "--node-rank must be from 0 to 1"),
        (["-n", "2", "--coordinator", "host:1", __file__], "--coordinator is for several hosts: give --nnodes"),
        (["-n", "2", "-m", "absent.module"], "there is no module 'absent.module' in "),
        (["-n", "2", "--devices", "0", __file__], "--devices must be from 1 to 4096, got 0"),
        (["-n", "2", "--devices", "4097", __file__], "--devices must be from 1 to 4096, got 4097"),
        (["-n", "2", "--grace", "nan", __file__], "--grace must be a number of seconds, got nan"),
        (["-n", "2", "absent.py"], "there is no file 'absent.py' in "),
        ([__file__], "-n/--processes"),
        (["-n", "2"], "the following arguments are required: script\n"),
    ],
)
def test_errors(capsys, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        launch.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_help_says_what_it_does(capsys):
    with pytest.raises(SystemExit) as stopped:
        launch.main(["--help"])
    assert stopped.value.code == 0
    assert "Runs a script as several processes of" in capsys.readouterr().out


def test_addresses_differ():
    with environment.reserved_address() as one, environment.reserved_address() as other:
        assert one != other


@pytest.mark.full
def test_fifty_launches_leave_nothing(script):
    path = script("import os; print(os.getpid())")
    with tempfile.TemporaryDirectory() as folder:  # a short path, as those of sockets must be
        for number in range(50):
            status, out, err = run("-n", "2", path, env={"TMPDIR": folder})
            assert (status, len(out), err) == (0, 2, ""), number
            assert not os.listdir(folder), number
            assert_gone([int(line.split()[-1]) for line in out])
