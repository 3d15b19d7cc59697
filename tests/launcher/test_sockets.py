"""Who can reach a job of one host, and what is left of its sockets."""

import os
import pathlib
import re
import signal
import stat
import subprocess
import sys
import tempfile
import time

import jax
import pytest
from launches import COMMAND, MODULE, command_with, run, start

from jax_ring.launcher.coordinator import folder
from jax_ring.launcher.coordinator.folder import SocketFolder

# Says where its sockets are, by what the launcher tells it.
SAYS_WHERE = """
import os, sys, time
print("folder", os.path.dirname(os.environ["JAX_RING_CONTROL"]), flush=True)
"""


def said(launcher):
    """The folder that a process says."""
    line = launcher.stdout.readline()
    assert "folder" in line, launcher.stderr.read()
    return pathlib.Path(line.split("folder ")[1].strip())


def assert_removed(path):
    until = time.monotonic() + 30
    while path.exists():
        assert time.monotonic() < until
        time.sleep(0.02)


# Connects, adds up by Gloo, and lists where processes of this job listen.
LISTENERS = """
import os, jax, jax.numpy as jnp
rank, address = int(os.environ["JAX_PROCESS_ID"]), os.environ["JAX_COORDINATOR_ADDRESS"]
jax.distributed.initialize(*((address, 2, rank) if rank == 0 else ()))
total = jax.jit(jax.shard_map(
    lambda x: jax.lax.psum(x, "i"), mesh=jax.make_mesh((2,), ("i",)),
    in_specs=jax.sharding.PartitionSpec("i"), out_specs=jax.sharding.PartitionSpec(),
))
sharding = jax.NamedSharding(jax.make_mesh((2,), ("i",)), jax.sharding.PartitionSpec("i"))
x = jax.make_array_from_callback((2,), sharding, lambda index: jnp.ones(1))
assert total(x).addressable_data(0)[0] == 2
job = [os.getppid(), *map(int, open(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read().split())]
links = [os.path.join(f"/proc/{pid}/fd", file) for pid in job for file in os.listdir(f"/proc/{pid}/fd")]
inodes = {os.readlink(link)[8:-1] for link in links if os.path.exists(link) or os.path.islink(link)}
for file in ("tcp", "tcp6"):
    for line in open(f"/proc/net/{file}").read().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and fields[9] in inodes:
            os.write(1, f"listens {fields[1].partition(':')[0]}\\n".encode())
os.write(1, f"coordinator {address}\\n".encode())
"""


@pytest.mark.skipif(not pathlib.Path("/proc/net/tcp").exists(), reason="there is no /proc/net")
def test_a_job_of_one_host_listens_at_no_port(script):
    """But for Gloo's, at the loopback interface. One process names the coordinator itself."""
    status, out, err = run("-n", "2", script(LISTENERS), command=MODULE)
    assert status == 0, err
    assert {line.split()[2] for line in out if "listens" in line} == {"0100007F"}
    (address,) = {line.split()[2] for line in out if "coordinator" in line}
    assert address.startswith("unix:/")
    assert not pathlib.Path(address.removeprefix("unix:")).exists()


@pytest.mark.one_pair
@pytest.mark.parametrize("ends", ["", "sys.exit(3)", "os.kill(os.getppid(), 9); time.sleep(60)"])
def test_nothing_is_left_of_the_sockets(script, tmp_path, ends):
    text = f"""
import os, sys, time
path = os.path.dirname(os.environ["JAX_RING_CONTROL"])
found = os.stat(path)
with open({str(tmp_path / "said")!r}, "w") as file:
    print(path, oct(found.st_mode), found.st_uid == os.geteuid(), file=file)
"""
    run("-n", "1", script(text + ends))
    path, *mode = (tmp_path / "said").read_text().split()
    assert mode == [oct(stat.S_IFDIR | 0o700), "True"]
    assert_removed(pathlib.Path(path))


