"""The build asks nvcc what it can do: an old one is refused, and GPUs that it does not know are left out."""

import pathlib
import re
import shutil
import subprocess

import pytest

TOOLKIT = pathlib.Path(__file__).parents[2] / "ffi/cuda/toolkit.cmake"

pytestmark = pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake")


@pytest.fixture
def configure(tmp_path):
    """Runs the build's questions against an nvcc that answers as told; returns what CMake says."""

    def run(release, known, named=""):
        nvcc = tmp_path / "nvcc"
        answers = "\n".join(f"compute_{each}" for each in known)
        nvcc.write_text(
            f'#!/bin/sh\n[ $1 = --version ] && echo "Cuda compilation tools, {release}" || printf "{answers}\\n"\n'
        )
        nvcc.chmod(0o755)
        script = tmp_path / "script.cmake"
        script.write_text(
            f'cmake_minimum_required(VERSION 3.20)\ninclude("{TOOLKIT}")\n'
            f'jax_ring_nvcc_version("{nvcc}" version why_not)\n'
            'message("version [${version}] ${why_not}")\n'
            f'set(architectures "{named}")\n'
            f'jax_ring_cuda_architectures("{nvcc}" architectures)\n'
            'message("architectures [${architectures}]")\n'
        )
        done = subprocess.run(["cmake", "-P", script], capture_output=True, text=True, check=False)
        return re.sub(r"\s+", " ", done.stdout + done.stderr)

    return run


@pytest.mark.parametrize(
    ("known", "architectures"),
    [
        ((75, 80, 86, 90, 100, 103, 120), "80-real;90-real;100"),
        ((50, 75, 80, 86, 90), "80-real;90"),
        ((100, 110, 120), "100"),
    ],
)
def test_the_architectures_that_nvcc_knows(configure, known, architectures):
    assert f"architectures [{architectures}]" in configure("release 13.0, V13.0.88", known)


def test_named_architectures_stay_as_they_are(configure):
    assert "architectures [86;90a-real;native]" in configure("release 12.4", (86, 90), "86;90a-real;native")


def test_a_named_architecture_that_nvcc_does_not_know_is_refused(configure):
    said = configure("release 12.4", (80, 90), "80-real;100")
    assert "names 100." in said
    assert "compiles for 80, 90." in said


def test_an_nvcc_that_knows_none_is_refused(configure):
    said = configure("release 13.0", (50, 60))
    assert "compiles for none of the architectures 80, 90 and 100, but for 50, 60." in said


@pytest.mark.parametrize("release", ["12.4", "12.10", "13.0", "14.2"])
def test_versions_that_can_build(configure, release):
    assert f"version [{release}] " in configure(f"release {release}, V{release}.131", (90,))


def test_an_older_version_is_refused(configure):
    said = configure("release 12.3, V12.3.107", (80, 90))
    assert "version [] " in said
    assert "is of CUDA 12.3. The kernels need 12.4 or newer." in said


def test_what_is_no_nvcc_is_refused(configure):
    assert "does not tell its version" in configure("of the wrong kind", (90,))
