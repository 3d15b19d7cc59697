"""Runs the parts of the GPU check, each within its own time limit. Use gpu_check.sh, which builds the package first."""

import argparse
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent))  # PYTHONSAFEPATH leaves it out

import gpu_check_parts
from gpu_check_parts import PARTS
from gpu_check_report import explanation, has_failed, report


def run_part(name: str, dry: bool, limit: float) -> dict:
    """Runs a part in a process of its own, and kills it and what it started after `limit` seconds."""
    log = gpu_check_parts.log_of(name)
    log.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        result = pathlib.Path(folder) / "result.json"
        status = run_limited(
            [sys.executable, __file__, "--part", name, "--result", str(result)] + ["--dry"] * dry, limit
        )
        found = json.loads(result.read_text()) if status is not None and result.exists() else {}
    if status is None:
        found["error"] = f"not finished within {limit:.0f} s"
    elif not found:
        found["error"] = f"ended with exit status {status} and no result"
    if has_failed(found) and log.exists():
        found["log"] = log.read_text()[-6000:]  # the end names the test that was running
    return found


def run_limited(command: list[str], limit: float) -> int | None:
    """The exit status of a command; None if it had to be killed after `limit` seconds, with what it started."""
    # Many hardware queues: ranks on streams that share one would wait for each other.
    variables = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"} | os.environ
    # A session of its own, so that all its processes can be killed together.
    process = subprocess.Popen(command, env=variables, start_new_session=True)
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run_here(name: str, dry: bool, result: pathlib.Path) -> None:
    """Runs a part in this process, and writes its result."""
    try:
        found = PARTS[name].run(gpu_check_parts.Context(dry, name))
    except Exception as error:  # the report shows it
        found = {"error": f"{type(error).__name__}: {error}"}
    result.write_text(json.dumps(found))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry", action="store_true", help="run without a GPU, on threads of the host")
    parser.add_argument("--out", type=pathlib.Path, help="the folder of the report")
    parser.add_argument("--seconds", type=float, default=0, help="begin no part after this time; the next run goes on")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)  # run in this process
    parser.add_argument("--result", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"one of {', '.join(PARTS)}; by default all that are missing"
    )
    arguments = parser.parse_args()
    if arguments.part:
        run_here(arguments.part, arguments.dry, arguments.result)
        return 0
    if arguments.out is None:
        parser.error("--out is missing")
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"unknown parts {sorted(unknown)}; choose from {list(PARTS)}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    file = arguments.out / "results.json"
    results = json.loads(file.read_text()) if file.exists() else {}
    begin = time.monotonic()
    names = arguments.parts or [name for name in PARTS if name not in results or has_failed(results[name])]
    for name in names:
        passed = time.monotonic() - begin
        limit = PARTS[name].limit * (4 if arguments.dry else 1)  # a dry run shares its cores with others
        if arguments.seconds:
            limit = min(limit, arguments.seconds - passed)
        if limit < 5:
            print(f"== {name}: not begun, because the {arguments.seconds:.0f} s are over; run the same command again")
            continue
        print(f"== {name} ({passed:.0f} s; at most {limit:.0f} s)", flush=True)
        results[name] = run_part(name, arguments.dry, limit)
        results[name]["seconds"] = round(time.monotonic() - begin - passed, 1)
        file.write_text(json.dumps(results, indent=1) + "\n")
        (arguments.out / "README.md").write_text(report(results, arguments.dry))
        if has_failed(results[name]):
            print(results[name].get("log", ""), explanation(name, results[name]), sep="\n", flush=True)
            if name == "machine":
                break  # nothing to check
    print(report(results, arguments.dry))
    return 1 if any(map(has_failed, results.values())) or set(names) - set(results) else 0


if __name__ == "__main__":
    sys.exit(main())
