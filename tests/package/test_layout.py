"""The packages of jax_ring: imports go one way between them, and the public names are the documented ones."""

import ast
import collections
import importlib
import pathlib
import re
import subprocess
import sys
import types

import pytest
from helpers import run_python

import jax_ring

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = pathlib.Path(jax_ring.__file__).parent

# A module may import from its own package and from those of lower layers.
LAYERS = [
    {"_compat", "foreign_errors", "_fingerprint", "_ffi_cpu", "_ffi_cuda", "_cuda_kernels"},
    {"options", "runtime", "shard_tree"},
    {"launcher"},
    {"distributed"},
    {"lowering"},
    {"collectives", "inspect"},
    {"training"},
    {"progress"},
    {"zero", "elastic", "launch", "__main__", "_install"},
    {"__init__"},
]
LAYER_OF = {name: i for i, names in enumerate(LAYERS) for name in names}


def part_of(path: pathlib.Path) -> str:
    """The package, or the module outside of any package, that a file belongs to."""
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imported_parts(path: pathlib.Path) -> set[str]:
    """The packages of jax_ring, or modules outside of any package, that a file imports from, at any place in it."""
    parts = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        else:
            continue
        parts |= {module.split(".")[1] for module in modules if module.startswith("jax_ring.")}
    return parts


def test_imports_between_packages_go_one_way():
    files = list(PACKAGE.rglob("*.py"))
    assert {part_of(path) for path in files} <= set(LAYER_OF)
    wrong = [
        f"{path.relative_to(PACKAGE)} imports {part}"
        for path in files
        for part in imported_parts(path) - {part_of(path)}
        if LAYER_OF[part] >= LAYER_OF[part_of(path)]
    ]
    assert not wrong
    # The rule would hold for a package that nothing imports: that the chain exists is a part of it.
    for upper, lower in (("training", "collectives"), ("collectives", "lowering"), ("lowering", "distributed")):
        assert any(lower in imported_parts(path) for path in (PACKAGE / upper).rglob("*.py"))


def modules_imported_by(path: pathlib.Path, modules: set[str]) -> set[str]:
    """The modules of jax_ring that a file names in imports, at any place in it, also those for types alone.

    `from jax_ring.x import y` names the module jax_ring.x.y if there is one, and else jax_ring.x.
    """
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            imported |= {name if name in modules else node.module for name in names}
    return imported & modules


def circles(imports: dict[str, set[str]]) -> list[tuple[str, ...]]:
    """Sets of modules each of which imports the others, directly or not."""
    reached: dict[str, set[str]] = {}
    for module in imports:
        pending, reached[module] = list(imports[module]), set()
        while pending:
            if (each := pending.pop()) not in reached[module]:
                reached[module].add(each)
                pending += imports.get(each, ())  # native modules import none
    of_each = {module: {m for m in found if module in reached.get(m, ())} for module, found in reached.items()}
    return sorted({tuple(sorted(members)) for members in of_each.values() if members})


def test_circles_are_found():
    imports = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": {"e"}, "e": set(), "f": {"f"}}
    assert circles(imports) == [("a", "b", "c"), ("f",)]


def test_no_modules_import_each_other():
    """Nor for their types, nor within a function: then neither can be read without the other."""
    paths = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        paths[".".join(["jax_ring", *(part for part in parts if part != "__init__")])] = path
    known = set(paths) | {f"jax_ring.{name}" for name in LAYERS[0]}
    imports = {module: modules_imported_by(path, known) for module, path in paths.items()}
    assert imports["jax_ring.lowering.plan"] >= {"jax_ring.lowering.call", "jax_ring.runtime"}
    assert circles(imports) == []


def test_private_names_of_jax_are_in_one_module():
    """The coordinator's server and its clients, which run without the package, have the others."""
    named = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if re.search(r"^\s*(from|import) (jax\._src|jaxlib import _)", path.read_text(), re.MULTILINE)
    }
    assert named == {"_compat.py", "launcher/coordinator/client.py", "launcher/coordinator/server.py"}


