"""The code of README, CONTRIBUTING and docs/ runs as it stands there, but for the blocks that are marked as fragments.

A mark is the word "fragment" after the language of a block: code that is a part of something, or needs what a test has
not (a GPU, a network, an hour). All other Python blocks of a page are one program. Lines in an HTML comment that begins
with <!--setup belong to it, too. Commands run in a folder that looks like the root of the repository.
"""

import os
import pathlib
import re
import subprocess
import sys
from typing import NamedTuple

import pytest
from helpers import run_python

import jax_ring
import pytest_jax_ring

pytestmark = pytest.mark.one_pair  # does not depend on JAX's version

ROOT = pathlib.Path(__file__).parents[2]
# Of these CI runs the commands: .ci/run.
RUN_BY_CI = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "docs/install.md"]
PAGES = [*RUN_BY_CI[:2], *sorted((ROOT / "docs").rglob("*.md"))]
PLAIN = ["README.md", "docs/replacing_psum.md"]  # the plain command runs the code of these
# Their blocks have tests of their own, or are cells that run when the site is built.
ELSEWHERE = {"compile_for_gpus.md": "gpu_topologies/test_topology_docs.py", "tutorial.md": "the site's build"}


class Block(NamedTuple):
    language: str
    mark: str
    text: str


def blocks_of(page: pathlib.Path) -> list[Block]:
    pattern = r"^(?:```(\w+)(?: (\w+))?|<!--(setup))\n(.*?)^(?:```|-->)$"
    found = re.findall(pattern, page.read_text(), re.MULTILINE | re.DOTALL)
    return [Block(language or "python", mark, text) for language, mark, _, text in found]


def programs() -> list:
    """Each page with Python code that runs, and each command line, but for those that CI runs."""
    cases, of_ci = [], "".join(page.read_text() for page in RUN_BY_CI)
    for page in PAGES:
        if page.name in ELSEWHERE:
            continue
        blocks = [block for block in blocks_of(page) if not block.mark]
        name = str(page.relative_to(ROOT))
        marks = () if name in PLAIN else pytest.mark.full
        if python := [block.text for block in blocks if block.language == "python"]:
            cases.append(pytest.param("python", "\n".join(python), id=name, marks=marks))
        for block in blocks if page not in RUN_BY_CI else ():
            if block.language == "bash":
                for line in block.text.splitlines():
                    command = line.partition("  #")[0].strip()
                    if command not in of_ci:
                        cases.append(pytest.param("bash", command, id=f"{name}: {command}", marks=marks))
    return cases


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A folder with what commands name by paths that are relative to the repository, to which they may write."""
    for name in ("examples", "benchmarks", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    # Not a link to the interpreter, which would look for its packages next to the link.
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("root")
@pytest.mark.parametrize(("language", "code"), programs())
def test_code_runs(language, code):
    if language == "python":
        result = run_python(code, devices=8)
    else:
        result = subprocess.run(
            ["bash", "-ec", code],
            env={**os.environ, "PYTHONSAFEPATH": "1"}, capture_output=True, text=True, timeout=250, check=False,
        )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    for printed in re.findall(r"^print\(.*\)  # (.*)$", code, re.MULTILINE):
        assert printed in result.stdout.splitlines()


def test_the_api_pages_have_all_public_names():
    text = "\n".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    documented = set(re.findall(r"^\.\. auto(?:function|class):: (\w+)$", text, re.MULTILINE))
    modules = (jax_ring, jax_ring.zero, jax_ring.elastic, pytest_jax_ring)
    assert {name for module in modules for name in module.__all__} - {"zero", "elastic"} <= documented


def test_marks_are_known():
    for page in PAGES:
        assert {block.mark for block in blocks_of(page)} <= {"", "fragment"}, page
        assert "~~~" not in page.read_text(), f"{page}: blocks are fenced by ``` so that they are found"


def test_a_block_that_fails_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 1\n```\n<!--setup\ny = x\n-->\n```python fragment\n...\n```\n```bash\nfalse\n```\n")
    assert blocks_of(page) == [
        Block("python", "", "x = 1\n"), Block("python", "", "y = x\n"), Block("python", "fragment", "...\n"),
        Block("bash", "", "false\n"),
    ]  # fmt: skip
