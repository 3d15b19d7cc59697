"""Trains the GPT of train_gpt.py on 1, 2, 3, 4, 6 and 8 devices, in several processes, and on two hosts: the same bits.

    python examples/any_number_of_devices.py [--steps 100] [--dtype float32|bfloat16]

Each batch is cut into 24 shards, whatever the number of devices. A device differentiates its shards one at a time, and
all partial sums follow one fixed tree over the 24, so that no bit of the training depends on the layout. The example
prints a digest of the parameters and of the optimizer's state for each layout. Then it stops the training on eight
devices at half-time, goes on with three, and later with four. It fails if two digests differ.

A layout is written as processes x devices of each, and @ the number of hosts. Those are simulated: every host is this
one, but processes of different hosts exchange data as if it were not. To train on a single layout:

    python examples/any_number_of_devices.py --layout 1x3
"""

import argparse
import concurrent.futures
import functools
import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table
from train_gpt import TrainState, init_params, load_text, make_train_step

NUM_SHARDS = 24  # of a batch: a multiple of every number of devices
LAYOUTS = ("1x1", "1x2", "1x3", "1x4", "1x6", "1x8", "2x4", "4x2", "2x4@2")
# Prefix of the line with a stage's digest.
REPORT = "any_number_of_devices: "


class Layout(NamedTuple):
    """Where to train: processes, the devices of each, and hosts."""

    processes: int
    devices: int
    hosts: int

    @classmethod
    def parse(cls, text: str) -> "Layout":
        match = re.fullmatch(r"(\d+)x(\d+)(?:@(\d+))?", text)
        if not match:
            raise argparse.ArgumentTypeError(f"a layout is written like 2x4 or 2x4@2, got {text!r}")
        layout = cls(*(int(number or 1) for number in match.groups()))
        if min(layout) < 1 or NUM_SHARDS % (layout.processes * layout.devices) or layout.processes % layout.hosts:
            raise argparse.ArgumentTypeError(
                f"the devices of a layout must divide {NUM_SHARDS}, and its hosts the processes, got {text!r}"
            )
        return layout


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "both"], default="both")
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help="separated by commas (default: %(default)s)")
    parser.add_argument("--context", type=int, default=64, help="context length in bytes (default: 64)")
    parser.add_argument("--width", type=int, default=128, help="model width, a multiple of 4 (default: 128)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--jobs", type=int, default=1, help="layouts that train at the same time (default: 1)")
    one = parser.add_argument_group("to train on one layout")
    one.add_argument("--layout", type=Layout.parse)
    one.add_argument("--begin", type=int, default=0, metavar="STEP", help="begin with this step (default: 0)")
    one.add_argument("--until", type=int, metavar="STEP", help="stop before this step (default: the number of steps)")
    one.add_argument("--resume", metavar="DIRECTORY", help="go on with what another run saved, see --begin")
    one.add_argument("--save", metavar="DIRECTORY", help="save parameters and optimizer state at the end")
    return parser


def train(args: argparse.Namespace) -> None:
    """Trains on one layout, and prints the digest of the result."""
    if args.layout.processes > 1:
        process = int(os.environ["JAX_PROCESS_ID"])
        if args.layout.hosts > 1:
            os.environ["JAX_RING_HOST_ID"] = f"host {process * args.layout.hosts // args.layout.processes}"
        jax.distributed.initialize()
    mesh = jax.sharding.Mesh(jax.devices(), ("data",))
    replicated, split = jax.NamedSharding(mesh, P()), jax.NamedSharding(mesh, P("data"))

    def placed(array, sharding):
        array = np.asarray(array)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    optimizer = optax.adam(optax.warmup_cosine_decay_schedule(0, 3e-3, args.steps // 10, args.steps))

    def init():
        params = init_params(jax.random.key(0), args.width, args.layers, args.context)
        return TrainState(params=params, opt_state=optimizer.init(params))

    if args.resume:
        state = restore(args.resume, jax.eval_shape(init), replicated)
    else:
        state = jax.tree.map(functools.partial(placed, sharding=replicated), jax.jit(init)())
    train_step = make_train_step(mesh, optimizer, jnp.dtype(args.dtype), in_backward=False, num_shards=NUM_SHARDS)
    text, value = load_text(), None
    for step in range(args.begin, args.until or args.steps):
        # A batch depends only on its step.
        starts = np.random.default_rng(step).integers(0, len(text) - args.context - 1, NUM_SHARDS)
        tokens = text[starts[:, None] + np.arange(args.context + 1)].astype(np.int32)
        state, value = train_step(state, placed(tokens, split))
        jax.block_until_ready(value)
    if args.save:
        save(args.save, state)
    leaves = [np.asarray(leaf.addressable_shards[0].data) for leaf in jax.tree.leaves(state)]
    digest = hashlib.sha256(b"".join(leaf.tobytes() for leaf in leaves)).hexdigest()
    print(REPORT + json.dumps({"digest": digest[:16], "loss": float(value)}), flush=True)


def save(directory: str, state: TrainState) -> None:
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(pathlib.Path(directory).absolute(), dict(state))


def restore(directory: str, like: TrainState, sharding) -> TrainState:
    """The saved state on the devices of this layout, whatever it was saved on."""
    import orbax.checkpoint as ocp

    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), like)
    with ocp.StandardCheckpointer() as checkpointer:
        return TrainState(**checkpointer.restore(pathlib.Path(directory).absolute(), dict(shapes)))


