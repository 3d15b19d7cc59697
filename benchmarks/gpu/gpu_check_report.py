"""The readable report of the GPU check, and what the failure of each part would say."""

# By part, in the order of the check: where to look if this part fails first.
MEANING = {
    "machine": "There is no GPU that CUDA can use, or the package was not built with its kernels.",
    "first_calls": (
        "The smallest call fails, with all ranks in one launch, so that neither streams nor graphs nor processes nor "
        "JAX matter. A launch that fails: the build is for another GPU. A rank that waited: the step in its message "
        "says which flag or line never came (ffi/device/memory/signal.h, one_shot.h, two_shot.h, ring.h). One-shot "
        "alone works: look at fences and flags. Only 8 ranks fail: not all CTAs run at the same time."
    ),
    "boundaries": (
        "Single calls work. Look at sizes around the boundaries of packs, parts and slots, at several operands, and at "
        "the wrap-around of the counters: the name of the test says which."
    ),
    "tree": (
        "Calls in the orders of ranks and of the ring work, and these have the same protocol. Look at the kernels "
        "along a tree (ffi/device/fold/fold_tree.h) and at several slots for each rank; wrong bits on some numbers of "
        "ranks only are a wrong program (tree_program.h)."
    ),
    "streams": (
        "It works in one launch, so the ranks did not run at the same time on streams of their own. Either streams "
        "share a hardware queue (CUDA_DEVICE_MAX_CONNECTIONS is 32 here), or not all CTAs fit (see the numbers at the "
        "top), or something that was loaded late waited for a kernel that was waiting."
    ),
    "graphs": (
        "It works on streams, so it is the recording or the replay: a kernel parameter that should change from call to "
        "call, or a graph that is instantiated while another rank's kernel waits for it."
    ),
    "memcheck": "An access outside of an allocation. The log names the kernel and the address; compare with mailbox.h.",
    "processes": (
        "It works within a process, so it is CUDA IPC or the time slices of the GPU: processes that share a GPU take "
        "turns, so that a deadline may be too short. The kernels are the same."
    ),
    "through_jax": (
        "The engine works without JAX, so it is the handler, the rendezvous of the ranks, or what is lowered. Run "
        "tests/gpu/jax_rank.py by hand with TF_CPP_MIN_LOG_LEVEL=0."
    ),
    "ordinary": (
        "Calls in shard_map work, so it is what becomes of the partitioner's collectives: jax_ring/lowering/hlo. The "
        "test names the program."
    ),
    "recorded": (
        "It works when JAX launches each call, so it is XLA's command buffers. The test says whether nothing was "
        "recorded, or the values of a recorded call are wrong."
    ),
    "profile": "Nsight Compute replays kernels; a kernel that waits for a rank that is not replayed never ends.",
    "beside": (
        "A thread compiles and connects a new group while a loop of another group runs: something took a lock of the "
        "driver, or synchronised the device, while a kernel waited (docs/gpu.md)."
    ),
    "initcheck": "A read of memory that nothing wrote. The log names the kernel; mailboxes are cleared when allocated.",
}
TESTS = ("boundaries", "tree", "streams", "graphs", "processes", "through_jax", "ordinary", "recorded", "beside")


def has_failed(result: dict) -> bool:
    """Whether a part failed, by an error or by tests that failed."""
    return "error" in result or result.get("failures", 0) + result.get("errors", 0) > 0


def explanation(part: str, result: dict) -> str:
    """What went wrong in a part, and what that says if everything before it worked."""
    what = result.get("error") or f"failed: {', '.join(result['failed']) or 'errors outside of the tests'}"
    return f"{part}: {what}\n{MEANING.get(part, '')}".rstrip()


