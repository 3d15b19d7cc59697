"""Programs of others, unmodified, have the bits of XLA's collectives, and none of these are left."""

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from programs import registry, sources, worker

WORKER = pathlib.Path(worker.__file__)


@pytest.mark.full
@pytest.mark.parametrize("name", ["flax_batch_norm", "equinox_attention", "optax_lbfgs"])
def test_the_bits_of_xla(name):
    for package in {"optax", name.partition("_")[0]}:
        pytest.importorskip(package)
    result = subprocess.run([sys.executable, WORKER, name], capture_output=True, text=True, timeout=280, check=False)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert (found["different"], found["left"], found["finite"]) == (0, {}, True), found
    assert sum(found["replaced"].values()) == sum(found["before"].values()) >= 3
    assert found["arrays"] >= 3


def test_what_differs_is_found():
    expected = {"a": np.float32([1, 2]), "b": np.float32([4, 0])}
    found = worker.compare({"a": np.float32([1, 2]), "b": np.float32([4, -0.0])}, expected)
    assert (found["different"], found["largest"]) == (1, 0.0)
    found = worker.compare({"a": np.float32([1, 2]), "b": np.float32([np.nan, 0])}, expected)
    assert found["different"] == 1
    assert np.isnan(found["largest"])


def test_every_source_has_a_version_and_a_hash():
    registry.load_all()
    named = {program.source for program in registry.PROGRAMS.values()}
    pinned = {f"{name}-{version}" for name, version in sources.versions().items()} | set(sources.versions())
    assert named <= pinned | {*sources.OF_ENVIRONMENT}
    assert sources.REQUIREMENTS.read_text().count("==") == len(sources.versions())
