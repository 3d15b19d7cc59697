"""`python -m jax_ring` reports what is installed and which options are active."""

import os
import subprocess
import sys

import jax
import pytest

import jax_ring
from jax_ring import __main__ as report
from jax_ring import runtime


def run(**environment):
    result = subprocess.run(
        [sys.executable, "-P", "-m", "jax_ring"],
        env={**os.environ, **environment}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout


def value_of(name, text):
    (line,) = (line for line in text.splitlines() if line.split()[:1] == [name] and line.startswith(" "))
    return line.split(None, 1)[1]


def test_report():
    text = run()
    for name, version in {"jax_ring": jax_ring.__version__, "jax": jax.__version__}.items():
        assert value_of(name, text) == version
    assert "loaded, instruction set" in value_of("_ffi_cpu", text)
    assert value_of("JAX_RING_TIMEOUT_S", text) == "not set: 60 seconds"
    assert text.index("served\n") < text.index("  cpu", text.index("served\n"))
    assert text.rstrip().splitlines()[-2].split() == ["cpu", "yes"]


def test_a_platform_without_devices():
    text = run(JAX_PLATFORMS="cuda")
    assert value_of("default", text).startswith("JAX_PLATFORMS='cuda': none")
    assert text.rstrip().splitlines()[-2].split(None, 1) == ["cpu", "no: JAX has no such devices"]


@pytest.mark.parametrize(
    ("options", "given"),
    [
        (["-O"], ["-O", "-m", "jax_ring", "run", "-m", "jax_ring"]),
        (["-X", "dev", "-O"], ["-X", "dev", "-Om", "jax_ring", "run", "a.py"]),
        (["-I"], ["-I", "-mjax_ring", "run", "a.py"]),
        ([], ["a.py", "-m", "other"]),
    ],
)
def test_options_of_python(options, given, monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, *given])
    assert report._options_of_python() == options


@pytest.mark.full
def test_active_options():
    text = run(JAX_RING_TIMEOUT_S="2.5", JAX_RING_ISA="baseline", JAX_RING_STRICT="1")
    assert value_of("JAX_RING_TIMEOUT_S", text) == "'2.5': 2.5 seconds"
    assert value_of("JAX_RING_ISA", text) == "'baseline': baseline"
    assert value_of("JAX_RING_STRICT", text) == "'1': fallback to XLA's collectives is an error"
    assert value_of("JAX_RING_SHARED_GPU", text) == "not set: processes may not share a GPU"
    assert value_of("JAX_RING_HOST_ID", text) == "not set: hosts are told apart by boot id, /dev/shm and user"
    assert "do not use multicast memory" in value_of("JAX_RING_MULTICAST", text)
    named = run(JAX_RING_HOST_ID="here", JAX_RING_SHARED_GPU="1", JAX_RING_MULTICAST="1")
    assert value_of("JAX_RING_MULTICAST", named) == "'1': groups of GPUs of one process use multicast memory"
    assert value_of("JAX_RING_SHARED_GPU", named) == "'1': processes may share a GPU"
    assert value_of("JAX_RING_HOST_ID", named) == "'here': processes with equal names share memory"
    assert value_of("JAX_RING_TUNING", text) == "not set: built-in thresholds for algorithm='auto'"


@pytest.mark.one_pair
def test_ranks_are_spread_where_no_core_is_to_spare():
    """One core has no other, and with more cores than ranks the system's placement stays."""
    cores = len(os.sched_getaffinity(0))
    stays = value_of("cores", run(JAX_NUM_CPU_DEVICES=str(cores - 1 if cores > 1 else 2)))
    assert stays == "ranks stay where the system runs them"
    if cores > 1:
        assert value_of("cores", run(JAX_NUM_CPU_DEVICES=str(cores))) == "CPU ranks are spread over them"


def test_why_gpus_are_not_served(monkeypatch, tmp_path):
    monkeypatch.setattr(report, "DRIVER", tmp_path / "version")
    monkeypatch.setattr(runtime, "cuda_kernels", None)
    monkeypatch.setattr(runtime, "why_no_cuda", "it was not built")
    assert "there is no NVIDIA driver" in report.served("cuda")
    assert "the CUDA kernels are not loaded (it was not built)" in report.served("cuda")
    (tmp_path / "version").write_text("")
    assert "there is no NVIDIA driver" not in report.served("cuda")


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="for a machine without a GPU")
def test_no_gpu_here():
    assert report.served("cuda").startswith("no: ")
    assert "JAX has no such devices" in report.served("cuda")
