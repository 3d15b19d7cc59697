"""Runs the parts of the GPU check and writes its report. Use gpu_check.sh, which builds the package first."""

import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import time
import xml.etree.ElementTree as xml

VARIANTS = [("one_shot", "rank"), ("two_shot", "rank"), ("ring", "rank"), ("ring", "ring")]
RANKS = [2, 4, 8]
ROOT = pathlib.Path(__file__).parent.parent


# ---- Parts. Each takes whether this is a dry run, and returns its section of the JSON file.


def machine(dry: bool) -> dict:
    """Describes the hardware and software."""
    import jax
    import jaxlib

    from jax_ring import _gpu_check, runtime  # noqa: F401

    count, why = runtime.cuda_kernels.device_count()
    if count == 0 and not dry:
        raise SystemExit(f"there is no GPU ({why}); use --dry for a dry run")

    def first_line(*command: str) -> str:
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip().splitlines()[-1]
        except (OSError, subprocess.CalledProcessError, IndexError):
            return "not found"

    query = ("nvidia-smi", "--query-gpu=name,driver_version,memory.total,compute_cap", "--format=csv,noheader")
    return {
        "gpu": "none: a dry run on threads of the host" if dry else first_line(*query),
        "nvcc": first_line("nvcc", "--version"),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "python": sys.version.split()[0],
        "cores": os.cpu_count(),
        "commit": first_line("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"),
    }


def run_tests(dry: bool, file: str) -> dict:
    """Runs one file of tests/gpu, and counts the outcomes."""
    log = ROOT / "build" / f"{file}.xml"
    log.parent.mkdir(exist_ok=True)
    variables = os.environ | ({"JAX_RING_GPU_CHECK_BACKEND": "host"} if dry else {})
    # -W default: warnings of an untested version of JAX do not fail tests. One test at a time: processes share a
    # GPU in time slices, so that tests in parallel would make ranks wait for slices, not for each other.
    options = ["-q", "-W", "default", "-n", "auto" if dry else "0", f"--junitxml={log}"]
    command = [sys.executable, "-m", "pytest", *options, str(ROOT / "tests/gpu" / file)]
    completed = subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True)
    print(completed.stdout[-3000:], completed.stderr[-2000:])
    suite = next(xml.parse(log).getroot().iter("testsuite"))
    counts = {name: int(suite.get(name)) for name in ("tests", "failures", "errors", "skipped")}
    if counts["skipped"] == counts["tests"]:
        raise RuntimeError(f"all tests of {file} were skipped")
    reasons = {skipped.get("message") for skipped in suite.iter("skipped")}
    failed = [case.get("name") for case in suite.iter("testcase") if case.find("failure") is not None]
    return counts | {"failed": failed, "why_skipped": sorted(filter(None, reasons))}


def modes(dry: bool) -> dict:
    return run_tests(dry, "test_modes.py")


def processes(dry: bool) -> dict:
    return run_tests(dry, "test_processes.py")


def through_jax(dry: bool) -> dict:
    return run_tests(dry, "test_jax.py")


SANITIZED_PROGRAM = """
from jax_ring import _gpu_check
import os
group = _gpu_check.Ranks({backend!r}, [(0, 0)] * 3, deadline=300.0)
for algorithm in ("one_shot", "two_shot", "ring"):
    for size in (4, 4100, 70000):
        group.run([[os.urandom(size)]] * 3, "u32", algorithm)
assert group.failure() == "", group.failure()
"""


def sanitizers(dry: bool) -> dict:
    """Runs compute-sanitizer on small calls of each algorithm: memcheck and initcheck."""
    program = SANITIZED_PROGRAM.format(backend="host" if dry else "cuda")
    if dry:
        subprocess.run([sys.executable, "-c", program], check=True)
        return {"not_done": "there is no GPU"}
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not pathlib.Path(sanitizer).exists():
        return {"not_done": "compute-sanitizer is not installed"}
    results = {}
    for tool in ("memcheck", "initcheck"):
        command = [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, "-c", program]
        try:
            completed = subprocess.run(command, capture_output=True, text=True, timeout=150)
        except subprocess.TimeoutExpired:
            results[tool] = "not finished within 150 s"
            continue
        lines = [line for line in completed.stdout.splitlines() if "ERROR SUMMARY" in line or "not supported" in line]
        results[tool] = f"exit status {completed.returncode}: {' '.join(lines[-1:])}"
    return results


def traffic(p: int, num_bytes: int, algorithm: str) -> float:
    """Bytes that an all-reduce between p ranks reads and writes in one memory, over all ranks.

    Each rank reads its operand and writes its result. one_shot: it also writes 2 bytes per byte to each peer, and reads
    as many. two_shot: (p-1)/p of the message are written to peers and read by them, twice. ring: the same, as p-1
    chunks of 1/p in each direction; in rank order the whole message goes over each link but one, twice.
    """
    shares = {
        "one_shot": 2 * 2 * (p - 1),
        "two_shot": 2 * 2 * (p - 1) / p,
        "ring, ring order": 2 * 2 * (p - 1) / p,
        "ring, rank order": 2 * 2 * (p - 1) / p,
    }
    return p * num_bytes * (2 + shares[algorithm])


