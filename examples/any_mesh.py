"""Trains a small GPT on meshes of several shapes, data x tensor parallel: the same bits on all of them.

    python examples/any_mesh.py [--steps 10] [--dtype float32|bfloat16] [--stage-3] [--layouts "dp=1,tp=1 dp=2,tp=3"]

The batch is cut into 24 shards, and each layer into 24 blocks: heads of attention, slices of the hidden units, parts of
the vocabulary. A device computes its blocks of its shards one at a time, and all partial sums follow one fixed tree, so
that no bit depends on the shape of the mesh. The example prints a digest of parameters and optimizer state for each
mesh, as one process or several, and fails if two differ. With --stage-3 parameters and optimizer state are divided over
the data-parallel devices as well.
"""

import argparse
import functools
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P
from rich.console import Console
from train_gpt import VOCABULARY, load_text, normalized

from jax_ring import ShardSums, block_index, block_max, block_sum, each_block, value_and_grad, zero

NUM_SHARDS = 24  # of a batch: a multiple of every number of ranks on "data"
NUM_BLOCKS = 24  # of a layer: a multiple of every number of ranks on "model"
PART = -(-VOCABULARY // NUM_BLOCKS)  # of the vocabulary, in a block
LAYOUTS = (
    "dp=1,tp=1 dp=1,tp=3 dp=2,tp=2 dp=2,tp=3 dp=4,tp=2 dp=3,tp=1 dp=8,tp=1 dp=1,tp=8 dp=4,tp=2,processes=2 "
    "dp=2,tp=2,processes=4"
)
REPORT = "any_mesh: "
tensor_parallel = functools.partial(block_sum, axis_name="model", num_blocks=NUM_BLOCKS)


class Layout(NamedTuple):
    """The sizes of the axes "data" and "model", and the number of processes."""

    dp: int
    tp: int
    processes: int = 1

    @classmethod
    def parse(cls, text: str) -> "Layout":
        match = re.fullmatch(r"dp=(\d+),tp=(\d+)(?:,processes=(\d+))?", text)
        if not match:
            raise argparse.ArgumentTypeError(
                f"a layout is written like dp=4,tp=2 or dp=4,tp=2,processes=2, got {text!r}"
            )
        layout = cls(*(int(number or 1) for number in match.groups()))
        if (
            min(layout) < 1
            or NUM_SHARDS % layout.dp
            or NUM_BLOCKS % layout.tp
            or layout.dp * layout.tp % layout.processes
        ):
            raise argparse.ArgumentTypeError(
                f"dp must divide {NUM_SHARDS}, tp {NUM_BLOCKS}, processes dp * tp; got {text!r}"
            )
        return layout


def init_params(width: int, head: int, hidden: int, layers: int, context: int) -> dict:
    """Those that all ranks have, and those in blocks, by the first dimension."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return (rng.standard_normal(shape) / np.sqrt(shape[-2])).astype(np.float32)

    return {
        "replicated": {
            "tokens": normal(VOCABULARY, width),
            "positions": normal(context, width),
            "norms": np.ones((layers, 2, width), np.float32),
            "norm": np.ones(width, np.float32),
        },
        "blocks": {
            "qkv": normal(NUM_BLOCKS, layers, 3, width, head),
            "out": normal(NUM_BLOCKS, layers, head, width) / NUM_BLOCKS**0.5,
            "up": normal(NUM_BLOCKS, layers, width, hidden),
            "down": normal(NUM_BLOCKS, layers, hidden, width) / NUM_BLOCKS**0.5,
            "vocabulary": normal(NUM_BLOCKS, width, PART),
        },
    }


def attention(block, x):
    """A head."""
    q, k, v = jnp.einsum("...tw,cwh->c...th", x, block["qkv"].astype(x.dtype))
    scores = (q @ k.mT).astype(jnp.float32) / np.sqrt(q.shape[-1])
    causal = jnp.tri(x.shape[-2], dtype=bool)
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e9)).astype(x.dtype)
    return weights @ v @ block["out"].astype(x.dtype)


def feed_forward(block, x):
    """A slice of the hidden units."""
    return jax.nn.gelu(x @ block["up"].astype(x.dtype)) @ block["down"].astype(x.dtype)


def logits(block, x):
    """Those of a part of the vocabulary. The last part has some numbers that are no byte."""
    numbers = block_index() * PART + jnp.arange(PART)
    return jnp.where(numbers < VOCABULARY, (x @ block.astype(x.dtype)).astype(jnp.float32), -1e9), numbers


def likelihoods(block, inputs):
    """What a part of the vocabulary adds to the denominator, and to the logit of the next byte."""
    x, largest, following = inputs
    scores, numbers = logits(block, x)
    return jnp.exp(scores - largest[..., None]).sum(-1), jnp.where(numbers == following[..., None], scores, 0).sum(-1)


def loss(params, tokens, dtype):
    """The mean loss in nats over all bytes of a shard but the first of each row."""
    replicated, blocks = params["replicated"], params["blocks"]
    x = (replicated["tokens"][tokens[:, :-1]] + replicated["positions"]).astype(dtype)

    def layer(x, parameters):
        norms, block = parameters
        x = x + tensor_parallel(attention)(
            {name: block[name] for name in ("qkv", "out")}, normalized(x, norms[0].astype(dtype))
        )
        x = x + tensor_parallel(feed_forward)(
            {name: block[name] for name in ("up", "down")}, normalized(x, norms[1].astype(dtype))
        )
        return x, None

    of_layers = {name: jnp.moveaxis(x, 1, 0) for name, x in blocks.items() if name != "vocabulary"}
    x, _ = lax.scan(layer, x, (replicated["norms"], of_layers))
    x = normalized(x, replicated["norm"].astype(dtype))
    largest = block_max(lambda block, x: logits(block, x)[0].max(-1), "model")(blocks["vocabulary"], x)
    total, of_next = tensor_parallel(likelihoods)(blocks["vocabulary"], (x, largest, tokens[:, 1:]))
    return (jnp.log(total) + largest - of_next).mean()


def place(tree, mesh, spec):
    """Arrays that every process has, as arrays of the mesh."""
    sharding = jax.NamedSharding(mesh, spec)
    return jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, sharding, lambda i: np.asarray(x)[i]), tree)


def gradients_of(dtype, **options):
    return value_and_grad(functools.partial(loss, dtype=dtype), "data", num_shards=NUM_SHARDS, **options)


def replicated_training(mesh, optimizer, dtype, params):
    """Parameters and state, a step from (both, tokens) to (both, loss), and what to compare of them."""
    state = {"replicated": optimizer.init(params["replicated"]), "blocks": jax.vmap(optimizer.init)(params["blocks"])}
    specs = {"replicated": P(), "blocks": P("model")}

    @functools.partial(jax.jit, donate_argnums=0)
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=((specs, specs), P("data")), out_specs=((specs, specs), P()))
    def train_step(both, tokens):
        params, state = both
        value, grads = gradients_of(dtype)(params, tokens)

        def updated(params, state, grads):
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        # Treat values that all ranks have as one block.
        as_one = jax.tree.map(lambda x: x[None], [tree["replicated"] for tree in (params, state, grads)])
        replicated = jax.tree.map(lambda x: x[0], each_block(updated, *as_one))
        blocks = each_block(updated, *[tree["blocks"] for tree in (params, state, grads)])
        return tuple({"replicated": a, "blocks": b} for a, b in zip(replicated, blocks, strict=True)), value

    both = tuple({name: place(tree[name], mesh, spec) for name, spec in specs.items()} for tree in (params, state))
    return both, train_step, lambda both: both


def divided_training(mesh, optimizer, dtype, params):
    """The same with ZeRO stage 3: parameters and state are divided over "data", too. Parameters are compared."""
    divided = zero.sharded_optimizer(optimizer, "data", stage=3, order="tree", num_shards=NUM_SHARDS)
    tp = mesh.shape["model"]
    whole = {"replicated": P(), "blocks": P("model")}

    def specs_of(specs):
        """Those of the shards, and of the state: a rank's blocks are divided over "data"."""
        own = jax.tree.map(lambda x: jax.ShapeDtypeStruct((len(x) // tp, *x.shape[1:]), x.dtype), params["blocks"])
        of_blocks = jax.tree.map(lambda spec: P(("model", *spec)) if spec else spec, specs(own))
        return {"replicated": specs(params["replicated"]), "blocks": of_blocks}

    def each(function, *trees):
        return {name: function(*(tree[name] for tree in trees)) for name in whole}

    shard_specs, state_specs = specs_of(divided.param_specs), specs_of(divided.specs)
    specs = (shard_specs, state_specs)

    def mapped(function, in_specs, out_specs, **options):
        return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs), **options)

    def train_step(both, tokens):
        shards, state = both
        value, sums = gradients_of(dtype, reduce_gradients=False)(each(divided.gather, shards), tokens)

        def updated(terms, state, shards):
            kinds = (np.dtype(np.float32),) * len(jax.tree.leaves(terms))
            updates, state = divided.update(ShardSums(terms, NUM_SHARDS, kinds), state, shards)
            return optax.apply_updates(shards, updates), state

        both = each(updated, sums.terms, state, shards)
        return tuple({name: pair[i] for name, pair in both.items()} for i in (0, 1)), value

    shards = mapped(functools.partial(each, divided.shard), (whole,), shard_specs)(
        each(lambda tree, spec: place(tree, mesh, spec), params, whole)
    )
    state = mapped(functools.partial(each, divided.init), (shard_specs,), state_specs)(shards)
    step = mapped(train_step, (specs, P("data")), (specs, P()), donate_argnums=0)
    gather = jax.jit(
        jax.shard_map(
            functools.partial(each, divided.gather),
            mesh=mesh,
            in_specs=(shard_specs,),
            out_specs=whole,
            check_vma=False,
        )
    )
    return (shards, state), step, lambda both: gather(both[0])


def train(args: argparse.Namespace) -> None:
    """Trains on one layout, and prints the digest of the result."""
    layout = args.layout
    if layout.processes > 1:
        jax.distributed.initialize()
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(layout.dp, layout.tp), ("data", "model"))
    training = divided_training if args.stage_3 else replicated_training
    params = init_params(args.width, args.head, args.hidden, args.layers, args.context)
    both, train_step, compared = training(mesh, optax.adam(3e-3), jnp.dtype(args.dtype), params)
    text, value = load_text(), None
    for step in range(args.steps):
        # A batch depends only on its step.
        starts = np.random.default_rng(step).integers(0, len(text) - args.context - 1, NUM_SHARDS)
        tokens = text[starts[:, None] + np.arange(args.context + 1)].astype(np.int32)
        both, value = train_step(both, place(tokens, mesh, P("data")))
    gather = jax.jit(lambda tree: tree, out_shardings=jax.NamedSharding(mesh, P()))
    leaves = [np.asarray(leaf.addressable_shards[0].data) for leaf in jax.tree.leaves(gather(compared(both)))]
    digest = hashlib.sha256(b"".join(leaf.tobytes() for leaf in leaves)).hexdigest()
    print(REPORT + json.dumps({"digest": digest[:16], "loss": float(value)}), flush=True)


def run_layout(args: argparse.Namespace, dtype: str, layout: str) -> dict:
    """Trains on one layout in processes of its own. Returns its report."""
    dp, tp, processes = Layout.parse(layout)
    devices = dp * tp // processes
    sizes = [f"--{name}={getattr(args, name)}" for name in ("steps", "context", "width", "head", "hidden", "layers")]
    launcher = ["-P", "-m", "jax_ring.launch", "-n", str(processes), "--devices", str(devices)]
    command = [sys.executable, *(launcher if processes > 1 else []), __file__, f"--layout={layout}", f"--dtype={dtype}"]
    command += ["--stage-3"] if args.stage_3 else []
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices), "JAX_PLATFORMS": "cpu"}
    result = subprocess.run([*command, *sizes], env=environment, capture_output=True, text=True, check=False)
    reports = [json.loads(report) for report in re.findall(rf"{REPORT}(\{{.*?\}})", result.stdout)]
    if result.returncode or len(reports) != processes:
        raise RuntimeError(f"training on {layout} failed:\n{result.stdout}{result.stderr}")
    return reports[0] | {"digest": " and ".join(sorted({report["digest"] for report in reports}))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "both"], default="both")
    parser.add_argument("--layouts", default=LAYOUTS, help="separated by spaces (default: %(default)s)")
    parser.add_argument("--context", type=int, default=32, help="context length in bytes (default: 32)")
    parser.add_argument("--width", type=int, default=36, help="model width (default: 36)")
    parser.add_argument("--head", type=int, default=5, help="size of each of the 24 heads (default: 5)")
    parser.add_argument("--hidden", type=int, default=7, help="hidden units of each of the 24 blocks (default: 7)")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--stage-3", action="store_true", help='divide parameters and state over "data", too, by ZeRO')
    parser.add_argument("--layout", type=Layout.parse, help="train on this layout alone, in this process")
    args = parser.parse_args()
    if args.layout:
        train(args)
        return 0
    layouts = args.layouts.split()
    for layout in layouts:
        try:
            Layout.parse(layout)
        except argparse.ArgumentTypeError as error:
            parser.error(str(error))

    console, same = Console(), True
    for dtype in ["float32", "bfloat16"] if args.dtype == "both" else [args.dtype]:
        console.print(f"{args.steps} steps in {dtype}")
        digests = set()
        for layout in layouts:
            start = time.perf_counter()
            report = run_layout(args, dtype, layout)
            digests.add(report["digest"])
            seconds = time.perf_counter() - start
            console.print(f"  {layout:24} digest {report['digest']}  loss {report['loss']:.6f}  {seconds:4.0f} s")
        same = same and len(digests) == 1
        verdict = "the same bits on all of them" if len(digests) == 1 else f"NOT the same bits: {len(digests)} digests"
        console.print(f"{len(layouts)} meshes, {verdict}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
