"""Times an all-reduce called from Python, with a donated argument, and inside a compiled loop."""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from harness.implementations import AXIS
from jax_ring import ring_psum

LEAST_LOOPS = 8
EMPTY, WAITING = "the empty loop", "the waiting loop"


@dataclasses.dataclass
class Spread:
    """Median and percentiles of many runs, and the runs in the order in which they were timed, in microseconds."""

    median: float
    p10: float
    p90: float
    samples: list[float] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Spread":
        microseconds = [round(float(x) * 1e6, 4) for x in seconds]
        return cls(*(float(x) for x in np.percentile(microseconds, [50, 10, 90])), microseconds)


@dataclasses.dataclass
class Row:
    """One implementation at one size. `wrong` is -1 where results were not checked."""

    implementation: str
    ranks: int
    bytes: int
    count: int
    dtype: str
    out_of_place: Spread
    in_place: Spread
    in_loop: Spread  # minus the loop without a collective, where no rank waits
    in_waiting_loop: Spread | None = None  # minus the loop where the ranks wait for each other in each iteration
    wrong: int = -1
    limit_us: float = math.nan  # time of a bare fold of an equally large message
    processes: int = 1
    hosts: int = 1
    served_by: str = ""
    xla_bytes: int | None = None  # operands of XLA's collectives in one call, over all ranks
    loopback_bytes: float | None = None  # through the loopback interface in one call

    def busbw(self, microseconds: float) -> float:
        """In GB/s, as nccl-tests defines it: algbw, which is bytes / time, times 2 (p - 1) / p."""
        return self.bytes / max(microseconds, 1e-3) / 1e3 * 2 * (self.ranks - 1) / self.ranks


def rank_values(ranks: int, count: int, dtype) -> np.ndarray:
    """The messages of all ranks, of shape (ranks, count); the same in all processes."""
    rng, dtype = np.random.default_rng(0), jnp.dtype(dtype)
    if dtype.kind in "iu":
        return rng.integers(-3, 4, (ranks, count)).astype(dtype)
    return rng.standard_normal((ranks, count), np.float32).astype(dtype)


def count_wrong(values: np.ndarray, results: np.ndarray) -> int:
    """The number of elements, over all results, that differ from the exact sum by more than p - 1 roundings."""
    dtype = values.dtype
    if dtype.kind in "iu":
        return int(np.sum(results != values.sum(0, dtype=dtype)))
    wrong = 0
    # In pieces: several processes do this at once, and whole float64 copies of large messages would exhaust memory.
    for begin in range(0, values.shape[1], 1 << 20):
        piece = slice(begin, begin + (1 << 20))
        terms = values[:, piece].astype(np.float64)
        bound = len(values) * float(jnp.finfo(dtype).eps) / 2 * np.abs(terms).sum(0)
        wrong += int(np.sum(~(np.abs(results[:, piece].astype(np.float64) - terms.sum(0)) <= bound)))
    return wrong


def loop(reduce: Callable | None, times: int, x):
    """`times` all-reduces in a row, each with its result used, or the same loop without all-reduces."""
    bits = jnp.dtype(f"uint{8 * x.dtype.itemsize}")

    def body(_, x):
        x = reduce(x) if reduce else x
        # A use of x that is cheap in every dtype. XLA needs many instructions for arithmetic on small floats.
        return lax.bitcast_convert_type(lax.bitcast_convert_type(x, bits) ^ jnp.ones((), bits), x.dtype)

    return lax.fori_loop(0, times, body, x)


def waiting_loop(times: int, x):
    """The loop without all-reduces, but with a sum of 4 bytes in each iteration, for which the ranks wait."""

    def body(_, carry):
        x, small = carry
        # The sum happens between the uses of x, like the all-reduce in the other loop.
        x, small = lax.optimization_barrier((x, ring_psum(small, AXIS)))
        return loop(None, 1, x), small ^ 1

    return lax.fori_loop(0, times, body, (x, jnp.zeros(1, jnp.uint32)))[0]