def measure(dry: bool) -> dict:
    """Times one call between ranks on one GPU, in one launch, relative to the memory bandwidth."""
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
                name = algorithm if algorithm != "ring" else f"ring, {order} order"
                repeats = max(1, min(200, (1 << 26) // num_bytes))
                samples = group.seconds(
                    num_bytes, algorithm=algorithm, order=order, repeats=2 if dry else repeats, samples=3 if dry else 9
                )
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


def xla(dry: bool) -> dict:
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


PARTS = {part.__name__: part for part in (machine, modes, processes, through_jax, sanitizers, measure, xla)}


# ---- Report


def report(results: dict, dry: bool) -> str:
    lines = ["# GPU check", ""]
    if dry:
        lines += ["**A dry run on threads of the host: it shows that the check works, and nothing about a GPU.**", ""]
    lines += [f"- {name}: {value}" for name, value in results.get("machine", {}).items()]
    lines += ["", "Several ranks share one GPU: the figures measure its memory, not links between GPUs.", ""]
    lines += ["## Tests", "", "| | run | failed | skipped |", "|---|---|---|---|"]
    for name in ("modes", "processes", "through_jax"):
        if counts := results.get(name):
            if "error" in counts:
                lines.append(f"| {name} | not run: {counts['error']} | | |")
                continue
            failed = counts["failures"] + counts["errors"]
            lines.append(f"| {name} | {counts['tests'] - counts['skipped']} | {failed} | {counts['skipped']} |")
    for name in ("modes", "processes", "through_jax"):
        for why in results.get(name, {}).get("why_skipped", []):
            lines.append(f"\nSkipped in {name}: {why}")
        for test in results.get(name, {}).get("failed", []):
            lines.append(f"\nFailed in {name}: {test}")
    lines += ["", "## Sanitizers", ""]
    lines += [f"- {name}: {value}" for name, value in results.get("sanitizers", {}).items()]
    measured = results.get("measure", {})
    if rows := measured.get("rows"):
        lines += ["", "## Time of one call, all ranks in one launch, float32", ""]
        lines += [f"A copy within device memory: {measured['copy_GBps']:.0f} GB/s, reads and writes together.", ""]
        lines += ["| ranks | bytes | algorithm | µs | least to most | algbw GB/s | of the memory's rate |"]
        lines += ["|---|---|---|---|---|---|---|"]
        lines += [
            f"| {row['ranks']} | {row['bytes']} | {row['algorithm']} | {row['us']:.1f} | "
            f"{row['us_least']:.1f} to {row['us_most']:.1f} | {row['algbw_GBps']:.2f} | {row['of_memory']:.0%} |"
            for row in rows
        ]
    if rows := results.get("xla", {}).get("rows"):
        best = {}
        for row in measured.get("rows", []):
            key = row["ranks"], row["bytes"]
            best[key] = min(row["us"], best.get(key, row["us"]))
        lines += ["", "## The same work by XLA: psum over a vmap axis, in a loop", ""]
        lines += ["| ranks | bytes | µs | jax_ring, fastest | ratio |", "|---|---|---|---|---|"]
        for row in rows:
            jax_ring_us = best.get((row["ranks"], row["bytes"]))
            cells = f"{jax_ring_us:.1f} | {row['us'] / jax_ring_us:.2f}" if jax_ring_us else "not measured | "
            lines.append(f"| {row['ranks']} | {row['bytes']} | {row['us']:.1f} | {cells} |")
    errors = {name: part["error"] for name, part in results.items() if "error" in part}
    if errors:
        lines += ["", "## Parts that failed with an error", ""]
        lines += [f"- {name}: {error}" for name, error in errors.items()]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry", action="store_true", help="run without a GPU, on threads of the host")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"one of {', '.join(PARTS)}; by default all that are missing"
    )
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"unknown parts {sorted(unknown)}; choose from {list(PARTS)}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    file = arguments.out / "results.json"
    results = json.loads(file.read_text()) if file.exists() else {}
    for name in arguments.parts or [name for name in PARTS if name not in results or "error" in results[name]]:
        print(f"== {name}", flush=True)
        begin = time.perf_counter()
        try:
            results[name] = PARTS[name](arguments.dry)
        except Exception as error:  # run the other parts anyway
            results[name] = {"error": f"{type(error).__name__}: {error}"}
        results[name]["seconds"] = round(time.perf_counter() - begin, 1)
        file.write_text(json.dumps(results, indent=1) + "\n")
        (arguments.out / "README.md").write_text(report(results, arguments.dry))
    print(report(results, arguments.dry))
    failed = sum(part.get("failures", 0) + part.get("errors", 0) + ("error" in part) for part in results.values())
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