def run_layout(args: argparse.Namespace, dtype: str, layout: str, *options: str) -> dict:
    """Trains on one layout in processes of its own. Returns its report."""
    processes, devices, _ = Layout.parse(layout)
    sizes = [f"--{name}={getattr(args, name)}" for name in ("steps", "context", "width", "layers")]
    command = [__file__, f"--layout={layout}", f"--dtype={dtype}", *sizes, *options]
    launcher = ["-P", "-m", "jax_ring.launch", "-n", str(processes), "--devices", str(devices)]
    program = [sys.executable, *(launcher if processes > 1 else []), *command]
    # One process too gets as many devices as the layout has: further devices must neither matter nor help.
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices), "JAX_PLATFORMS": "cpu"}
    result = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    # Not anchored at the start of a line, because Gloo writes partial lines.
    reports = [json.loads(report) for report in re.findall(rf"{REPORT}(\{{.*?\}})", result.stdout)]
    if result.returncode or len(reports) != processes:
        raise RuntimeError(f"training on {layout} failed:\n{result.stdout}{result.stderr}")
    digests = {report["digest"] for report in reports}
    return reports[0] | {"digest": " and ".join(sorted(digests))}


def run_interrupted(args: argparse.Namespace, dtype: str, directory: str) -> dict:
    """Trains on eight devices until half-time, then on three, then on four."""
    half, later = str(args.steps // 2), str(args.steps * 3 // 4)
    on_8, on_3 = f"{directory}/{dtype}/8", f"{directory}/{dtype}/3"
    run_layout(args, dtype, "1x8", "--until", half, "--save", on_8)
    run_layout(args, dtype, "1x3", "--resume", on_8, "--begin", half, "--until", later, "--save", on_3)
    return run_layout(args, dtype, "1x4", "--resume", on_3, "--begin", later)


def main() -> int:
    parser = make_parser()
    args = parser.parse_args()
    if args.width % 4 or args.steps < 4:
        parser.error(f"--width must be a multiple of 4, and --steps at least 4; got {args.width} and {args.steps}")
    if args.layout:
        train(args)
        return 0
    layouts = args.layouts.split(",")
    for layout in layouts:
        try:
            Layout.parse(layout)
        except argparse.ArgumentTypeError as error:
            parser.error(str(error))

    console, same = Console(), True
    for dtype in ["float32", "bfloat16"] if args.dtype == "both" else [args.dtype]:
        console.print(f"{args.steps} steps in {dtype} on {len(layouts)} layouts, and once with a change of devices.")
        table = Table("layout", "digest", "loss of the last step", title=f"{args.steps} steps in {dtype}")
        with tempfile.TemporaryDirectory() as directory, concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
            runs = {layout: pool.submit(run_layout, args, dtype, layout) for layout in layouts}
            interrupted = f"1x8, from step {args.steps // 2} 1x3, from step {args.steps * 3 // 4} 1x4"
            runs[interrupted] = pool.submit(run_interrupted, args, dtype, directory)
            for name, run in runs.items():
                console.print(f"  {name}: digest {run.result()['digest']}")
                table.add_row(name, run.result()["digest"], repr(run.result()["loss"]))
        digests = {run.result()["digest"] for run in runs.values()}
        same = same and len(digests) == 1
        console.print(table)
        verdict = "the same bits" if len(digests) == 1 else f"NOT the same bits: {len(digests)} digests"
        console.print(f"{dtype} on all layouts: {verdict}.")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