class Case:
    """The compiled implementations for one message size."""

    def __init__(self, mesh: Mesh, count: int, dtype, implementations: Mapping[str, Callable], loop_seconds: float):
        self.mesh, self.count, self.dtype, self.names = mesh, count, jnp.dtype(dtype), list(implementations)
        sharding = NamedSharding(mesh, P(AXIS))
        self.values = rank_values(mesh.size, count, self.dtype)
        self.x = jax.device_put(self.values.reshape(-1), sharding)

        def compiled(fun, **options):
            mapped = jax.shard_map(fun, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False)
            return jax.jit(mapped, **options)

        self.plain = {name: compiled(reduce) for name, reduce in implementations.items()}
        self.donating = {name: compiled(reduce, donate_argnums=0) for name, reduce in implementations.items()}
        # Many calls amortize the launch of the loop. All implementations use the same number.
        first = self.plain[self.names[0]]
        first(self.x).block_until_ready()
        self.times = int(np.clip(loop_seconds / self._time_once(first, self.x), 4, 2000))
        self.loops = {
            name: compiled(lambda x, reduce=reduce: loop(reduce, self.times, x))
            for name, reduce in {**implementations, EMPTY: None}.items()
        }
        self.loops[WAITING] = compiled(lambda x: waiting_loop(self.times, x))
        # The cost of the waiting loop's own sums is not part of the baseline.
        self.small = jax.device_put(np.zeros(mesh.size, np.uint32), sharding)
        self.sums, self.no_sums = (
            compiled(lambda x, reduce=reduce: loop(reduce, self.times, x))
            for reduce in (lambda x: ring_psum(x, AXIS), None)
        )

    @staticmethod
    def _time_once(fun, x) -> float:
        begin = time.perf_counter()
        fun(x).block_until_ready()
        return time.perf_counter() - begin

    def wrong(self, name: str) -> int:
        """The number of wrong elements in the results of all ranks."""
        return count_wrong(self.values, np.asarray(self.plain[name](self.x)).reshape(self.mesh.size, -1))

    def run(self, iterations: int, warmup: int) -> dict[str, tuple[Spread, Spread, Spread, Spread]]:
        """Times the implementations interleaved, so that noise affects all of them.

        The spreads are those of a call from Python, with a donated argument, and in a loop: less the empty loop and
        less the waiting one.
        """
        plain, donating = self._calls(iterations, warmup)
        in_loop, in_waiting_loop = self._loops(max(LEAST_LOOPS, iterations))
        figures = (plain, donating, in_loop, in_waiting_loop)
        return {name: tuple(Spread.of(figure[name]) for figure in figures) for name in self.names}

    def _rotated(self, i: int) -> list[str]:
        """The implementations, another one first in each round."""
        return self.names[i % len(self.names) :] + self.names[: i % len(self.names)]

    def _calls(self, iterations: int, warmup: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
        plain = {name: [] for name in self.names}
        donating = {name: [] for name in self.names}
        for i in range(warmup + iterations):
            for name in self._rotated(i):
                seconds = self._time_once(self.plain[name], self.x)
                x = jax.block_until_ready(self.x + 0)
                seconds_donated = self._time_once(self.donating[name], x)
                if i >= warmup:
                    plain[name].append(seconds)
                    donating[name].append(seconds_donated)
        return plain, donating

    def _loops(self, rounds: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
        """Each loop stands between the two baselines that are subtracted from it."""
        in_loop = {name: [] for name in self.names}
        in_waiting_loop = {name: [] for name in self.names}
        for i in range(1 + rounds):
            for name in self._rotated(i):
                empty, whole, waiting = (
                    self._time_once(self.loops[each], self.x) / self.times for each in (EMPTY, name, WAITING)
                )
                sums, no_sums = (self._time_once(each, self.small) / self.times for each in (self.sums, self.no_sums))
                if i >= 1:
                    in_loop[name].append(whole - empty)
                    in_waiting_loop[name].append(whole - (waiting - (sums - no_sums)))
        return in_loop, in_waiting_loop
