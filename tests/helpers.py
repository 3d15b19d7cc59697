"""What many tests need: meshes, a one-line shard_map, the numpy oracle, and ways to look at compiled programs."""

import concurrent.futures
import contextlib
import math
import os
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import overriding
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jax_ring import override_lax, ring_psum

TARGET = "jax_ring_all_reduce"
ANY_TARGET = "jax_ring_"
RANKS = 8


def make_mesh(shape=(RANKS,), names=("i",), *, devices=None) -> Mesh:
    """A mesh over the first devices, or over those given."""
    devices = jax.devices() if devices is None else devices
    return Mesh(np.array(devices[: int(np.prod(shape))]).reshape(shape), names)


SPLIT = P("i")


def sharded(fun, *, mesh=None, in_specs=SPLIT, out_specs=SPLIT, check_vma=True, jit=True):
    """`fun` mapped over the mesh and compiled."""
    mapped = jax.shard_map(fun, mesh=mesh or make_mesh(), in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)
    return jax.jit(mapped) if jit else mapped


def rank_fold(values, axis=0) -> np.ndarray:
    """The left-to-right fold over ranks that ring_psum promises, in its accumulator, rounded once."""
    values = np.moveaxis(np.asarray(values), axis, 0)
    dtype = values.dtype
    small_float = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    total = values[0].astype(np.float32 if small_float else dtype)
    with np.errstate(all="ignore"):
        for value in values[1:]:
            total = total + value.astype(total.dtype)
        return total.astype(dtype)


def ring_fold(values) -> np.ndarray:
    """The sum with order="ring" of what the ranks, along the first axis, hold: each block in an order of its own."""
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
    """Trees have the same containers, dtypes, shapes and bits, signs of zeros included; any NaN equals any other."""
    import chex  # here, because the GPU check imports this module and needs no chex

    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    chex.assert_trees_all_equal(jax.tree.map(bits_of, actual), jax.tree.map(bits_of, expected), strict=True)


def bits_of(x) -> np.ndarray:
    """The bits of an array as unsigned integers, with one pattern for all NaN."""
    x = np.array(x)
    if x.dtype.kind == "c":
        x = np.stack([x.real, x.imag])
    is_nan = x != x
    if is_nan.any():
        x[is_nan] = np.nan
    return x.view(f"u{x.dtype.itemsize}")


def compiled_text(fun, *args) -> str:
    """The optimized HLO."""
    return jax.jit(fun).lower(*args).compile().as_text()


def num_calls(fun, *args) -> int:
    """How many calls of the engine the compiled program makes, equal ones merged and dead ones gone."""
    return compiled_text(fun, *args).count(f'custom_call_target="{ANY_TARGET}')


def run_python(code: str, *, devices=8, timeout=120, **environment) -> subprocess.CompletedProcess:
    """Runs a program in a fresh interpreter, for what one process can do only once (time limits, import errors)."""
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
    """Runs a program in processes of one `jax.distributed`, and returns what each prints.

    {port}, {processes}, {process} and, for each process, its `values` are filled in.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        common = {"port": free.getsockname()[1], "processes": len(values)}
    programs = [code.format(process=i, **common, **own) for i, own in enumerate(values)]
    with concurrent.futures.ThreadPoolExecutor(len(values)) as pool:
        results = list(pool.map(lambda program: run_python(program, devices=devices), programs))
    for result in results:
        assert result.returncode == 0, result.stderr
    return [result.stdout for result in results]


def assert_same_trees(actual, expected, *, rtol=0.0) -> None:
    """Trees have the same containers, dtypes and shapes, and the same values up to rtol; NaN equals NaN."""
    import chex

    # strict=True alone does not tell bfloat16 from float32: chex compares both as float32.
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    chex.assert_trees_all_close(actual, expected, rtol=rtol)


def ours_and_lax(ours, jaxs):
    """Yields `ours`, and then `jaxs`, to be traced, lowered and called before the next one is asked for.

    With the option --override-lax, `ours` is lax's function too, and the override is off while `jaxs` is in use.
    """
    yield ours
    with lax_itself():
        yield jaxs


@contextlib.contextmanager
def lax_itself():
    """JAX's own lowerings, also with the option --override-lax."""
    override = overriding.override
    if override is None:
        yield
        return
    override.close()
    try:
        yield
    finally:
        overriding.override = override_lax()


def assert_matches_lax(fun, *args, pair=(ring_psum, lax.psum), rtol=0.0, **options) -> None:
    """`fun(collective, *args)`, mapped over the mesh, has the same results and types with either of the pair.

    The types hold the axes over which a value varies. Sums of small integers are exact, whatever their order; rtol is
    for functions of which not all steps are exact.
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
