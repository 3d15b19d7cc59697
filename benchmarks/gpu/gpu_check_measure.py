"""The measurements of the GPU check: calls of ranks on one GPU, the same work by XLA, counters of single kernels."""

import csv
import statistics
import time

# Every algorithm, with each order in which it can fold.
VARIANTS = [("one_shot", "rank"), ("two_shot", "rank"), ("ring", "rank"), ("ring", "ring"), ("ring", "any")]
VARIANTS += [("one_shot", "tree"), ("two_shot", "tree")]
RANKS = [2, 4, 8]


def traffic(p: int, num_bytes: int, algorithm: str) -> float:
    """Bytes that an all-reduce between p ranks reads and writes in one memory, over all ranks.

    Each rank reads its operand and writes its result. one_shot: it also writes 2 bytes per byte to each peer, and reads
    as many. two_shot: (p-1)/p of the message are written to peers and read by them, twice. ring: the same, as p-1
    chunks of 1/p in each direction; in rank order the whole message goes over each link but one, twice. In
    tree order a rank also sends its own part to itself, which is not counted.
    """
    shares = {
        "one_shot": 2 * 2 * (p - 1),
        "two_shot": 2 * 2 * (p - 1) / p,
        "ring, ring order": 2 * 2 * (p - 1) / p,
        "ring, rank order": 2 * 2 * (p - 1) / p,
    }
    return p * num_bytes * (2 + shares[algorithm.removesuffix(", tree order")])


def measure(dry: bool) -> dict:
    """Times one call between ranks on one GPU, each a CUDA graph of many calls, relative to the memory bandwidth."""
    from jax_ring import _gpu_check

    backend = "host" if dry else "cuda"
    sizes = [1 << 12] if dry else [4, 1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26]
    copied_bytes = (1 << 20) if dry else (1 << 32)
    seconds = _gpu_check.Ranks(backend, [(0, 0)]).copy_seconds(copied_bytes, 5) / 5
    memory_bandwidth = 2 * copied_bytes / seconds  # a copy reads and writes
    rows = []
    for p in [2] if dry else RANKS:
        group = _gpu_check.Ranks(backend, [(0, 0)] * p)
        for num_bytes in sizes:
            for algorithm, order in VARIANTS:
                if algorithm == "one_shot" and num_bytes > 1 << 20:
                    continue
                name = algorithm if algorithm != "ring" and order == "rank" else f"{algorithm}, {order} order"
                if (algorithm, order) == ("ring", "any"):
                    continue  # with these options it is the ring in ring order
                repeats = max(1, min(200, (1 << 26) // num_bytes))
                samples = group.seconds(
                    num_bytes, algorithm=algorithm, order=order, how="graphs", repeats=2 if dry else repeats,
                    samples=3 if dry else 9,
                )  # fmt: skip
                median = statistics.median(samples)
                rows.append({
                    "ranks": p, "bytes": num_bytes, "algorithm": name, "us": median * 1e6,
                    "us_least": min(samples) * 1e6, "us_most": max(samples) * 1e6,
                    "algbw_GBps": num_bytes / median / 1e9, "busbw_GBps": num_bytes / median * 2 * (p - 1) / p / 1e9,
                    "of_memory": traffic(p, num_bytes, name) / median / memory_bandwidth,
                })  # fmt: skip
                assert group.failure() == "", group.failure()
        print(f"{p} ranks measured")
    return {"copy_GBps": memory_bandwidth / 1e9, "rows": rows}


def by_xla(dry: bool) -> dict:
    """Times the same work by XLA: a psum over a vmap axis of the stacked array, with a result per rank."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    rows = []
    for p in [2] if dry else RANKS:
        for num_bytes in [1 << 12] if dry else [1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 26]:
            x = jax.random.normal(jax.random.key(0), (p, num_bytes // 4), jnp.float32)
            # The subtraction keeps values bounded, and the results of the ranks different.
            repeats = max(1, min(100, (1 << 26) // num_bytes))
            psum = jax.vmap(lambda x: x - lax.psum(x, "i"), axis_name="i")
            loop = jax.jit(lambda x, psum=psum, n=repeats: lax.fori_loop(0, n, lambda _, x: psum(x) * 0.5, x))
            jax.block_until_ready(loop(x))
            samples = []
            for _ in range(9):
                begin = time.perf_counter()
                jax.block_until_ready(loop(x))
                samples.append((time.perf_counter() - begin) / repeats)
            rows.append({
                "ranks": p, "bytes": num_bytes, "us": statistics.median(samples) * 1e6,
                "us_least": min(samples) * 1e6, "us_most": max(samples) * 1e6,
            })  # fmt: skip
    return {"rows": rows}


def metrics_of_launches(text: str) -> list[dict[str, str]]:
    """The metrics of each kernel, by name and with their units, from what `ncu --csv --metrics ...` prints."""
    lines = text.splitlines()
    begin = next((i for i, line in enumerate(lines) if line.startswith('"ID",')), len(lines))
    launches: dict[str, dict[str, str]] = {}
    for row in csv.DictReader(lines[begin:]):
        if "memset" in (row.get("Kernel Name") or "").lower():
            continue  # the runtime may clear memory by a kernel of its own
        metrics = launches.setdefault(row["ID"], {})
        metrics[row["Metric Name"]] = f"{row['Metric Value']} {row['Metric Unit']}".strip()
    return list(launches.values())
