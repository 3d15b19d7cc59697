"""Nothing that the package reads is run: no pickles, no evaluated text, no shell."""

import ast
import pathlib
from collections.abc import Iterator

import pytest

import jax_ring
import pytest_jax_ring

# multiprocessing sends pickles.
MODULES = {"pickle", "_pickle", "marshal", "shelve", "multiprocessing", "yaml", "dill", "cloudpickle", "joblib", "code"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
OF_MODULES = {("os", "system"), ("os", "popen"), ("subprocess", "getoutput"), ("subprocess", "getstatusoutput")}
KEYWORDS = {"shell", "allow_pickle"}


def what_runs_data(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom):
            names = [(node.module or "", alias.name) for alias in node.names]
            yield from (".".join(name) for name in names if name[0].split(".")[0] in MODULES or name in OF_MODULES)
        elif isinstance(node, ast.Name) and node.id in BUILTINS:
            yield node.id
        elif isinstance(node, ast.Attribute):
            base = node.value.id if isinstance(node.value, ast.Name) else ""
            if (base, node.attr) in OF_MODULES or (base == "builtins" and node.attr in BUILTINS):
                yield f"{base}.{node.attr}"
        elif isinstance(node, ast.keyword) and node.arg in KEYWORDS:
            yield f"{node.arg}="


def test_only_the_users_script_is_run():
    folders = [pathlib.Path(package.__file__).parent for package in (jax_ring, pytest_jax_ring)]
    files = [path for folder in folders for path in folder.rglob("*.py")]
    assert {"worker.py", "plugin.py"} <= {path.name for path in files}
    found = [(path.name, what) for path in sorted(files) for what in what_runs_data(ast.parse(path.read_text()))]
    assert sorted(found) == [("worker.py", "compile"), ("worker.py", "exec")]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("import pickle", "pickle"),
        ("def f():\n  import yaml.loader", "yaml.loader"),
        ("from multiprocessing import shared_memory", "multiprocessing.shared_memory"),
        ("from os import system", "os.system"),
        ("f = eval", "eval"),
        ("subprocess.run(x, shell=True)", "shell="),
        ("np.load(x, allow_pickle=True)", "allow_pickle="),
        ("os.popen(x)", "os.popen"),
        ("builtins.exec(x)", "builtins.exec"),
    ],
)
def test_each_form_is_found(text, what):
    assert list(what_runs_data(ast.parse(text))) == [what]
