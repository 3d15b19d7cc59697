"""Docstrings say what a thing is, and functions that a folder calls of another are annotated."""

import ast
import functools
import pathlib

import jax_ring

PACKAGE = pathlib.Path(jax_ring.__file__).parent
ROOT = pathlib.Path(__file__).parents[2]

# A reader who comes from elsewhere does not know what such a sentence is compared with.
RIDDLES = ("The same", "That of", "Those of", "All but", "And ")


@functools.cache
def trees() -> dict[str, ast.Module]:
    """The modules of the package, by their path in it."""
    paths = sorted(PACKAGE.rglob("*.py"))
    return {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in paths}


def functions_of(node: ast.Module | ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {each.name: each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_docstrings_have_a_subject():
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    plugin = {path.name: ast.parse(path.read_text()) for path in (ROOT / "pytest_jax_ring").glob("*.py")}
    assert plugin
    found = [
        f"{name}:{getattr(node, 'lineno', 1)}: {text.splitlines()[0]}"
        for name, tree in [*trees().items(), *plugin.items()]
        for node in ast.walk(tree)
        if isinstance(node, documented) and (text := ast.get_docstring(node)) and text.startswith(RIDDLES)
    ]
    assert not found, "\n".join(found)


def test_comments_of_the_engines_have_a_subject():
    paths = [path for suffix in ("h", "cc", "cu") for path in (ROOT / "ffi").rglob(f"*.{suffix}")]
    assert len(paths) > 100
    found = []
    for path in paths:
        before = ""
        for number, line in enumerate(path.read_text().splitlines(), 1):
            comment = line.strip()
            if comment.startswith(tuple(f"// {each}" for each in RIDDLES)) and not before.startswith("//"):
                found.append(f"{path.relative_to(ROOT)}:{number}: {comment}")
            before = comment
    assert not found, "\n".join(found)


def folder_of(name: str) -> str:
    return name.rpartition("/")[0]


def file_of(module: str) -> str | None:
    """The file of a module of the package."""
    if module.split(".")[0] != "jax_ring":
        return None
    path = "/".join(module.split(".")[1:])
    return next((file for file in (f"{path}.py", f"{path}/__init__.py".lstrip("/")) if file in trees()), None)


def names_across_folders() -> set[tuple[str, str]]:
    """File and name of what modules of other folders use, and of what the package exports."""
    used: set[tuple[str, str]] = set()
    for user, tree in trees().items():
        modules: dict[str, str] = {}  # by the name under which they are imported
        for node in ast.walk(tree):
            for alias in node.names if isinstance(node, ast.ImportFrom) else ():
                if module := file_of(f"{node.module}.{alias.name}"):
                    modules[alias.asname or alias.name] = module
                elif (file := file_of(node.module or "")) and folder_of(file) != folder_of(user):
                    used.add((file, alias.name))
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                file = modules.get(node.value.id, "")
                if file and folder_of(file) != folder_of(user):
                    used.add((file, node.attr))
    exported = {(name, file) for name, file in ((each, file_of_export(each)) for each in jax_ring.__all__) if file}
    return used | {(file, name) for name, file in exported}


def file_of_export(name: str) -> str | None:
    module = getattr(getattr(jax_ring, name), "__module__", None)
    return file_of(module) if module else None


def unannotated(function: ast.FunctionDef, is_method: bool) -> list[str]:
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    if is_method and not any(ast.unparse(each) == "staticmethod" for each in function.decorator_list):
        positional = positional[1:]
    others = [each for each in (arguments.vararg, arguments.kwarg) if each is not None]
    return [each.arg for each in (*positional, *arguments.kwonlyargs, *others) if each.annotation is None]


def test_parameters_that_cross_a_folder_are_annotated():
    found = []
    names = names_across_folders()
    assert ("options.py", "check_choice") in names
    assert ("lowering/plan.py", "who_serves") in names
    for file, name in sorted(names):
        functions = functions_of(trees()[file])
        if name in functions:
            found += [f"{file}: {name}({each})" for each in unannotated(functions[name], is_method=False)]
        for node in trees()[file].body:
            if not (isinstance(node, ast.ClassDef) and node.name == name):
                continue
            for method, definition in functions_of(node).items():
                if not method.startswith("_") or method == "__init__":
                    parameters = unannotated(definition, is_method=True)
                    found += [f"{file}: {name}.{method}({each})" for each in parameters]
    assert not found, "\n".join(found)
