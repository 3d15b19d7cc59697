"""Collectives between processes of one host: the same bits as in a single process, and matching of equal calls."""

import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from job import merged

pytestmark = pytest.mark.full  # jobs of several processes

RANKS = 8
EXCHANGES = ("all_to_all", "ppermute", "pbroadcast", "ragged", "grad of exchanges")


def put(mesh, full):
    """The array `full`, with one row on each rank."""
    return jax.make_array_from_callback(full.shape, NamedSharding(mesh, P(mesh.axis_names)), lambda index: full[index])


def rows(x) -> dict[int, np.ndarray]:
    """The rows of an array that this process holds, by row index."""
    return {shard.index[0].start or 0: np.asarray(shard.data) for shard in x.addressable_shards}


def values(count, dtype, seed=0):
    random = np.random.default_rng(seed)
    wide = random.normal(size=(RANKS, count)) * 10.0 ** random.integers(-3, 4, size=(RANKS, count))
    return np.asarray(jnp.asarray(wide).astype(dtype))


def functions():
    """The tested functions, by name."""
    from jax_ring import (
        ring_all_gather,
        ring_all_to_all,
        ring_broadcast,
        ring_pbroadcast,
        ring_pmax,
        ring_pmean,
        ring_pmin,
        ring_ppermute,
        ring_psum,
        ring_psum_scatter,
        ring_ragged_all_to_all,
        ring_reduce,
    )

    pairs = [[0, 7], [1, 6], [2, 5], [3, 4]]

    def ragged(row):
        """One element goes to the next rank, and two to the third one."""
        rank, ranks = lax.axis_index("i"), jnp.arange(RANKS)
        sizes = jnp.where(ranks == (rank + 1) % RANKS, 1, 0) + jnp.where(ranks == (rank + 3) % RANKS, 2, 0)
        received = jnp.where(ranks == (rank - 1) % RANKS, 1, 0) + jnp.where(ranks == (rank - 3) % RANKS, 2, 0)
        return ring_ragged_all_to_all(
            row, row * 2, jnp.full(RANKS, rank % 3), sizes, jnp.where(sizes == 2, 1, 0), received, axis_name="i"
        )

    return {
        "psum": lambda x: ring_psum(x, "i"),
        "psum, one-shot": lambda x: ring_psum(x, "i", algorithm="one_shot"),
        "psum, two-shot": lambda x: ring_psum(x, "i", algorithm="two_shot"),
        "psum, ring order": lambda x: ring_psum(x, "i", algorithm="ring", order="ring"),
        "psum of a tree": lambda x: ring_psum({"a": x, "b": [x[:, :1], x * 2]}, "i")["b"][1],
        "psum in groups": lambda x: ring_psum(x, "i", axis_index_groups=pairs),
        "pmean": lambda x: ring_pmean(x, "i"),
        "pmax": lambda x: ring_pmax(x, "i"),
        "pmin": lambda x: ring_pmin(x, "i"),
        "psum_scatter": lambda x: ring_psum_scatter(jnp.tile(x, (1, RANKS)), "i", scatter_dimension=1, tiled=True),
        "all_gather": lambda x: ring_all_gather(x, "i", axis=1, tiled=True),
        "reduce": lambda x: ring_reduce(x, "i", root=5),
        "broadcast": lambda x: ring_broadcast(x, "i", root=3),
        "all_to_all": lambda x: ring_all_to_all(jnp.outer(jnp.arange(RANKS, dtype=x.dtype), x[0]), "i", 0, 1),
        "ppermute": lambda x: ring_ppermute(x, "i", [(0, 5), (5, 1), (1, 0), (6, 7)]),
        "pbroadcast": lambda x: ring_pbroadcast(x, "i", jnp.int32(6)),
        "ragged": lambda x: ragged(x[0])[None],
        "grad of exchanges": lambda x: jax.grad(
            lambda y: (ragged(ring_ppermute(y * y, "i", [(0, 5), (5, 1), (7, 0)])[0]) ** 2).sum()
        )(x),
        "grad": lambda x: jax.grad(lambda y: (ring_psum(y * y, "i") ** 2).sum())(x),
        "in a loop": lambda x: lax.fori_loop(0, 5, lambda _, y: ring_psum(y, "i") * 0.125, x),
        "nothing": lambda x: ring_psum(x[:, :0], "i").sum() + x,
    }


class Case(NamedTuple):
    """The functions of a program, and their operand, with a row for each of these ranks."""

    name: str
    functions: dict[str, Callable]
    operand: np.ndarray
    ranks: Sequence[int] = range(RANKS)
    check_vma: bool = False


