"""Body of each process of the soak test: random collectives with random delays, checked bit for bit."""

import functools
import os
import pathlib
import re
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from job import job_token

PROGRAMS = 10
REPEATS = 20  # of a call, in a loop
DTYPES = ("float32", "bfloat16", "float16", "int32", "uint8")
# Limits for the growth of a process in the last two thirds of its rounds. A leak would grow with each of thousands of
# calls. The local ranks' calls in flight bound the completion threads, and a group has at most one segment beside its
# first, from its first large call on.
IN_FLIGHT, COPIES = 5, 4
MAX_GROWTH = {"MiB": 24, "files": 4, "threads": IN_FLIGHT * COPIES * 3, "groups": 0, "segments of a group": 1}


class Program(NamedTuple):
    """A compiled program, its operands, and the expected results.

    is_apart: no other program may be in flight. XLA runs the programs of several devices of a process one after the
      other, but one of a single device of them overtakes, so that processes wait for each other, with lax.psum as well.
    """

    run: Callable
    operands: list[jax.Array]
    expected: list[np.ndarray]  # indexed by operand, result and mesh position
    num_calls: int
    is_apart: bool


def soak(seed: int, num_rounds: int, folder: str) -> None:
    """Prints "began", the outcome, and numbers of calls before both, then waits for the parent before it exits."""
    shared, own = np.random.default_rng(seed), np.random.default_rng([seed, jax.process_index()])
    programs = [program for _ in range(PROGRAMS) if (program := make_program(shared, own))]
    num_calls, before, outcome = 0, None, "done"
    print(f"token {job_token()}\ncalls 0\nbegan", flush=True)
    try:
        for number in range(num_rounds):
            # All processes choose the same programs. A process without a rank in one of them skips it.
            chosen = [int(i) for i in shared.integers(PROGRAMS, size=shared.integers(1, IN_FLIGHT, endpoint=True))]
            which = [int(i) for i in shared.integers(2, size=len(chosen))]
            random_delay(own)
            launched = []
            for i, k in zip(chosen, which, strict=True):
                if programs[i].is_apart:
                    jax.block_until_ready([results for _, _, results in launched])
                if programs[i].operands:
                    launched.append((programs[i], k, programs[i].run(programs[i].operands[k])))
                if programs[i].is_apart:
                    jax.block_until_ready(launched[-1][-1] if launched else None)
            for program, k, results in launched:
                check(results, program.expected[k])
                num_calls += program.num_calls
            if number % 20 == 0:
                print(f"calls {num_calls}", flush=True)
            if number == num_rounds // 3:
                before = resources()
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        if "DEADLINE_EXCEEDED" not in str(error) and "Error dispatching computation" not in str(error):
            raise
        outcome = f"failed: {str(error).splitlines()[0]}"
        np.testing.assert_array_equal(jax.jit(lambda x: x * 2)(jnp.arange(3)), [0, 2, 4])
    else:
        assert before is not None
        growth = {name: after - before[name] for name, after in resources().items()}
        assert all(growth[name] <= limit for name, limit in MAX_GROWTH.items()), growth
        print(f"growth {growth}", flush=True)
    print(f"calls {num_calls}\n{outcome}", flush=True)
    # Process 0 runs JAX's coordinator, so it must exit last.
    while not os.path.exists(pathlib.Path(folder, "last" if jax.process_index() == 0 else "end")):
        time.sleep(0.02)


