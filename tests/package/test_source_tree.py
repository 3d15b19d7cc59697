"""jax_ring in its source tree: it works from there once it is installed, and says so if it is not or is out of date."""

import importlib.metadata
import json
import pathlib
import shutil
import subprocess
import sys

import pytest
from tiers import full_but

from jax_ring import _ffi_cpu, _ffi_cuda
from jax_ring._fingerprint import fingerprint

pytestmark = pytest.mark.one_pair  # does not depend on JAX's version

ROOT = pathlib.Path(__file__).parents[2]

COMMANDS = {
    "report": ["-m", "jax_ring"],
    "import": ["-c", "import jax_ring; print(jax_ring.ring_psum)"],
    "launch": ["-m", "jax_ring.launch", "-n", "1", "tests/nothing.py"],
}


def is_editable() -> bool:
    """Whether this Python has jax_ring as the README installs it."""
    text = importlib.metadata.distribution("jax-ring").read_text("direct_url.json") or "{}"
    return json.loads(text).get("dir_info", {}).get("editable", False)


@pytest.mark.full
@pytest.mark.parametrize("command", COMMANDS)
def test_from_the_root(command):
    # Here the current folder, with the sources, comes first on Python's path.
    result = subprocess.run(
        [sys.executable, *COMMANDS[command]], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    if not is_editable():  # a wheel: the source tree has no native module
        assert result.returncode == 1
        assert "its native module is not built" in result.stderr
        assert f"{sys.executable} -m pip install --editable '{ROOT}'" in result.stderr
    elif command == "launch":
        assert result.returncode == 2
        assert "there is no file 'tests/nothing.py'" in result.stderr
    else:
        assert result.returncode == 0, result.stderr
        assert ("versions" if command == "report" else "ring_psum") in result.stdout


@pytest.fixture
def source_tree(tmp_path):
    """A copy of the sources, with the native module beside them, as after an in-place build."""
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    for folder in ("jax_ring", "ffi"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for module in (_ffi_cpu, _ffi_cuda):
        shutil.copy(module.__file__, tmp_path / "jax_ring")
    return tmp_path


def import_from(tree: pathlib.Path) -> subprocess.CompletedProcess:
    """Imports jax_ring from `tree`, past the import hook of an editable installation."""
    code = (
        f"import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'Scikit' not in type(f).__name__]; "
        f"sys.path.insert(0, {str(tree)!r}); import jax_ring; print(jax_ring.__file__)"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


def test_an_up_to_date_source_tree(source_tree):
    result = import_from(source_tree)
    assert result.stdout.strip() == str(source_tree / "jax_ring" / "__init__.py"), result.stderr


@pytest.mark.parametrize("change", full_but(["edit", "add", "rename"], ["edit"]))
def test_a_stale_native_module_is_refused(source_tree, change):
    # As after a `git pull` that changes the native sources.
    header = source_tree / "ffi" / "collective" / "fold.h"
    if change == "edit":
        header.write_text(header.read_text() + "\n")
    elif change == "add":
        (header.parent / "new.h").write_text("#pragma once\n")
    else:
        header.rename(header.with_name("folds.h"))
    result = import_from(source_tree)
    assert result.returncode == 1
    assert f"is not built from the native sources in {source_tree / 'ffi'}" in result.stderr
    assert _ffi_cpu.fingerprint() in result.stderr
    assert result.stderr.rstrip().endswith(f"{sys.executable} -m pip install --editable '{source_tree}'")


@pytest.mark.full
def test_native_tests_are_no_part_of_the_module(source_tree):
    (source_tree / "ffi" / "tests" / "collective" / "fold_test.cc").write_text("")
    assert import_from(source_tree).returncode == 0


def test_a_source_tree_without_native_module(source_tree):
    for module in (source_tree / "jax_ring").glob("*.so"):
        module.unlink()
    result = import_from(source_tree)
    assert result.returncode == 1
    assert "its native module is not built for this Python" in result.stderr
    assert f"{sys.executable} -m pip install --editable '{source_tree}'" in result.stderr


def test_the_tests_run_with_what_is_in_the_tree():
    assert _ffi_cpu.fingerprint() == fingerprint(ROOT / "ffi")
