"""The programs of others that are run, and what they need."""

import importlib
import sys
import types
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import NamedTuple
from unittest.mock import MagicMock

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


class Program(NamedTuple):
    """A program.

    Attributes:
      prepare: (a mesh) to a function without arguments that runs it, once, and returns a tree of all that it computes.
      source: the distribution that it comes from, as in requirements.txt.
      mesh: the names and sizes of its axes.
    """

    prepare: Callable
    source: str
    mesh: dict[str, int]


PROGRAMS: dict[str, Program] = {}
MODULES = ("small", "flax_examples", "language_models", "samplers", "physics", "solvers")


def load_all() -> None:
    """Fills PROGRAMS. The modules import what they run where they run it."""
    for name in MODULES:
        importlib.import_module(f"programs.{name}")


def program(source: str, **mesh: int):
    """Registers a function under its name."""

    def register(prepare: Callable) -> Callable:
        PROGRAMS[prepare.__name__] = Program(prepare, source, mesh)
        return prepare

    return register


def put(tree, mesh: Mesh, *spec):
    """Places arrays, all in the same way."""
    return jax.device_put(tree, NamedSharding(mesh, P(*spec)))


def divide(tree, mesh: Mesh, *axes: str):
    """Places each array divided along its largest dimension that the axes divide evenly, else whole, as FSDP does."""
    size = int(np.prod([mesh.shape[axis] for axis in axes]))

    def place(x):
        fitting = [i for i in np.argsort(np.shape(x))[::-1] if np.shape(x)[i] % size == 0]
        spec = [None] * np.ndim(x)
        if fitting:
            spec[fitting[0]] = axes
        return put(x, mesh, *spec)

    return jax.tree.map(place, tree)


class _Absent(MetaPathFinder, Loader):
    """Stands in for modules and all that is below them."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names

    def find_spec(self, name, path=None, target=None) -> ModuleSpec | None:
        is_named = any(f"{name}.".startswith(f"{each}.") for each in self._names)
        return ModuleSpec(name, self, is_package=True) if is_named else None

    def create_module(self, spec) -> MagicMock:
        return MagicMock()

    def exec_module(self, module) -> None:
        pass


def without(absent: tuple[str, ...], module: str) -> types.ModuleType:
    """Imports a module. absent: modules that read data sets or write logs, for which nothing is there."""
    sys.meta_path.insert(0, finder := _Absent(absent))
    try:
        return importlib.import_module(module)
    finally:
        sys.meta_path.remove(finder)


def example(folder: str, module: str, absent: tuple[str, ...] = ()) -> types.ModuleType:
    """Imports a module of an example, whose folder is somewhere below Python's path. absent: as above."""
    path = next(root for entry in sys.path if (root := Path(entry) / folder).is_dir())
    sys.path.insert(0, str(path))
    return without(absent, module)
