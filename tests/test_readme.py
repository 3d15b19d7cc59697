"""The Python programs in the README run as they stand there."""

import pathlib
import re

from helpers import run_python

README = pathlib.Path(__file__).parent.parent / "README.md"


def python_blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)


def test_the_first_program_and_its_explanation():
    first, fragment, explanation = python_blocks()
    printed = re.search(r"print\(total.*# (.*)", first)[1]
    result = run_python(f"{first}\n{explanation}", devices=8)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[0] == printed
    assert "ring_psum" in result.stdout
    assert "served by" in result.stdout
    assert "..." in fragment  # which shows that it is one
