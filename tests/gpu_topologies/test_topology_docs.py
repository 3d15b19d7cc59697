"""The programs of docs/compile_for_gpus.md run as they stand there, and print what it says."""

import pathlib
import re

import pytest
from helpers import run_python

pytestmark = pytest.mark.one_pair  # other modules cover what XLA's passes do with calls

ROOT = pathlib.Path(__file__).parent.parent.parent


def test_the_programs_run(monkeypatch):
    monkeypatch.chdir(ROOT)  # the paths in it are relative to the repository
    text = (ROOT / "docs" / "compile_for_gpus.md").read_text()
    first, second = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    result = run_python(f"{first}\n{second}", devices=1)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    # Two dtypes, the gradients' and the loss's, are each scattered and gathered within a host.
    assert lines[0] == "4 calls of jax_ring"
    assert re.fullmatch(r"[1-9]\d* MiB besides parameters and results", lines[1])
    assert "jax_ring within hosts, XLA across 2 hosts" in result.stdout
    assert lines[-1] == re.search(r"print\(call.served_by\)  # (.*)", second)[1]