def cases():
    from jax_ring import ring_psum

    for dtype, counts in {"float32": (5, 4099, 300_001), "bfloat16": (4099,)}.items():
        for count in counts:
            chosen = functions()
            if dtype == "float32":  # once is enough for what is only moved
                chosen = {name: function for name, function in chosen.items() if name not in EXCHANGES}
            if count > 5000:
                chosen = {name: chosen[name] for name in ("psum", "psum, ring order", "all_gather")}
            yield Case(f"{dtype}[{count}]", chosen, values(count, dtype))
    # Sub-meshes: of one process, of some ranks of each process, and of a subset of the processes.
    halves = {"first half": range(4), "first and last": (0, 1, 6, 7)}
    for name, ranks in {"first": range(2), "every other": range(0, RANKS, 2), **halves}.items():
        x = values(77, "float32")[: len(ranks)]
        yield Case(f"{name} ranks", {"psum": lambda x: ring_psum(x, "i")}, x, ranks, check_vma=True)


def digests(cases: Iterable[Case], devices: Sequence) -> dict[str, str]:
    """Digests of the rows that this process holds of the results, with the ranks on these devices."""
    found = {}
    for case, functions, operand, ranks, check_vma in cases:
        mesh = Mesh([devices[rank] for rank in ranks], ("i",))
        if jax.process_index() not in {device.process_index for device in mesh.devices.flat}:
            continue

        def results(x, functions=functions):
            return {name: function(x) for name, function in functions.items()}

        mapped = jax.shard_map(results, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=check_vma)
        for name, result in jax.jit(mapped)(put(mesh, operand)).items():
            for row, value in rows(result).items():
                found[f"{name} of {case}, {row}"] = hashlib.md5(value.tobytes()).hexdigest()
    return found


@pytest.mark.parametrize(
    "num_processes",
    [
        pytest.param(2, marks=pytest.mark.jax_processes(2, devices=RANKS)),
        pytest.param(4, marks=[pytest.mark.jax_processes(4, devices=RANKS), pytest.mark.one_pair]),
    ],
)
def test_same_bits_as_one_process(num_processes):
    """The devices of a process are enough for all ranks. Each process finds a part of what is expected."""
    from jax_ring import explain, ring_psum

    devices = [
        device
        for process in range(num_processes)
        for device in jax.local_devices(process_index=process)[: RANKS // num_processes]
    ]
    all_cases = list(cases())
    expected = merged(digests(all_cases[jax.process_index() :: num_processes], jax.local_devices()))
    assert len(expected) > RANKS * 30
    assert merged(digests(all_cases, devices)) == expected

    mesh = Mesh(devices, ("i",))
    mapped = jax.shard_map(lambda x: ring_psum(x, "i"), mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    (call,) = explain(mapped, jax.ShapeDtypeStruct((RANKS, 2), jnp.float32)).collectives
    assert call.served_by == f"jax_ring (shared memory, {num_processes} processes)"


@pytest.mark.jax_processes(2, devices=2)
def test_equal_calls_in_different_orders():
    """Independent equal calls that become ready in a different order in each process."""
    from jax_ring import ring_psum

    mesh = Mesh(np.array(jax.devices()), ("i",))
    num_calls = 6

    def delayed(x, call):
        def wait(x):
            # In order in one process, in reverse order in the other.
            place = call if jax.process_index() == 0 else num_calls - 1 - call
            time.sleep(0.05 * place)
            return x

        return jax.pure_callback(wait, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    def fun(x):
        return jnp.stack([ring_psum(delayed(x * (call + 1), call), "i") for call in range(num_calls)], axis=1)

    full = np.arange(jax.device_count() * 3, dtype=np.float32).reshape(-1, 3)
    x = put(mesh, full)
    mapped = jax.jit(jax.shard_map(fun, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False))
    # Called on different lines, and compiled ahead of time in one process only, so that the executables differ.
    if jax.process_index() == 0:
        mapped.lower(x).compile()
        first = mapped(x)
    else:
        first = mapped(x)
    # Several executions in flight.
    results = [first, *(mapped(x) for _ in range(3))]
    for result in results:
        for row in rows(result).values():
            assert (row == full.sum(0) * np.arange(1, num_calls + 1)[:, None]).all(), row


@pytest.mark.jax_processes(2, devices=2, environment={"JAX_RING_TIMEOUT_S": "20"})
def test_one_process_compiles_again():
    """As with other options, or after it or JAX's cache has dropped compiled programs: the others keep theirs."""
    from jax_ring import ring_psum

    mesh = Mesh(np.array(jax.devices()), ("i",))
    mapped = jax.jit(jax.shard_map(lambda x: ring_psum(x, "i"), mesh=mesh, in_specs=P("i"), out_specs=P()))
    full = np.arange(jax.device_count() * 3, dtype=np.float32).reshape(-1, 3)
    x = put(mesh, full)
    results = [mapped(x), mapped(x)]
    for process in range(2):
        if jax.process_index() == process:
            jax.clear_caches()
            mapped.lower(x).compile({"xla_cpu_enable_fast_math": False})
        # On other lines, so that the executables differ as well.
        results += [mapped(x) for _ in range(3)]
    if jax.process_index() == 0:
        jax.clear_caches()
    results.append(mapped(x))
    for result in results:
        assert all((row == full.sum(0)).all() for row in rows(result).values())
