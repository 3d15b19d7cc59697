"""The commands of docs/elastic.md for Slurm and Kubernetes, with stand-ins for what runs them."""

import os
import pathlib
import re
import shlex
import stat
import subprocess
import sys

import pytest
from launches import reserved_ports

pytestmark = [pytest.mark.full, pytest.mark.one_pair]  # a job for each scheduler; the launcher is Python's

PAGE = (pathlib.Path(__file__).parents[2] / "docs/elastic.md").read_text()
NUM_HOSTS = 3
# Each host may listen at any of the addresses, and takes the first that is free.
ADDRESSES = [f"127.0.0.{i + 1}" for i in range(NUM_HOSTS)]
SCRIPT = """
import jax
jax.distributed.initialize()
print("process", jax.process_index(), "of", jax.process_count(), jax.local_device_count(), flush=True)
"""
STAND_INS = {
    "scontrol": f'[ "$1 $2 $3" = "show hostnames nodes[1-3]" ] && printf "%s\\n" {" ".join(ADDRESSES)}',
    # Starts the command once for each node, with the variables that a task has.
    "srun": """
while [ "${1#--}" != "$1" ]; do echo "$1" >> options; shift; done
for id in 0 1 2; do
    SLURM_NODEID=$id SLURM_PROCID=$id SLURM_LOCALID=0 SLURM_STEP_NODELIST="$SLURM_JOB_NODELIST" "$@" &
done
wait
""",
    "kubectl": '[ "$1 $2 $3 $4" = "create secret generic train" ] && printf %s "${5#--from-literal=secret=}" > secret',
    "python": f'exec {shlex.quote(sys.executable)} -P "$@"',
}  # fmt: skip


@pytest.fixture
def port():
    """Instead of the page's, at which another test's launchers may be."""
    with reserved_ports(1) as (port,):
        yield port


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "bin").mkdir()
    for name, text in STAND_INS.items():
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def environment(folder, variables):
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "SLURM_"))}
    return inherited | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "JAX_PLATFORMS": "cpu"} | variables


def section(title: str) -> str:
    return PAGE.partition(f"### {title}\n")[2].partition("\n### ")[0]


def assert_all_are_there(output: str) -> None:
    found = sorted(re.findall(r"process (\d) of (\d) (\d)$", output, re.MULTILINE))
    assert found == [(str(i), str(NUM_HOSTS), "1") for i in range(NUM_HOSTS)], output


def test_slurm(folder, port):
    command = re.search(r"```bash fragment\n(.*?)```", section("Slurm"), re.DOTALL)[1].replace("-n 4", "-n 1")
    command = command.replace(":29400", f":{port}")
    variables = {
        "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "nodes[1-3]", "SLURM_NNODES": str(NUM_HOSTS), "SLURM_NTASKS": "3",
    }  # fmt: skip
    result = subprocess.run(
        ["sh", "-c", command], cwd=folder, env=environment(folder, variables), stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout
    assert_all_are_there(result.stdout)
    assert "--no-kill" in (folder / "options").read_text()


def test_kubernetes(folder, port):
    manifest = section("Kubernetes")
    makes_secret = re.search(r"```bash fragment\n(.*?)```", manifest, re.DOTALL)[1]
    subprocess.run(["sh", "-ec", makes_secret], cwd=folder, env=environment(folder, {}), check=True)
    (variable,) = re.findall(r"- name: (\w+)\n +valueFrom: \{secretKeyRef: \{name: train, key: secret\}\}", manifest)
    (command,) = re.findall(r"- >-\n\s+(exec .*?)```", manifest, re.DOTALL)
    command = " ".join(command.split()).replace("-n 4", "-n 1")
    for i, address in enumerate(ADDRESSES):
        command = command.replace(f"train-{i}.train:29400", f"{address}:{port}")
    pods = [
        subprocess.Popen(
            ["sh", "-c", command], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=environment(
                folder,
                {
                    "KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "443",
                    "JOB_COMPLETION_INDEX": str(i), "HOSTNAME": f"train-{i}",
                    variable: (folder / "secret").read_text(),
                },
            ),
        )
        for i in range(NUM_HOSTS)
    ]  # fmt: skip
    try:
        outputs = [pod.communicate(timeout=120)[0] for pod in pods]
    finally:
        for pod in pods:
            pod.kill()
    assert [pod.returncode for pod in pods] == [0] * NUM_HOSTS, outputs
    assert_all_are_there("".join(outputs))