def make_program(shared, own) -> Program:
    from collectives import extremum, on_root
    from helpers import rank_fold, ring_fold

    import jax_ring

    devices = [jax.devices()[i] for i in shared.permutation(len(jax.devices()))]
    devices = devices[: shared.integers(2, len(devices), endpoint=True)]
    ranks, mesh = len(devices), Mesh(np.array(devices), ("i",))
    dtype = jnp.dtype(DTYPES[shared.integers(len(DTYPES))])
    shape = (ranks, int(shared.choice([0, 1, 7, 300, 5000, 40_000])))
    root = int(shared.integers(ranks))
    algorithm = ("auto", "one_shot", "two_shot", "ring")[shared.integers(4)]
    ring = algorithm == "ring" and bool(shared.integers(2))
    cut = int(shared.integers(1, ranks)) if shared.integers(2) else ranks
    order = [int(i) for i in shared.permutation(ranks)]
    groups = [group for group in (order[:cut], order[cut:]) if group]

    def by_groups(fold):
        def grouped(values):
            result = np.empty_like(values)
            for group in groups:
                result[group] = fold(values[group])
            return result

        return grouped

    call, oracle = [
        (
            functools.partial(jax_ring.ring_psum, algorithm=algorithm, order="ring" if ring else "rank"),
            lambda values: np.stack([(ring_fold if ring else rank_fold)(values)] * ranks),
        ),
        (
            functools.partial(jax_ring.ring_psum, axis_index_groups=groups, algorithm=algorithm),
            by_groups(rank_fold),
        ),
        (
            functools.partial(jax_ring.ring_pmax, axis_index_groups=groups, algorithm=algorithm),
            by_groups(lambda values: extremum(values, np.maximum)),
        ),
        (jax_ring.ring_psum_scatter, lambda values: rank_fold(values)),
        (jax_ring.ring_all_gather, lambda values: np.stack([values] * ranks)),
        (
            functools.partial(jax_ring.ring_reduce, root=root, algorithm=algorithm),
            lambda values: on_root(rank_fold(values), root, ranks),
        ),
        (functools.partial(jax_ring.ring_broadcast, root=root), lambda values: np.stack([values[root]] * ranks)),
    ][shared.integers(7)]
    call = functools.partial(call, axis_name="i")
    kind = ("plain", "several", "loop")[shared.integers(3)]
    if kind == "loop" and oracle(np.zeros((ranks, *shape), dtype)).shape[1:] != shape:
        kind = "several"
    copies = {"plain": 1, "several": COPIES, "loop": 1}[kind]
    halve = dtype.type(0.5) if jnp.issubdtype(dtype, jnp.floating) else dtype.type(1)

    def delayed(x, i):
        """x + i, after a random delay. The callback ignores its argument: converting it may deadlock in JAX."""

        def callback(_):
            random_delay(own)
            return dtype.type(i)

        return x + jax.pure_callback(callback, jax.ShapeDtypeStruct((), dtype), jnp.sum(x))

    def body(x):
        x = x[0]
        if kind == "loop":
            return [lax.fori_loop(0, REPEATS, lambda _, x: call(x * halve), x)[None]]
        xs = [delayed(x, i) for i in range(copies)] if kind == "several" else [x]
        return [call(x)[None] for x in xs]

    def expect(values):
        if kind == "loop":
            for _ in range(REPEATS):
                values = oracle(values * halve)
            return [values]
        return [oracle((values + dtype.type(i)).astype(dtype)) for i in range(copies)]

    data = [shared.standard_normal((ranks, *shape)) * 40 for _ in range(2)]
    participants = [device.process_index for device in devices]
    is_apart = jax.local_device_count() > 1 and 1 in map(participants.count, participants)
    if jax.process_index() not in participants:
        return Program(body, [], [], 0, is_apart)
    values = [np.abs(array).astype(dtype) if dtype.kind == "u" else array.astype(dtype) for array in data]
    sharding = jax.NamedSharding(mesh, P("i"))
    operands = [
        jax.make_array_from_callback(array.shape, sharding, lambda index, array=array: array[index]) for array in values
    ]
    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False))
    with np.errstate(all="ignore"):
        expected = [expect(array) for array in values]
    return Program(run, operands, expected, copies * (REPEATS if kind == "loop" else 1), is_apart)


def check(results, expected) -> None:
    from helpers import assert_same_bits

    for result, want in zip(results, expected, strict=True):
        for shard in result.addressable_shards:
            assert_same_bits(shard.data, want[shard.index])


def random_delay(own) -> None:
    """Sleeps for a random time, most often 0."""
    time.sleep(max(0.0, own.exponential(0.004) - 0.004))


def resources() -> dict[str, float]:
    mapped = re.findall(r"/dev/shm/(jax_ring\S*)", pathlib.Path("/proc/self/maps").read_text())
    # Larger segments have the name of the group's first, and a number.
    names = [name.rpartition("-")[0] if name.rpartition("-")[0] in mapped else name for name in mapped]
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return {
        "MiB": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "groups": len(set(names)),
        "segments of a group": max(map(names.count, names), default=0),
    }
