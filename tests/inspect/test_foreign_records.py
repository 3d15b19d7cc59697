"""Records that another process may write as it likes: whose are read, and what is printed of them."""

import contextlib
import os
import subprocess
import sys

import pytest
from helpers import run_python

from jax_ring import _ffi_cpu
from jax_ring.inspect.recorded import tables_of_host

pytestmark = pytest.mark.one_pair  # native code

# Records these bytes as its own, with the seals of a recorder or without, as the user of this number.
WRITER = """
import fcntl, os, signal, sys
seals, user = map(int, sys.argv[1:])
if user:
    os.setgroups([]), os.setresgid(user, user, user), os.setresuid(user, user, user)
file = os.memfd_create("jax_ring_flight", os.MFD_ALLOW_SEALING)
os.write(file, sys.stdin.buffer.read())
if seals:
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
print(os.getpid(), flush=True)
signal.pause()
"""


# Makes a call, and writes the records of the process to a file.
RECORDED = """
import os, pathlib
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec as P
from jax_ring import ring_psum
mesh = Mesh(jax.devices(), ("i",))
f = jax.shard_map(lambda x: ring_psum(x, "i"), mesh=mesh, in_specs=P("i"), out_specs=P())
jax.jit(f)(jnp.ones(8 * 123)).block_until_ready()
for number in map(int, os.listdir("/proc/self/fd")):
    file = f"/proc/self/fd/{{number}}"
    if os.path.lexists(file) and "jax_ring_flight" in os.readlink(file):
        pathlib.Path({path!r}).write_bytes(pathlib.Path(file).read_bytes())
"""


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    path = tmp_path_factory.mktemp("records") / "records"
    result = run_python(RECORDED.format(path=str(path)))
    assert result.returncode == 0, result.stderr
    return path.read_bytes()


@contextlib.contextmanager
def recording(records: bytes, seals=True, user=0):
    """A process that has written these records; yields its pid."""
    command = [sys.executable, "-I", "-S", "-c", WRITER, str(int(seals)), str(user)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            process.stdin.write(records)
            process.stdin.close()
            yield int(process.stdout.readline())
        finally:
            process.kill()


def table_of(pid: int, **options) -> str:
    found = [table for table in tables_of_host(**options).split("\n\n") if f": pid {pid}\n" in f"{table}\n"]
    return found[0] if found else ""


def test_memory_that_its_owner_may_truncate_is_not_read(records):
    with recording(records) as pid:
        assert "ring_psum of float32[123]" in table_of(pid)
    with recording(records, seals=False) as pid:
        assert not table_of(pid)


def test_texts_are_escaped(records):
    hostile = b"\x1b]0;x\x07\x7f\xc2\x9b2J\xff\xe2\x80\xaen\n\xc3\xa9\0"  # é is shown as itself
    written = records.replace(b"ring_psum of float32[123]"[: len(hostile)], hostile)
    assert written != records
    with recording(written) as pid:
        text = table_of(pid)
    assert r" \x1b]0;x\x07\x7f\xc2\x9b2J\xff\xe2\x80\xaen\x0aé" in text.splitlines()[2]
    assert all(character.isprintable() or character == "\n" for character in text), text


@pytest.mark.parametrize("value", [2**64 - 1, 2**63, 2**62 | 2**31, 0xFFFF_FFFF_FFFF])
@pytest.mark.parametrize("first", [1, 2])  # behind the number that says what this is, and that of the process
def test_numbers_are_checked(records, value, first):
    """Nothing is read beyond the memory, or in a state that there is none of."""
    changed = memoryview(bytearray(records)).cast("Q")
    for i in range(first, (1 << 14) // 8):
        changed[i] = value
    with recording(changed.tobytes()) as pid:
        assert not table_of(pid)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_other_users_are_read_on_demand(records):
    with recording(records, user=65534) as pid:
        assert not table_of(pid)
        assert table_of(pid, of_all_users=True).startswith("user 65534, processes 0: pid ")
        # As one job and process, they could not be told apart.
        with recording(records):
            users = [user for user, _, table in _ffi_cpu.flight_tables_of_host(True) if "float32[123]" in table]
        assert {0, 65534} <= set(users)


# Waits for a reader of a pipe, which it also holds by the name of a flight recorder.
WAITING = """
import os, sys
file = os.open(sys.argv[1], os.O_PATH)
print(os.getpid(), flush=True)
open(sys.argv[1], "w")
"""


def test_what_is_no_memory_is_not_opened(tmp_path):
    """To open something is to use it: it lets go a process that waits for the other end of a pipe."""
    pipe = tmp_path / "jax_ring_flight"
    os.mkfifo(pipe)
    command = [sys.executable, "-I", "-S", "-c", WAITING, str(pipe)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            pid = int(process.stdout.readline())
            for _ in range(20):
                assert table_of(pid) == ""
                with pytest.raises(subprocess.TimeoutExpired):
                    process.wait(0.05)
        finally:
            process.kill()
