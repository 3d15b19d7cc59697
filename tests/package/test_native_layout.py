"""The folders of ffi/: includes go one way between them, none holds many files, and the documentation lists them."""

import pathlib
import re

import pytest

pytestmark = pytest.mark.one_pair  # does not depend on JAX's version

ROOT = pathlib.Path(__file__).parents[2]
FFI = ROOT / "ffi"
MAX_FILES = 15

# What the files of a folder may include, besides its own: the two engines share what is below both, and nothing else.
SHARED = {"base", "recorder", "collective", "attributes"}
MAY_INCLUDE = {
    "base": set(),
    "recorder": {"base"},
    "collective": {"base"},
    "attributes": {"base", "recorder", "collective"},
    "cpu": SHARED,
    "shm": SHARED | {"cpu"},
    "xla_cpu": SHARED | {"cpu", "shm"},
    "device": {"base", "collective"},
    "cuda": SHARED | {"device"},
    "check": SHARED | {"device", "cuda"},
    "model": SHARED | {"cpu", "shm", "device"},
}
# Of these, everything may be tested.
MAY_INCLUDE["tests"] = set(MAY_INCLUDE)

INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)
SOURCES = sorted(path for path in FFI.rglob("*") if path.suffix in (".h", ".cc", ".cu"))


def folder_of(name: str) -> str:
    return name.split("/")[0]


def includes_of(path: pathlib.Path) -> list[str]:
    """Without those of XLA's headers, which are not in this tree."""
    return [name for name in INCLUDE.findall(path.read_text()) if not name.startswith("xla/")]


def names_of_sources() -> dict[str, pathlib.Path]:
    return {path.relative_to(FFI).as_posix(): path for path in SOURCES}


def test_includes_between_folders_go_one_way():
    names = names_of_sources()
    assert {folder_of(name) for name in names} == set(MAY_INCLUDE)
    wrong = [
        f"{name} includes {included}"
        for name, path in names.items()
        for included in includes_of(path)
        if folder_of(included) not in MAY_INCLUDE[folder_of(name)] | {folder_of(name)}
    ]
    assert not wrong
    # The rule would hold for a folder that nothing includes: that the chains exist is a part of it.
    for upper, lower in (("xla_cpu", "shm"), ("shm", "cpu"), ("cpu", "collective"), ("cuda", "device")):
        assert any(
            folder_of(included) == lower
            for name, path in names.items()
            if folder_of(name) == upper
            for included in includes_of(path)
        ), f"nothing in {upper} includes {lower}"


def test_what_may_be_included_has_no_cycle():
    done = set()
    while remaining := {folder: lower - done for folder, lower in MAY_INCLUDE.items() if folder not in done}:
        lowest = {folder for folder, lower in remaining.items() if not lower - {folder}}
        assert lowest, remaining
        done |= lowest


def test_includes_are_rooted_at_ffi():
    names = names_of_sources()
    wrong = [
        f"{name} includes {included}" for name, path in names.items() for included in includes_of(path)
        if included not in names
    ]  # fmt: skip
    assert not wrong


def test_the_model_replaces_headers_that_exist():
    replaced = [path.relative_to(FFI / "model/replace") for path in (FFI / "model/replace").rglob("*.h")]
    assert replaced
    assert [path for path in replaced if not (FFI / path).is_file()] == []


def test_no_folder_holds_many_files():
    folders = [FFI, *(path for path in FFI.rglob("*") if path.is_dir())]
    sizes = {path.relative_to(ROOT).as_posix(): sum(file.is_file() for file in path.iterdir()) for path in folders}
    assert {folder: size for folder, size in sizes.items() if size > MAX_FILES} == {}


def test_the_documentation_lists_the_folders():
    page = (ROOT / "docs/how_it_works.md").read_text()
    tree = page[page.index("\nffi/ ") : page.index("```", page.index("\nffi/ "))]
    listed = set(re.findall(r"^  (\w+)/ ", tree, re.MULTILINE))
    assert listed == set(MAY_INCLUDE)
    parts = {
        path.relative_to(FFI).as_posix() for top in MAY_INCLUDE for path in (FFI / top).iterdir() if path.is_dir()
        if top not in ("tests", "model")
    }  # fmt: skip
    assert parts == {name for name in re.findall(r"(\w+/\w+):", tree) if folder_of(name) not in ("tests", "model")}
