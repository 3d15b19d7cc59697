"""Jobs where /dev/shm or /proc is not as usual: a right result, or an error that says what is wrong."""

import pytest
from launched import SUMS, launched, mounted

pytestmark = [pytest.mark.full, pytest.mark.one_pair]  # jobs of several processes; native code

RIGHT = ["right"] * 4
# /dev without shm.
NO_SHM = """
dev=$(mktemp -d)
mount -t tmpfs tmpfs "$dev"
for name in null zero full random urandom; do touch "$dev/$name"; mount --bind "/dev/$name" "$dev/$name"; done
mount --rbind "$dev" /dev
"""
CASES = {
    "64 KiB": ("mount -t tmpfs -o size=64k tmpfs /dev/shm", RIGHT),
    "full": (
        "mount -t tmpfs -o size=1m tmpfs /dev/shm; head -c 2m /dev/zero > /dev/shm/full 2>/dev/null || true",
        ["RESOURCE_EXHAUSTED", "/dev/shm", "No space left on device"],
    ),
    "read-only": (
        "mount -t tmpfs -o ro tmpfs /dev/shm",
        ["FAILED_PRECONDITION", "/dev/shm must be a folder in which this user can write"],
    ),
    "absent": (NO_SHM, RIGHT),
    "no /proc": ("mount -t tmpfs tmpfs /proc", RIGHT),
}


@pytest.mark.parametrize("case", CASES)
def test_a_job(tmp_path, case):
    mounts, expected = CASES[case]
    path = tmp_path / "a job.py"
    path.write_text(SUMS)
    status, out, err = launched(path, within=mounted(mounts))
    lines = [line for line in out if line[4:].startswith(("4 ", "300000 "))]
    assert status == 0, err
    assert len(lines) == 4, (out, err)
    if expected is RIGHT:
        assert [line.split()[-1] for line in lines] == RIGHT
    else:
        assert all(text in line for text in expected for line in lines), lines


# Rank 1 is killed in the first generation, when all have made a commit.
ELASTIC = """
import os, signal
import jax
jax.distributed.initialize()
import jax_ring
@jax_ring.elastic.run()
def train(state):
    print("begins at", state.step, flush=True)
    for _ in range(2):
        state.step += 1
        state.commit()
    if (os.environ["JAX_RING_GENERATION"], os.environ["JAX_PROCESS_ID"]) == ("0", "1"):
        os.kill(os.getpid(), signal.SIGKILL)
    state.commit()
train(jax_ring.elastic.State(step=0))
"""


@pytest.mark.parametrize(("mounts", "keeps"), [("true", True), (CASES["no /proc"][0], False)])
def test_an_elastic_job_says_that_it_keeps_no_commits(tmp_path, mounts, keeps):
    path = tmp_path / "job.py"
    path.write_text(ELASTIC)
    status, out, err = launched(path, "--max-restarts", "1", within=mounted(mounts))
    assert status == 0, err
    assert out.count("[1] begins at 0") == (1 if keeps else 2), (out, err)
    assert err.count("no commits are kept, the job begins anew after a loss: /proc is not mounted here.") == (
        0 if keeps else 2
    ), err


# Rank 1 takes part once rank 0 has looked at the memory that it has made for both.
LOOKS = """
import glob, os, pathlib, stat, threading, time
from jax_ring.launcher import protocol
looked = pathlib.Path(__file__).with_name("looked")
def look():
    while not (names := glob.glob(f"/dev/shm/jax_ring-{protocol.memory_prefix()}*")):
        time.sleep(0.01)
    print("mode %o" % stat.S_IMODE(os.stat(names[0]).st_mode), flush=True)
    looked.touch()
if os.environ["JAX_PROCESS_ID"] == "0":
    threading.Thread(target=look).start()
"""
AWAITS = """
    while os.environ["JAX_PROCESS_ID"] != "0" and not looked.exists():
        time.sleep(0.01)
    try:"""


def test_nobody_else_may_open_the_memory_of_a_job(tmp_path):
    """Whatever the user lets others do with new files."""
    path = tmp_path / "job.py"
    path.write_text(SUMS.replace("mesh = ", f"{LOOKS}\nmesh = ", 1).replace("\n    try:", AWAITS))
    status, out, err = launched(path, within=["sh", "-c", 'umask 000; exec "$@"', "sh"])
    assert status == 0, err
    assert [line[4:] for line in out if "mode" in line] == ["mode 600"], out
    assert sum("right" in line for line in out) == 4, out
