"""The programs of others that are run, and what they need."""

import importlib
import sys
import types
from collections.abc import Callable
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


def without(absent: tuple[str, ...], module: str) -> types.ModuleType:
    """Imports a module. absent: modules that read data sets or write logs, for which nothing is there."""
    for name in absent:
        sys.modules.setdefault(name, MagicMock(__spec__=ModuleSpec(name, None)))
    return importlib.import_module(module)


def example(folder: str, module: str, absent: tuple[str, ...] = ()) -> types.ModuleType:
    """Imports a module of an example, whose folder is somewhere below Python's path. absent: as above."""
    path = next(root for entry in sys.path if (root := Path(entry) / folder).is_dir())
    sys.path.insert(0, str(path))
    return without(absent, module)
