"""The parts of the GPU check, in the order in which they run: first what would make all others hang."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as xml
from collections.abc import Callable
from typing import NamedTuple

import gpu_check_measure
from gpu_check_measure import VARIANTS

ROOT = pathlib.Path(__file__).parents[2]


class Context(NamedTuple):
    """What a part is told: whether this is a dry run, and its own name."""

    dry: bool
    part: str

    @property
    def backend(self) -> str:
        return "host" if self.dry else "cuda"


class Part(NamedTuple):
    """A part returns its section of the JSON file, or raises an error."""

    run: Callable[[Context], dict]
    limit: float  # seconds


def machine(context: Context) -> dict:
    """Describes the hardware and software, and how many ranks one GPU can run."""
    import jax
    import jaxlib

    from jax_ring import _gpu_check, runtime

    count, why = runtime.cuda_kernels.device_count()
    if count == 0 and not context.dry:
        raise RuntimeError(f"there is no GPU ({why}); use --dry for a dry run")

    def first_line(*command: str) -> str:
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip().splitlines()[-1]
        except (OSError, subprocess.CalledProcessError, IndexError):
            return "not found"

    query = ("nvidia-smi", "--query-gpu=name,driver_version,memory.total,compute_cap", "--format=csv,noheader")
    found = {
        "gpu": "none: a dry run on threads of the host" if context.dry else first_line(*query),
        "nvcc": first_line("nvcc", "--version"),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "python": sys.version.split()[0],
        "cores": os.cpu_count(),
        "commit": first_line("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"),
        "kernels of": ", ".join(_gpu_check.built_dtypes(context.backend)),
    }
    if not context.dry:
        resident = _gpu_check.resident_ctas("cuda")
        found["CTAs of a kernel that run at the same time"] = resident
        found["CTAs of each rank"] = ", ".join(
            f"{_gpu_check.Ranks('cuda', [(0, 0)] * p).num_ctas} of {p}" for p in (2, 4, 8) if p <= resident
        )
    return found


def first_calls(context: Context) -> dict:
    """One call of 4 bytes, by each algorithm, between 2 and then 8 ranks in one launch. A hang costs 3 seconds."""
    import struct

    from jax_ring import _gpu_check

    done = []
    for p in (2, 8):
        for algorithm, order in VARIANTS:
            call = f"{algorithm} in {order} order between {p} ranks"
            print(f"  {call}", flush=True)
            group = _gpu_check.Ranks(context.backend, [(0, 0)] * p, deadline=3.0)
            inputs = [[struct.pack("<f", 2.0**rank)] for rank in range(p)]
            results = group.run(inputs, "f32", algorithm, order)
            if failure := group.failure():
                raise RuntimeError(f"{call}: {failure}")
            got = [struct.unpack("<f", result[0])[0] for result in results]
            if got != [2.0**p - 1] * p:
                raise RuntimeError(f"{call}: the sum is {2.0**p - 1}, the ranks got {got}")
            done.append(call)
    return {"right": done}


def log_of(part: str) -> pathlib.Path:
    """Where the output of the programs that a part runs is written."""
    folder = ROOT / "build/gpu_check_logs"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{part}.log"


def part_of_tests(
    file: str, select: str = "", *, select_dry: str = "", not_dry: str = "", jax_on_gpu: bool = False
) -> Callable[[Context], dict]:
    """A part that runs tests of one file of tests/gpu, selected by pytest's -k, and counts the outcomes.

    select_dry: the selection of a dry run, if it is another one. not_dry: why a dry run does not run the part.
    """

    def run(context: Context) -> dict:
        if context.dry and not_dry:
            return {"not_done": not_dry}
        log = log_of(context.part)
        outcomes = log.with_suffix(".xml")
        variables = os.environ | ({"JAX_RING_GPU_CHECK_BACKEND": "host"} if context.dry else {})
        if not jax_on_gpu:
            variables["JAX_PLATFORMS"] = "cpu"  # JAX on the GPU would take most of its memory
        # -W default: warnings of an untested version of JAX do not fail tests. One test at a time: processes share a
        # GPU in time slices, so in parallel tests ranks would wait for slices, not for each other.
        options = ["-v", "-W", "default", "-n", "auto" if context.dry else "0", "--maxfail=3", f"--junitxml={outcomes}"]
        if selected := (select_dry or select) if context.dry else select:
            options += ["-k", selected]
        command = [sys.executable, "-m", "pytest", *options, str(ROOT / "tests/gpu" / file)]
        with log.open("w") as output:
            subprocess.run(command, env=variables, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        return _outcomes(outcomes, file)

    return run


def _outcomes(file: pathlib.Path, name: str) -> dict:
    suite = next(xml.parse(file).getroot().iter("testsuite"))
    counts = {outcome: int(suite.get(outcome, 0)) for outcome in ("tests", "failures", "errors", "skipped")}
    if counts["skipped"] == counts["tests"]:
        raise RuntimeError(f"all selected tests of {name} were skipped")
    reasons = {skipped.get("message") for skipped in suite.iter("skipped")}
    failed = [case.get("name") for case in suite.iter("testcase") if case.find("failure") is not None]
    return counts | {"failed": failed, "why_skipped": sorted(filter(None, reasons))}


# Few CTAs: a sanitizer makes kernels larger, so fewer fit.
SANITIZED_PROGRAM = """
from jax_ring import _gpu_check
import os
group = _gpu_check.Ranks({backend!r}, [(0, 0)] * 3, deadline=300.0, max_ctas=4)
for algorithm in ("one_shot", "two_shot", "ring"):
    for size in (4, 4100, 70000):
        group.run([[os.urandom(size)]] * 3, "u32", algorithm)
