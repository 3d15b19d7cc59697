"""The program that a process runs finds what it would find under Python."""

import os
import pathlib
import py_compile
import subprocess
import sys
import zipfile

import pytest
from launches import run

from jax_ring.launcher import worker

PROGRAM = """
import atexit, os, pickle, sys
class Kept: pass
@atexit.register
def at_exit():
    print(type(pickle.loads(pickle.dumps(Kept()))))
def names(): return sorted(vars(sys.modules["__main__"]))
os.chdir("/")
print(__name__, __file__, __package__, __spec__ and __spec__.name, type(__builtins__), sys.argv)
print(names(), sys.path[0])
"""


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """One program in each form that Python takes."""
    monkeypatch.chdir(tmp_path)
    pathlib.Path("script.py").write_text(PROGRAM)
    py_compile.compile("script.py", "compiled.pyc")
    os.symlink("folder/__main__.py", "link.py")
    for folder in ("folder", "package"):
        pathlib.Path(folder).mkdir()
        pathlib.Path(folder, "__main__.py").write_text(PROGRAM)
    pathlib.Path("package", "__init__.py").touch()
    with zipfile.ZipFile("archive.zip", "w") as archive:
        archive.write("script.py", "__main__.py")


def output_of(*arguments):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    result = subprocess.run(
        [sys.executable, *arguments, "-x", "y"],
        capture_output=True, text=True, env=environment, timeout=120, check=False,
    )  # fmt: skip
    return result.returncode, result.stdout, result.stderr


@pytest.mark.parametrize(
    "program", ["script.py", "link.py", "compiled.pyc", "folder", "archive.zip", "-m script", "-m package", "absent.py"]
)
def test_as_under_python(programs, program):
    *option, name = program.split()
    found = output_of("-P", worker.__file__, "alone", "module" if option else "script", name)
    assert found == output_of(*option, name)


def test_the_launcher_takes_a_folder(programs):
    status, out, err = run("-n", "1", "folder")
    assert status == 0, err
    assert any(line.startswith("[0] __main__ ") for line in out)


@pytest.mark.parametrize("imported_by", ["script.py", "sitecustomize.py"])
def test_initialize_is_replaced_whoever_imports_jax(script, tmp_path, imported_by):
    script("", "script.py")
    (tmp_path / "jax").mkdir()  # in place of JAX
    script("import jax.distributed", "jax/__init__.py")
    script("def initialize(): pass", "jax/distributed.py")
    script("import jax", imported_by)
    with open(tmp_path / "script.py", "a") as file:
        file.write("\nimport jax; print(hasattr(jax.distributed.initialize, '__wrapped__'))")
    result = subprocess.run(
        [sys.executable, "-P", worker.__file__, str(os.getpid()), "script", str(tmp_path / "script.py")],
        capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(tmp_path)}, timeout=120, check=False,
    )  # fmt: skip
    assert result.stdout == "True\n", result.stderr
