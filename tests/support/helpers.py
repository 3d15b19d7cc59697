"""Shared by all tests: meshes, shard_map in one line, numpy oracles, assertions, inspection of compiled programs."""

import concurrent.futures
import contextlib
import math
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jax_ring import override_lax, ring_psum
from jax_ring.launcher.environment import reserved_address
from pytest_jax_ring import plugin

TARGET = "jax_ring_all_reduce"
TARGET_PREFIX = "jax_ring_"
RANKS = 8
# For programs that must compile as users compile them: conftest.py turns optimizations off by this variable.
AS_USERS_COMPILE = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}


def make_mesh(shape=(RANKS,), names=("i",), *, devices=None) -> Mesh:
    """A mesh over the first of `devices`; by default of all devices."""
    devices = jax.devices() if devices is None else devices
    return Mesh(np.array(devices[: int(np.prod(shape))]).reshape(shape), names)


SHARDED = P("i")


def sharded(fun, *, mesh=None, in_specs=SHARDED, out_specs=SHARDED, check_vma=True, jit=True):
    """`fun` under shard_map and, unless jit=False, jit."""
    mapped = jax.shard_map(fun, mesh=mesh or make_mesh(), in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)
    return jax.jit(mapped) if jit else mapped


def rank_fold(values, axis=0) -> np.ndarray:
    """The sum that ring_psum specifies: a left-to-right fold over ranks, in the accumulator's dtype, rounded once."""
    values = np.moveaxis(np.asarray(values), axis, 0)
    dtype = values.dtype
    small_float = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    total = values[0].astype(np.float32 if small_float else dtype)
    with np.errstate(all="ignore"):
        for value in values[1:]:
            total = total + value.astype(total.dtype)
        return total.astype(dtype)


def tree_fold(values) -> np.ndarray:
    """The sum over the first axis with order="tree": split at the largest power of two smaller than its length."""
    values = np.asarray(values)
    small_float = jnp.issubdtype(values.dtype, jnp.floating) and jnp.finfo(values.dtype).bits < 32

    def add(part):
        if len(part) == 1:
            return part[0]
        left = 1 << (len(part) - 1).bit_length() - 1
        return add(part[:left]) + add(part[left:])

    with np.errstate(all="ignore"):
        return add(values.astype(np.float32 if small_float else values.dtype)).astype(values.dtype)


def ring_fold(values) -> np.ndarray:
    """The sum over the first axis (ranks) with order="ring": block i is folded from rank i + 1 on."""
    values = np.asarray(values)
    ranks, flat = len(values), values.reshape(len(values), -1)
    pack = 16 // values.dtype.itemsize
    block = math.ceil(math.ceil(flat.shape[1] / pack) / ranks) * pack
    total = np.empty_like(flat[0])
    for i in range(ranks):
        part = slice(i * block, (i + 1) * block)
        total[part] = rank_fold(np.roll(flat, -(i + 1), axis=0)[:, part])
    return total.reshape(values.shape[1:])


def assert_same_bits(actual, expected) -> None:
    """Asserts that trees have the same containers, dtypes, shapes and bits, with signs of zeros. NaN equals NaN."""
    import chex  # imported here: the GPU check imports this module without chex installed

    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    chex.assert_trees_all_equal(jax.tree.map(bits_of, actual), jax.tree.map(bits_of, expected), strict=True)


def bits_of(x) -> np.ndarray:
    """The bits of an array as unsigned integers, with one pattern for all NaNs."""
    x = np.array(x)
    if x.dtype.kind == "c":
        x = np.stack([x.real, x.imag])
    is_nan = x != x
    if is_nan.any():
        x[is_nan] = np.nan
    return x.view(f"u{x.dtype.itemsize}")


def as_printed(text: str) -> str:
    """A string as MLIR prints it: quotation marks and what is not printable ASCII as hexadecimal numbers."""
    escaped = text.replace("\\", r"\\").encode(errors="surrogateescape")
    return re.sub(rb'[^ -~]|"', lambda byte: b"\\%02X" % byte[0][0], escaped).decode()


def without_paths(text: str) -> str:
    """The text of a program with all strings emptied that may be paths: a folder may have any name, also a target's."""
    return re.sub(r'"((?:[^"\\\n]|\\.)*)"', lambda string: '""' if "/" in string[1] else string[0], text)


def compiled_text(fun, *args) -> str:
    """The optimized HLO, without paths."""
    # Do not jit a jitted function again: then a call runs this executable and compiles nothing.
    jitted = fun if hasattr(fun, "lower") else jax.jit(fun)
    return without_paths(jitted.lower(*args).compile().as_text())


def num_calls(fun, *args) -> int:
    """The number of jax_ring custom calls in the optimized HLO, after CSE and dead code elimination."""
    return compiled_text(fun, *args).count(f'custom_call_target="{TARGET_PREFIX}')


def run_python(code: str, *, devices=8, timeout=120, **environment) -> subprocess.CompletedProcess:
    """Runs a program in a fresh interpreter, with `environment` added to the environment variables."""
    prelude = f"import jax\njax.config.update('jax_num_cpu_devices', {devices})\n"
    return subprocess.run(
        [sys.executable, "-P", "-c", prelude + code],  # -P: the installed package, not the source tree
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def run_processes(code: str, values: list[dict], *, devices: int) -> list[str]:
    """Runs a program in several processes under `jax.distributed`, and returns the stdout of each.

    `code` is formatted with address, processes, process and the `values` of each process.
    """
    with reserved_address() as address, concurrent.futures.ThreadPoolExecutor(len(values)) as pool:
        common = {"address": address, "processes": len(values)}
        programs = [code.format(process=i, **common, **own) for i, own in enumerate(values)]
        results = list(pool.map(lambda program: run_python(program, devices=devices), programs))
    for result in results:
        assert result.returncode == 0, result.stderr
    return [result.stdout for result in results]


def assert_same_trees(actual, expected, *, rtol=0.0) -> None:
    """Asserts that trees have the same containers, dtypes and shapes, and equal values up to rtol; NaN equals NaN."""
    import chex

    # Even with strict=True, chex compares bfloat16 as float32, so check the dtypes first.
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    chex.assert_trees_all_close(actual, expected, rtol=rtol)


def ours_and_lax(ours, theirs):
    """Yields `ours`, then `theirs`. The caller must trace, lower and call each one before it asks for the next.

    With --jax-ring-override, `ours` is lax's function as well, and the override is off while `theirs` is in use.
    """
    yield ours
    with without_override():
        yield theirs


@contextlib.contextmanager
def without_override():
    """Restores JAX's own lowerings for the block, for --jax-ring-override."""
    if plugin.active_override is None:
        yield
        return
    plugin.active_override.close()
    try:
        yield
    finally:
        plugin.active_override = override_lax()


def assert_matches_lax(fun, *args, pair=(ring_psum, lax.psum), rtol=0.0, **options) -> None:
    """Asserts that `fun(collective, *args)` under shard_map has the same results and types for both of `pair`.

    Types include the varying manual axes. Sums of small integers are exact in any order; rtol is for functions that
    round.
    """
    results, types = [], []
    for collective in ours_and_lax(*pair):

        def typed(*args, collective=collective):
            out = fun(collective, *args)
            types.append(jax.tree.map(jax.typeof, out))
            return out

        results.append(sharded(typed, **options)(*args))
    assert types[0] == types[-1]
    assert_same_trees(*results, rtol=rtol)