@pytest.mark.one_pair
def test_a_umask_that_takes_the_rights_of_the_user(script):
    text = """
import os, time
folder = os.path.dirname(os.environ["JAX_RING_CONTROL"])
while not os.path.exists(folder + "/coordinator-1"): time.sleep(0.01)
for path in (folder, folder + "/control", folder + "/coordinator-1"):
    print(oct(os.stat(path).st_mode & 0o700))
"""
    command = ["sh", "-c", 'umask 777; exec "$@"', "sh", *command_with(""), "-n", "1", script(text)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    modes = [line.split()[1] for line in result.stdout.splitlines()]
    assert (result.returncode, modes[0]) == (0, "0o700"), result.stderr
    assert all(int(mode, 8) & 0o600 == 0o600 for mode in modes[1:])  # to connect is to write


# What another user does who knows the path.
CONNECTS_AS_ANOTHER = """
import os, socket, sys
os.setresgid(12345, 12345, 12345)
os.setresuid(12345, 12345, 12345)
try: socket.socket(socket.AF_UNIX).connect(sys.argv[1])
except PermissionError: print("refused")
"""


@pytest.mark.one_pair
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
@pytest.mark.parametrize("name", ["control", "coordinator-1"])
def test_another_user_cannot_connect(script, tmp_path, name):
    path = script(SAYS_WHERE + "time.sleep(60)")
    launcher = start("-n", "1", path)
    where = said(launcher)
    until = time.monotonic() + 60
    while not (where / name).exists():
        assert time.monotonic() < until
        time.sleep(0.02)
    command = [sys.executable, "-I", "-S", "-c", CONNECTS_AS_ANOTHER, str(where / name)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    launcher.terminate()
    launcher.communicate(timeout=60)
    assert result.stdout == "refused\n", result.stderr
    assert_removed(where)


@pytest.mark.one_pair
def test_nothing_is_left_of_a_launcher_that_is_killed_between_generations(script, tmp_path):
    arguments = ["-n", "1", "--max-restarts", "1", "--backoff", "60"]
    launcher = start(*arguments, script(SAYS_WHERE + "sys.exit(3)"))
    path = said(launcher)
    assert any("restart 1 of 1 in 60 s" in line for line in launcher.stderr)
    assert path.exists()
    children = pathlib.Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):  # to all processes of a service, say
        os.kill(int(children[-1]), signum)
    launcher.kill()
    launcher.communicate(timeout=60)
    assert_removed(path)


@pytest.mark.one_pair
def test_jobs_do_not_disturb_each_other(script, tmp_path):
    waits = f"while not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)\n"
    path = script(SAYS_WHERE + waits + "if os.environ['JAX_RING_RESTART'] == '0': sys.exit(3)")
    first, second = (start("-n", "1", "--max-restarts", "1", "--backoff", "0", path) for _ in range(2))
    folders = said(first), said(second)
    assert folders[0] != folders[1]
    first.kill()
    first.communicate(timeout=60)
    assert_removed(folders[0])
    (tmp_path / "go").touch()
    _, err = second.communicate(timeout=60)
    assert second.returncode == 0, err
    assert_removed(folders[1])


@pytest.mark.one_pair
def test_a_folder_that_its_process_cannot_remove(monkeypatch):
    """The small process does, which is not ended before."""
    made = SocketFolder()
    path = pathlib.Path(made.socket("control"))
    path.touch()
    monkeypatch.setattr(folder.shutil, "rmtree", lambda *_, **__: None)  # as without a file to open it
    made.close()
    assert_removed(path.parent)


# ---- Where the folder is ---------------------------------------------------------------------------------------------


@pytest.fixture
def place(monkeypatch):
    """A folder to be preferred, as one with a short name."""
    own = SocketFolder()
    path = pathlib.Path(own.socket("place"))
    path.mkdir(mode=0o700)
    monkeypatch.setattr(folder.tempfile, "gettempdir", lambda: str(path))
    yield path
    own.close()


def new_folder():
    made = SocketFolder()
    made.close()
    return pathlib.Path(made.socket("")).parent


@pytest.mark.one_pair
def test_a_folder_in_the_place_for_temporary_files(place):
    assert new_folder() == place
    place.chmod(0o1777)
    assert new_folder() == place


@pytest.mark.one_pair
@pytest.mark.parametrize("name", ["a b", "a%20b", "x" * 60, "ü"])
def test_a_path_that_a_socket_cannot_have(place, monkeypatch, name):
    (place / name).mkdir()
    monkeypatch.setattr(folder.tempfile, "gettempdir", lambda: str(place / name))
    assert place not in new_folder().parents


@pytest.mark.one_pair
def test_a_place_in_which_others_could_put_another_folder(place, monkeypatch):
    (place / "own").mkdir(mode=0o700)
    monkeypatch.setattr(folder.tempfile, "gettempdir", lambda: str(place / "own"))
    assert new_folder() == place / "own"
    for mode in (0o777, 0o770):
        place.chmod(mode)
        assert place not in new_folder().parents
    place.chmod(0o700)
    if os.geteuid() == 0:
        for path in (place, place / "own"):
            os.chown(path, 12345, 12345)
            assert place not in new_folder().parents
            os.chown(path, 0, 0)


@pytest.mark.one_pair
def test_the_longest_path(place):
    """gRPC and Python take it."""
    longest = place / ("x" * (folder._LONGEST - folder._LONGEST_NAME - len(f"{place}/")))
    longest.mkdir()
    assert folder._why_not(str(longest)) is None
    assert re.search("too long", folder._why_not(f"{longest}x"))


@pytest.mark.one_pair
def test_no_place(script):
    command = command_with("import jax_ring.launcher.coordinator.folder as f; f._why_not = lambda place: 'it is full'")
    result = subprocess.run(
        [*command, "-n", "1", script("")], env=os.environ | {"TMPDIR": "/tmp"}, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert result.returncode == 1
    assert result.stderr == (
        "jax_ring.launch: failed: there is no place for the sockets of a job: /tmp: it is full; /dev/shm: it is full. "
        "Set TMPDIR to a short path of your own\n"
    )


@pytest.mark.one_pair
def test_no_folder_for_temporary_files(monkeypatch):
    """Python has an error of its own for that."""

    def gettempdir():
        raise FileNotFoundError("no usable folder")

    monkeypatch.setattr(tempfile, "gettempdir", gettempdir)
    monkeypatch.setattr(folder, "_why_not", lambda place: "it is read-only")
    with pytest.raises(folder.NoPlaceError, match="a job: TMPDIR: no usable folder; /tmp: it is read-only; /dev/shm: "):
        SocketFolder()


# As a user of a namespace that has no other user. It needs no file of Python from there on.
IN_A_NAMESPACE = """
import ctypes, os, pathlib, sys
from pytest_jax_ring.rank import load_file
folder = load_file("coordinator/folder.py")
PR_SET_DUMPABLE, CLONE_NEWUSER = 4, 0x10000000
os.setresuid(12346, 12346, 12346)
ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1)
if ctypes.CDLL(None).unshare(CLONE_NEWUSER): sys.exit(77)
pathlib.Path("/proc/self/uid_map").write_text("0 12346 1")
print(os.stat("/tmp").st_uid == os.stat(sys.argv[1]).st_uid)
print(folder._why_not("/tmp"), folder._why_not(sys.argv[1]), sep="\\n")
"""


@pytest.mark.one_pair
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make folders of other users")
def test_a_namespace_without_other_users():
    """The host's root and another user look alike there: /tmp is root's, but what else?"""
    with tempfile.TemporaryDirectory(dir="/tmp") as others:
        os.chown(others, 12345, 12345)
        command = [sys.executable, "-P", "-c", IN_A_NAMESPACE, others]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if result.returncode == 77:
        pytest.skip("this system does not let users make namespaces")
    assert result.stdout.splitlines() == ["True", "None", f"{others} is of another user"], result.stderr


# ---- Mutual TLS ------------------------------------------------------------------------------------------------------

HAS_MTLS = "jax_mtls_cert_file" in jax.config.values
needs_mtls = pytest.mark.skipif(not HAS_MTLS, reason="JAX has no mutual TLS before 0.12")

CONNECTS = """
import os, jax
jax.distributed.initialize(initialization_timeout=60)
os.write(1, f"{os.environ['JAX_COORDINATOR_ADDRESS']}\\n".encode())
assert jax.process_count() == 2
if os.environ["JAX_RING_RESTART"] == "0": raise SystemExit(3)
"""


@pytest.fixture
def certificates(tmp_path):
    """Makes a certificate for a name, and returns the variables for it."""

    def make(name):
        here = tmp_path / "certificates"
        here.mkdir()
        (here / "names").write_text(f"subjectAltName={name}\n")
        commands = [
            "req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.pem -subj /CN=ca",
            "req -newkey rsa:2048 -nodes -keyout key.pem -out request.pem -subj /CN=a",
            "x509 -req -in request.pem -CA ca.pem -CAkey ca.key -CAcreateserial -out cert.pem -extfile names",
        ]
        for command in commands:
            try:
                subprocess.run(["openssl", *command.split()], cwd=here, capture_output=True, check=True)
            except FileNotFoundError:
                pytest.skip("there is no openssl to make certificates with")
        files = {"CERT": "cert.pem", "KEY": "key.pem", "CA": "ca.pem"}
        return {f"JAX_MTLS_{name}_FILE": str(here / file) for name, file in files.items()}

    return make


@needs_mtls
@pytest.mark.parametrize(
    ("name", "more", "address"),
    [
        ("URI:spiffe://test/a", {"JAX_MTLS_PEER_URI_PREFIX": "spiffe://test/"}, "unix:/"),
        ("IP:127.0.0.1", {}, "127.0.0.1:"),
    ],
)
def test_mutual_tls(script, certificates, name, more, address):
    env = certificates(name) | more | {"JAX_DISTRIBUTED_VERIFY_SECURE_CREDENTIALS": "1"}
    status, out, err = run(
        "-n", "2", "--max-restarts", "1", "--backoff", "0", script(CONNECTS), env=env, command=MODULE
    )
    assert status == 0, err
    assert all(line.split()[1].startswith(address) for line in out)
    assert len(out) >= 3


@pytest.mark.full
def test_credentials_that_are_demanded_and_not_there(script):
    env = {"JAX_DISTRIBUTED_VERIFY_SECURE_CREDENTIALS": "1"}
    status, out, err = run("-n", "2", script(CONNECTS), env=env, command=MODULE)
    assert status != 0
    assert not out
    assert "the coordination service (pid" in err.splitlines()[-1]
    expected = "Insecure gRPC credentials" if HAS_MTLS else f"install JAX 0.12 or newer, or unset {next(iter(env))}"
    assert expected in err


@pytest.mark.full
@pytest.mark.skipif(HAS_MTLS, reason="JAX has mutual TLS")
def test_a_version_without_mutual_tls(script):
    env = {"JAX_MTLS_CERT_FILE": "/cert", "JAX_MTLS_KEY_FILE": "/key"}
    status, _, err = run("-n", "1", script(CONNECTS), env=env, command=COMMAND)
    assert status == 1
    assert "install JAX 0.12 or newer, or unset JAX_MTLS_CERT_FILE, JAX_MTLS_KEY_FILE" in err
