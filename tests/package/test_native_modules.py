"""The native modules as they are installed: what they export, and what guards them."""

import pathlib

import pytest
from elf import Module, faults

from jax_ring import _ffi_cpu

MODULES = sorted(pathlib.Path(_ffi_cpu.__file__).parent.glob("*.so"))


def names() -> list[str]:
    return [path.name.split(".")[0] for path in MODULES]


def test_the_modules_are_found():
    assert {"_ffi_cpu", "_ffi_cuda"} <= set(names())


@pytest.mark.parametrize("path", MODULES, ids=names())
def test_a_module_leaves_nothing_to_an_attacker(path):
    assert faults(path.name, path.read_bytes()) == []


def test_library_functions_check_their_bounds():
    """`_FORTIFY_SOURCE`: the checked names of functions of the C library."""
    (cpu,) = [path for path in MODULES if path.name.startswith("_ffi_cpu.")]
    assert [name for name in Module(cpu.read_bytes()).imports if name.endswith("_chk")] != []