# What regular expressions read, by file. Of jax_ring's own messages it is the number of a failure, and nothing else.
READ_BY_EXPRESSIONS = {
    "_compat.py": "names that JAX gives scopes, and the user's pattern for file names",
    "distributed/xla_timeouts.py": "XLA_FLAGS",
    "foreign_errors.py": "errors of JAX, XLA and Gloo",
    "inspect/compiled.py": "compiled programs",
    "launcher/output.py": "the ends of lines of the processes",
    "runtime.py": "the number of a failure",
}


def test_no_text_of_jax_ring_is_read_but_the_number_of_a_failure():
    """Neither by an expression nor by a search in the text of an exception."""
    with_expressions, with_searches = set(), []
    for path in [*PACKAGE.rglob("*.py"), *(ROOT / "pytest_jax_ring").rglob("*.py")]:
        name = path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else ROOT).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                modules = [getattr(node, "module", None), *(alias.name for alias in node.names)]
                with_expressions |= {name} if "re" in modules else set()
            if isinstance(node, ast.Compare) and any(isinstance(each, ast.In | ast.NotIn) for each in node.ops):
                texts = [each for each in node.comparators if isinstance(each, ast.Call)]
                with_searches += [f"{name}:{node.lineno}" for each in texts if ast.unparse(each).startswith("str(")]
    assert with_expressions == set(READ_BY_EXPRESSIONS)
    assert with_searches == []
    assert re.findall(r"re\.compile\((.*)\)", (PACKAGE / "runtime.py").read_text()) == [r'r"\[failure (\d{1,18})\]"']


def test_the_launcher_and_what_it_runs_do_not_need_jax():
    launcher = PACKAGE / "launcher"
    for path in launcher.rglob("*.py"):
        assert imported_parts(path) <= {"launcher"}, path
        assert not re.search(r"^(import|from) jax\b(?!_ring)", path.read_text(), re.MULTILINE), path
    standard = (
        "import sys, runpy; before = {*sys.modules}; runpy.run_path(sys.argv[1]); "
        "print([name for name in {*sys.modules} - before if 'jax' in name])"
    )
    for name in ("protocol.py", "worker.py", "coordinator/client.py", "coordinator/server.py", "../foreign_errors.py"):
        program = [sys.executable, "-P", "-c", standard, str(launcher / name)]
        result = subprocess.run(program, capture_output=True, text=True, timeout=60, check=False)
        assert result.stdout.strip() == "[]", (name, result.stderr)


def test_every_file_says_what_it_is_for():
    for path in PACKAGE.rglob("*.py"):
        assert ast.get_docstring(ast.parse(path.read_text())), f"{path} has no docstring"


@pytest.mark.parametrize("folder", ["jax_ring", "tests"])
def test_no_folder_has_too_many_files(folder):
    # What tools keep there, where they are started, is in hidden folders.
    files = [path for path in (ROOT / folder).rglob("*") if path.is_file() and path.suffix not in {".pyc", ".so"}]
    names = [path.parent.relative_to(ROOT) for path in files]
    num_files = collections.Counter(str(name) for name in names if not any(part[0] == "." for part in name.parts))
    assert folder in num_files
    assert {name: number for name, number in num_files.items() if number > 15} == {}


def test_dir_shows_public_names_only():
    assert dir(jax_ring) == sorted([*jax_ring.__all__, "__version__"])
    modules = [name for name in dir(jax_ring) if isinstance(getattr(jax_ring, name), types.ModuleType)]
    assert modules == ["elastic", "zero"]


def test_star_import_brings_public_names_only():
    namespace = {}
    exec("from jax_ring import *", namespace)
    assert set(namespace) - {"__builtins__"} == set(jax_ring.__all__)


@pytest.mark.parametrize("name", ["BucketPlan", "Explanation", "FeedbackState", "Override", "ShardedOptimizer"])
def test_types_of_results_are_public(name):
    assert isinstance(getattr(jax_ring, name), type)
    assert name in jax_ring.__all__


def test_documented_module_paths_work():
    zero = importlib.import_module("jax_ring.zero")
    assert zero is jax_ring.zero
    assert callable(importlib.import_module("jax_ring.launch").main)
    # In a program that imports nothing but jax_ring.
    result = run_python("import jax_ring\njax_ring.runtime.forget_gpu_groups()\nprint(jax_ring.zero.sharded_optimizer)")
    assert result.returncode == 0, result.stderr
    assert "sharded_optimizer" in result.stdout