for size in (3, 4101, 70002):
    group.run([[os.urandom(size)]] * 3, "u8", collective="all_to_all")
    group.run([[os.urandom(size)]] * 3, "u8", collective="permute", sources=[2, -1, 1])
assert group.failure() == "", group.failure()
"""


def sanitizer(tool: str) -> Callable[[Context], dict]:
    """A part that runs small calls of each algorithm under a tool of compute-sanitizer."""

    def run(context: Context) -> dict:
        program = SANITIZED_PROGRAM.format(backend=context.backend)
        if context.dry:
            if tool == "memcheck":  # the program is the same for all tools
                subprocess.run([sys.executable, "-c", program], check=True)
            return {"not_done": "there is no GPU"}
        if (found := _cuda_tool("compute-sanitizer")) is None:
            return {"not_done": "compute-sanitizer is not installed"}
        command = [found, "--tool", tool, "--error-exitcode", "9", sys.executable, "-c", program]
        completed = subprocess.run(command, capture_output=True, text=True)
        output = completed.stdout + completed.stderr
        log_of(context.part).write_text(output)
        summary = " ".join(re.findall(r".*(?:ERROR SUMMARY|[Nn]ot supported).*", output)[-1:]).strip("= ")
        if re.search("[Nn]ot supported", output):
            return {"not_done": summary}
        if completed.returncode:
            raise RuntimeError(f"{tool}: exit status {completed.returncode}: {summary or output[-500:]}")
        return {"result": summary}

    return run


PROFILED_PROGRAM = """
from jax_ring import _gpu_check
group = _gpu_check.Ranks({backend!r}, [(0, 0)] * {ranks}, deadline=300.0)
for algorithm, size in {cases}:
    group.run([[bytes(size)]] * {ranks}, "f32", algorithm)
