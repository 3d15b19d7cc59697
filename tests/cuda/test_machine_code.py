"""The machine code of the CUDA kernels: nothing spills, parameters are constants, and every post has one fence.

Needs no GPU, but the built kernels and NVIDIA's disassembler. The kernels are those of the GPU check
(`benchmarks/gpu/gpu_check.sh`), or of the file that JAX_RING_KERNELS names.
"""

import dataclasses
import functools
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[2]
ALGORITHMS = ("one_shot", "two_shot", "ring", "multicast")

# Flags that a team sets in each algorithm, each at one place of the program: one-shot sends tags with its data and sets
# none, two-shot tells its peers that a step has ended, and the ring tells both neighbors.
POSTS = {"one_shot": 0, "two_shot": 1, "ring": 2, "multicast": 1}

# A flag is posted with release semantics for the whole system, which is a fence and a store. One more fence belongs to
# the record of a failure, which the host reads.
FENCES = {algorithm: posts + 1 for algorithm, posts in POSTS.items()}

# Loads of an unknown address space. Some are flags and counters, which are read once or polled, and the others are in
# code that runs only after a failure. With parameters that are not constants there are several hundred.
MOST_GENERIC_LOADS = 60

MEMORY_ACCESS = r"(LD|ST|LDG|STG|ATOM|ATOMG|RED|REDG|MULTIMEM)\b"


def kernels_file():
    named = os.environ.get("JAX_RING_KERNELS")
    if named:
        return pathlib.Path(named)
    built = sorted((ROOT / "build/gpu_check_site/jax_ring").glob("_cuda_kernels*.so"))
    return built[0] if built else None


def folder_of_tools():
    """The folder of cuobjdump and nvdisasm: on the PATH, of a CUDA toolkit, or from PyPI's wheels."""
    candidates = [pathlib.Path(found).parent for found in [shutil.which("cuobjdump")] if found]
    candidates += [pathlib.Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin"]
    spec = importlib.util.find_spec("nvidia")
    for package in (spec.submodule_search_locations or []) if spec else []:
        candidates += sorted(pathlib.Path(package).glob("*/bin"))
    for folder in candidates:
        if all((folder / tool).exists() for tool in ("cuobjdump", "nvdisasm")):
            return folder
    return None


@dataclasses.dataclass(frozen=True)
class Kernel:
    name: str
    arch: str
    algorithm: str
    along_tree: bool
    registers: int
    stack: int
    instructions: tuple[str, ...]

    def count(self, pattern):
        return sum(re.match(pattern, each) is not None for each in self.instructions)


def parse(code, resources):
    """The kernels of the programs, from the output of `cuobjdump -sass` and `cuobjdump -res-usage`."""
    usage = {
        name: (int(registers), int(stack))
        for name, registers, stack in re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+)", resources)
    }
    kernels = []
    arch = ""
    for part in re.split(r"\n\s*(?=Function : |code for )", code):
        if found := re.match(r"code for (\w+)", part):
            arch = found[1]
        found = re.match(r"Function : (\S*(collective|tree)_kernel\S*?AlgorithmE(\d)\S*)", part)
        if not found:
            continue
        lines = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][^;]*);", part)
        algorithm, along_tree = ALGORITHMS[int(found[3])], found[2] == "tree"
        kernels.append(Kernel(found[1], arch, algorithm, along_tree, *usage[found[1]], tuple(lines)))
    return kernels


@functools.cache
def all_kernels():
    file = kernels_file()
    if file is None:
        pytest.skip("the CUDA kernels are not built: run benchmarks/gpu/gpu_check.sh --dry, or set JAX_RING_KERNELS")
    tools = folder_of_tools()
    if tools is None:
        why = (
            "cuobjdump and nvdisasm were not found: install the CUDA toolkit's, or "
            "pip install --no-deps nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"
        )
        # Who names the kernels wants them looked at: in CI a skipped test would pass unnoticed.
        (pytest.fail if "JAX_RING_KERNELS" in os.environ else pytest.skip)(why)
    environment = {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ.get('PATH', '')}"}

    def dump(option):
        command = [tools / "cuobjdump", option, file]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    kernels = parse(dump("-sass"), dump("-res-usage"))
    assert kernels, f"{file} has no kernels of programs"
    for along_tree, algorithms in ((False, set(ALGORITHMS)), (True, {"one_shot", "two_shot"})):
        assert {kernel.algorithm for kernel in kernels if kernel.along_tree == along_tree} == algorithms
    return kernels


