"""A job that has made commits does not begin anew when those who have them are lost: it ends, and says so."""

import subprocess
import sys

import pytest
from launches import reserved_ports

TIME_LIMIT = 120
# Commits until another host comes. Then rank 0, or its launcher, is killed as it begins to hand on what is committed.
TRAINING = """
import os, signal, sys, time
import jax
jax.distributed.initialize()
import jax_ring, numpy as np
from jax_ring.elastic import generation
number = os.environ["JAX_RING_GENERATION"]
def die(*_):
    os.kill(os.getppid() if sys.argv[1] == "launcher" else os.getpid(), signal.SIGKILL)
    time.sleep(60)
if (number, os.environ["JAX_PROCESS_ID"]) == ("1", "0"):
    generation.Exchange._run = die
@jax_ring.elastic.run()
def train(state):
    print("generation", number, "begins at", state.step, flush=True)
    while number == "0":
        state.step += 1
        state.commit()
        if state.step == 3:
            print("has made 3", flush=True)
        time.sleep(0.05)
train(jax_ring.elastic.State(w=np.zeros(4), step=0))
"""


@pytest.mark.full
@pytest.mark.parametrize("killed", ["process", "launcher"])
def test_who_has_all_commits_is_killed_while_a_host_comes(killed, tmp_path, secret, monkeypatch):
    (script := tmp_path / "train.py").write_text(TRAINING)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    with reserved_ports(2) as ports:
        addresses = ",".join(f"127.0.0.1:{port}" for port in ports)
        command = [sys.executable, "-P", "-m", "jax_ring.launch", "-n", "1", "--nnodes", "1:2", "--join-timeout", "1"]
        command += ["--coordinator", addresses, str(script), killed]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        with subprocess.Popen(command, **pipes) as first:
            for line in first.stdout:
                if "has made 3" in line:
                    break
            second = subprocess.run(command, **pipes, timeout=TIME_LIMIT, check=False)
            first.communicate(timeout=TIME_LIMIT)
    assert "begins at" not in second.stdout
    assert "and the one before are lost. The hosts that had them have gone" in second.stdout
    assert (first.returncode != 0, second.returncode) == (True, 1), second.stdout