assert group.failure() == "", group.failure()
"""
PROFILED_CASES = [("one_shot", 4), ("one_shot", 32 << 10), ("two_shot", 64 << 10), ("two_shot", 64 << 20)]
METRICS = {
    "gpu__time_duration.sum": "time",
    "launch__registers_per_thread": "registers",
    "launch__grid_size": "CTAs",
    "smsp__inst_executed.sum": "instructions of warps",
    "dram__bytes_read.sum": "read from DRAM",
    "dram__bytes_write.sum": "written to DRAM",
    "lts__t_sectors.sum": "sectors through L2",
}


def profile(context: Context) -> dict:
    """Runs Nsight Compute on single calls of 8 ranks in one launch."""
    cases, ranks = ([("one_shot", 4), ("two_shot", 64)], 2) if context.dry else (PROFILED_CASES, 8)
    program = PROFILED_PROGRAM.format(backend=context.backend, ranks=ranks, cases=cases)
    if context.dry:
        subprocess.run([sys.executable, "-c", program], check=True)
        return {"not_done": "there is no GPU"}
    if (ncu := _cuda_tool("ncu")) is None:
        return {"not_done": "Nsight Compute (ncu) is not installed"}
    options = ["--csv", "--clock-control", "none", "--target-processes", "all", "--metrics", ",".join(METRICS)]
    completed = subprocess.run([ncu, *options, sys.executable, "-c", program], capture_output=True, text=True)
    output = completed.stdout + completed.stderr
    log_of(context.part).write_text(output)
    if "ERR_NVGPUCTRPERM" in output:
        return {"not_done": "this user may not read the GPU's counters (ERR_NVGPUCTRPERM)"}
    launches = gpu_check_measure.metrics_of_launches(completed.stdout)
    if completed.returncode or len(launches) != len(cases):
        raise RuntimeError(f"ncu: exit status {completed.returncode}, {len(launches)} kernels: {output[-800:]}")
    return {
        "rows": [
            {"algorithm": algorithm, "bytes": size}
            | {name: launch.get(metric, "missing") for metric, name in METRICS.items()}
            for (algorithm, size), launch in zip(cases, launches, strict=True)
        ]
    }


def _cuda_tool(name: str) -> str | None:
    """The path of a program of the CUDA toolkit, or None."""
    folders = [pathlib.Path("/usr/local/cuda/bin"), *sorted(pathlib.Path("/opt/nvidia/nsight-compute").glob("*"))]
    found = shutil.which(name) or next((folder / name for folder in folders if (folder / name).is_file()), None)
    return None if found is None else str(found)


# In the order in which failures tell most: the kernels alone, then queues and graphs, then memory, then processes, and
# only then JAX. Without a GPU all modes are the same, the native tests run the code with more ranks and all types, and
# JAX has the CPU engine. So a dry run tries all modes with 3 ranks, JAX with 2, and runs the tests of a file at once.
PARTS = {
    "machine": Part(machine, 40),
    "first_calls": Part(first_calls, 60),
    "boundaries": Part(
        part_of_tests(
            "test_modes.py",
            "not streams and not graphs",
            select_dry="3- or not (together or streams or graphs or every_dtype) or dtype and (f32 or bf16 or u8)",
        ),
        120,
    ),
    "tree": Part(part_of_tests("test_tree_order.py", select_dry="two_shot-together or scattered"), 60),
    "streams": Part(part_of_tests("test_modes.py", "streams", not_dry="boundaries runs them"), 60),
    "graphs": Part(part_of_tests("test_modes.py", "graphs", not_dry="boundaries runs them"), 60),
    "memcheck": Part(sanitizer("memcheck"), 120),
    "processes": Part(part_of_tests("test_processes.py"), 150),
    "through_jax": Part(
        part_of_tests(
            "test_jax.py",
            "not recorded and not connects and not ordinary",
            select_dry="not recorded and not -3] and not -4]",
            jax_on_gpu=True,
        ),
        150,
    ),
    "ordinary": Part(part_of_tests("test_jax.py", "ordinary", not_dry="through_jax runs it", jax_on_gpu=True), 90),
    "recorded": Part(
        part_of_tests("test_jax.py", "recorded", not_dry="CPU devices have no graphs", jax_on_gpu=True), 90
    ),
    "profile": Part(profile, 60),
    "beside": Part(part_of_tests("test_jax.py", "connects", not_dry="through_jax runs it", jax_on_gpu=True), 90),
    "measure": Part(lambda context: gpu_check_measure.measure(context.dry), 120),
    "xla": Part(lambda context: gpu_check_measure.by_xla(context.dry), 60),
    "initcheck": Part(sanitizer("initcheck"), 120),
}