def report(results: dict, dry: bool) -> str:
    """The report as Markdown, from the sections of all parts that have run."""
    lines = ["# GPU check", ""]
    if dry:
        lines += ["**A dry run on threads of the host: it shows that the check works, and nothing about a GPU.**", ""]
    lines += [f"- {name}: {value}" for name, value in results.get("machine", {}).items() if name != "error"]
    lines += ["", "Several ranks share one GPU: the figures measure its memory, not links between GPUs.", ""]
    parts = [part for part in MEANING if part in results]  # in the check's order, however often a part ran
    if first := next((part for part in parts if has_failed(results[part])), None):
        lines += ["## The first part that failed", "", explanation(first, results[first]), ""]
        if log := results[first].get("log"):
            lines += ["The end of its output:", "", "```", log.strip()[-3000:], "```", ""]
    lines += _tests(results)
    lines += ["", "## Single calls and sanitizers", ""]
    for name in ("first_calls", "memcheck", "initcheck"):
        if result := results.get(name):
            right = [f"{len(result['right'])} calls of 4 bytes are right"] if "right" in result else []
            text = "; ".join(right + [str(result[key]) for key in ("result", "not_done", "error") if key in result])
            lines.append(f"- {name}: {text}")
    lines += _profile(results.get("profile", {})) + _times(results.get("measure", {}))
    lines += _xla(results.get("xla", {}).get("rows", []), results.get("measure", {}).get("rows", []))
    if errors := {name: part["error"] for name, part in results.items() if "error" in part}:
        lines += ["", "## Parts that failed with an error", ""]
        lines += [f"- {name}: {error}" for name, error in errors.items()]
    return "\n".join(lines) + "\n"


def _tests(results: dict) -> list[str]:
    lines = ["## Tests", "", "| | run | failed | skipped |", "|---|---|---|---|"]
    for name in TESTS:
        if not (counts := results.get(name)):
            continue
        if why := counts.get("error") or counts.get("not_done"):
            lines.append(f"| {name} | not run: {why} | | |")
            continue
        failed = counts["failures"] + counts["errors"]
        lines.append(f"| {name} | {counts['tests'] - counts['skipped']} | {failed} | {counts['skipped']} |")
    for name in TESTS:
        for why in results.get(name, {}).get("why_skipped", []):
            lines.append(f"\nSkipped in {name}: {why}")
        for test in results.get(name, {}).get("failed", []):
            lines.append(f"\nFailed in {name}: {test}")
    return lines


def _profile(profiled: dict) -> list[str]:
    if why := profiled.get("not_done"):
        return ["", f"No counters of single kernels: {why}."]
    if not (rows := profiled.get("rows")):
        return []
    lines = ["", "## Single kernels under Nsight Compute, 8 ranks in one launch, float32", ""]
    lines += ["| " + " | ".join(rows[0]) + " |", "|---" * len(rows[0]) + "|"]
    return lines + ["| " + " | ".join(str(value) for value in row.values()) + " |" for row in rows]


def _times(measured: dict) -> list[str]:
    if not (rows := measured.get("rows")):
        return []
    lines = ["", "## Time of one call, each rank a CUDA graph of many calls, float32", ""]
    lines += [f"A copy within device memory: {measured['copy_GBps']:.0f} GB/s, reads and writes together.", ""]
    lines += ["| ranks | bytes | algorithm | µs | least to most | algbw GB/s | of the memory's rate |"]
    lines += ["|---|---|---|---|---|---|---|"]
    return lines + [
        f"| {row['ranks']} | {row['bytes']} | {row['algorithm']} | {row['us']:.1f} | "
        f"{row['us_least']:.1f} to {row['us_most']:.1f} | {row['algbw_GBps']:.2f} | {row['of_memory']:.0%} |"
        for row in rows
    ]


def _xla(rows: list, measured: list) -> list[str]:
    if not rows:
        return []
    best: dict[tuple, float] = {}
    for row in measured:
        key = row["ranks"], row["bytes"]
        best[key] = min(row["us"], best.get(key, row["us"]))
    lines = ["", "## The same work by XLA: psum over a vmap axis, in a loop", ""]
    lines += ["| ranks | bytes | µs | jax_ring, fastest | ratio |", "|---|---|---|---|---|"]
    for row in rows:
        ours = best.get((row["ranks"], row["bytes"]))
        cells = f"{ours:.1f} | {row['us'] / ours:.2f}" if ours else "not measured | "
        lines.append(f"| {row['ranks']} | {row['bytes']} | {row['us']:.1f} | {cells} |")
    return lines
