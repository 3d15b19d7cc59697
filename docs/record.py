"""Records what the examples print, for their pages: docs/record.py [NAME ...], from the repository's root."""

import argparse
import os
import pathlib
import re
import subprocess
import sys

OUTPUTS = pathlib.Path(__file__).parent / "outputs"
LAUNCH = "-m jax_ring.launch"
# Progress, and what varies from run to run.
PASSING = re.compile(r"━ +100%|━ \d+/\d+ |\[Gloo\]|jax_ring\.launch: rank \d .* has left")
# By example: the arguments of Python.
COMMANDS = {
    "train_digits": "examples/train_digits.py",
    "train_gpt": "examples/train_gpt.py --steps 100",
    "multi_process": f"{LAUNCH} -n 4 examples/multi_process.py",
    "elastic": f"{LAUNCH} -n 4 --devices 2 --max-restarts 1 examples/elastic.py --kill 0:3",
    "any_number_of_devices": "examples/any_number_of_devices.py --steps 10 --dtype float32",
    "any_mesh": "examples/any_mesh.py --dtype float32",
    "zero": "examples/zero.py",
    "accumulation_and_clipping": "examples/accumulation_and_clipping.py",
    "ring_attention": "examples/ring_attention.py",
    "mixture_of_experts": "examples/mixture_of_experts.py",
    "data_and_tensor_parallel": "examples/data_and_tensor_parallel.py",
    "replace_psum": "examples/replace_psum.py",
    "test_processes": "-m pytest -q -n 0 examples/test_processes.py",
    "ten_steps": "examples/ten_steps.py",
    "parameter_server": "examples/parameter_server.py",
}


def file_of(name: str) -> pathlib.Path:
    return OUTPUTS / f"{name}.txt"


def record(name: str) -> None:
    print(f"{name}: python {COMMANDS[name]}", flush=True)
    done = subprocess.run(
        [sys.executable, *COMMANDS[name].split()],
        env={**os.environ, "COLUMNS": "80", "NO_COLOR": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True,
    )  # fmt: skip
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|(?<=passed) in [\d.]+s.*", "", done.stdout)
    lines = [line.rstrip() for line in text.splitlines() if not PASSING.search(line)]
    OUTPUTS.mkdir(exist_ok=True)
    file_of(name).write_text("\n".join(lines).strip("\n") + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(COMMANDS)}; without one all")
    names = parser.parse_args().names or [*COMMANDS]
    if unknown := [name for name in names if name not in COMMANDS]:
        parser.error(f"no example {', '.join(unknown)}")
    for each in names:
        record(each)