def failing(is_wrong):
    return {(kernel.name, kernel.arch): wrong for kernel in all_kernels() if (wrong := is_wrong(kernel))}


def test_nothing_spills():
    # A multiprocessor has 65536 registers for the 512 threads of a team.
    def wrong(kernel):
        found = kernel.registers, kernel.stack, kernel.count("LDL"), kernel.count("STL")
        return (found[0] > 128 or any(found[1:])) and found

    assert not failing(wrong)


def test_parameters_are_constants():
    # Strong loads are those of flags.
    assert not failing(lambda kernel: (n := kernel.count(r"LD\.E(?!\S*STRONG)")) > MOST_GENERIC_LOADS and n)


def test_kernels_for_hopper_wait_for_their_stream():
    # They are launched early. Nothing is read or written before the wait.
    def wrong(kernel):
        waits = [i for i, each in enumerate(kernel.instructions) if each.startswith("ACQBULK")]
        if int(kernel.arch.removeprefix("sm_").rstrip("af")) < 90:
            return waits
        accesses = [i for i, each in enumerate(kernel.instructions) if re.match(MEMORY_ACCESS, each)]
        return len(waits) != 1 or waits[0] > min(accesses)

    assert not failing(wrong)


def test_packs_are_loaded_in_one_piece():
    assert not failing(lambda kernel: kernel.count(r"LDG\.E\S*128") == 0 or kernel.count(r"STG\.E\S*128") == 0)


def test_every_post_has_one_fence():
    def fences(kernel):
        found = kernel.count(r"MEMBAR\.ALL\.SYS")
        return found != FENCES[kernel.algorithm] and f"{found} instead of {FENCES[kernel.algorithm]}"

    assert not failing(fences)


def test_the_end_of_a_call_costs_no_fence_of_the_system():
    # A lane is freed for other kernels of the same GPU. One-shot has no counters that these have to see.
    assert not failing(lambda kernel: kernel.count(r"MEMBAR\.ALL\.GPU") != (kernel.algorithm != "one_shot"))


def has_multimem(kernel):
    return int(kernel.arch.removeprefix("sm_").rstrip("a")) >= 90


def test_the_multicast_address_is_ordered_with_that_of_each_mailbox():
    """One fence in the wait, which is two instructions of which the GPU's mode selects one, where both are used."""

    def wrong(kernel):
        uses_both = kernel.algorithm in ("two_shot", "multicast") and has_multimem(kernel)
        found = kernel.count(r"MEMBAR\.SC\.SYS")
        return found != int(uses_both) and found

    assert not failing(wrong)


def test_the_switch_adds_packs_and_stores_go_to_all():
    """As many loads in flight as a thread has packs, and no arithmetic of floats is left to the GPU."""

    def wrong(kernel):
        expected = kernel.algorithm == "multicast" and has_multimem(kernel)
        found = kernel.count(r"LDGMC\.E")
        floats = kernel.count(r"FADD|DADD") if expected else 0
        return ((found > 0) != expected or floats > 0) and (found, floats)

    assert not failing(wrong)


def test_lines_are_loaded_before_any_is_tested():
    """One-shot waits for the lines of all its peers in one round trip through the L2 cache."""

    def longest_run(kernel):
        longest = run = 0
        for each in kernel.instructions:
            if re.match(r"LDG\.E\S*128\S*STRONG\.SYS", each):
                run += 1
                longest = max(longest, run)
            elif re.match(r"BRA|BSSY|BSYNC|CALL|EXIT|RET", each):
                run = 0
        return longest

    # Two lines for each of four peers at least; seven, where the accumulators leave registers for them. Along a tree
    # there may be a branch around the loads of a term that is not there, and half as many lines for bytes.
    def wrong(kernel):
        least = 4 if kernel.along_tree else 8
        return kernel.algorithm == "one_shot" and (run := longest_run(kernel)) < least and run + 1

    assert not failing(wrong)
