"""The price of tensor parallelism in blocks: a training step of a GPT, against the same by jit and its partitioner.

    python benchmarks/any_mesh.py --json any_mesh.json

The peer divides heads, hidden units and vocabulary over the axis "model" by NamedSharding, and computes them in whole
matrix products. With blocks, a rank computes its B/tp blocks one after the other, with recomputation in the backward
pass or without. What is compared runs interleaved. A ratio is the median of the ratios of neighbouring runs, with the
10th and the 90th percentile. The time to compile is that of one compilation.
"""

import argparse
import functools
import json
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tree_order import compared

HEADS, LAYERS, CONTEXT, VOCABULARY, ROWS = 8, 2, 64, 1024, 8
STEPS = 5  # in a run


def normalized(x):
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def init_params(width: int) -> dict:
    rng = np.random.default_rng(0)

    def normal(*shape):
        return (rng.standard_normal(shape) / np.sqrt(shape[-2])).astype(np.float32)

    blocks = {
        "qkv": normal(HEADS, LAYERS, 3, width, width // HEADS),
        "out": normal(HEADS, LAYERS, width // HEADS, width),
        "up": normal(HEADS, LAYERS, width, 4 * width // HEADS),
        "down": normal(HEADS, LAYERS, 4 * width // HEADS, width),
        "vocabulary": normal(HEADS, width, VOCABULARY // HEADS),
    }
    return {"tokens": normal(VOCABULARY, width), "blocks": blocks}


def attended(q, k, v):
    scores = jnp.where(jnp.tri(CONTEXT, dtype=bool), (q @ k.mT) / np.sqrt(q.shape[-1]), -1e9)
    return jax.nn.softmax(scores) @ v


def next_tokens(logits, following):
    return optax.softmax_cross_entropy_with_integer_labels(logits, following).mean()


def loss_by_jit(params, tokens):
    """Whole products, which the partitioner divides by heads, hidden units and vocabulary."""
    x = params["tokens"][tokens[:, :-1]]

    def layer(x, block):
        heads = attended(*jnp.einsum("ntw,bcwh->cbnth", normalized(x), block["qkv"]))
        x = x + jnp.einsum("bnth,bhw->ntw", heads, block["out"])
        hidden = jax.nn.gelu(jnp.einsum("ntw,bwh->ntbh", normalized(x), block["up"]))
        return x + jnp.einsum("ntbh,bhw->ntw", hidden, block["down"]), None

    of_layers = {name: jnp.moveaxis(x, 1, 0) for name, x in params["blocks"].items() if name != "vocabulary"}
    x, _ = lax.scan(layer, x, of_layers)
    logits = jnp.einsum("ntw,bwv->ntbv", normalized(x), params["blocks"]["vocabulary"])
    return next_tokens(logits.reshape(*x.shape[:2], VOCABULARY), tokens[:, 1:])


def loss_in_blocks(params, tokens, remat):
    from jax_ring import block_index, block_max, block_sum

    total = functools.partial(block_sum, axis_name="model", num_blocks=HEADS, remat=remat)
    x = params["tokens"][tokens[:, :-1]]

    def attention(block, x):
        return attended(*jnp.einsum("ntw,cwh->cnth", x, block["qkv"])) @ block["out"]

    def feed_forward(block, x):
        return jax.nn.gelu(x @ block["up"]) @ block["down"]

    def likelihoods(block, inputs):
        x, largest, following = inputs
        logits = x @ block
        numbers = block_index() * logits.shape[-1] + jnp.arange(logits.shape[-1])
        own = jnp.where(numbers == following[..., None], logits, 0).sum(-1)
        return jnp.exp(logits - largest[..., None]).sum(-1), own

    def layer(x, block):
        x = x + total(attention)({name: block[name] for name in ("qkv", "out")}, normalized(x))
        return x + total(feed_forward)({name: block[name] for name in ("up", "down")}, normalized(x)), None

    of_layers = {name: jnp.moveaxis(x, 1, 0) for name, x in params["blocks"].items() if name != "vocabulary"}
    x, _ = lax.scan(layer, x, of_layers)
    x, vocabulary = normalized(x), params["blocks"]["vocabulary"]
    largest = block_max(lambda block, x: (x @ block).max(-1), "model")(vocabulary, x)
    denominator, of_next = total(likelihoods)(vocabulary, (x, largest, tokens[:, 1:]))
    return (jnp.log(denominator) + largest - of_next).mean()


def variants(dp: int, tp: int, width: int) -> tuple[dict[str, Callable[[], float]], dict[str, float]]:
    """Runs that return the seconds of a step, and the seconds that each took to compile."""
    from jax_ring import value_and_grad

    mesh = jax.sharding.Mesh(np.array(jax.devices()[: dp * tp]).reshape(dp, tp), ("data", "model"))
    optimizer = optax.adam(1e-3)
    specs = {"tokens": P(), "blocks": P("model")}
    params = {name: jax.device_put(tree, NamedSharding(mesh, specs[name])) for name, tree in init_params(width).items()}
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (ROWS * dp, CONTEXT + 1)).astype(np.int32)
    tokens = jax.device_put(tokens, NamedSharding(mesh, P("data")))

    def of_mean(remat):
        loss = functools.partial(loss_in_blocks, remat=remat)
        return jax.shard_map(
            value_and_grad(loss, "data", num_shards=dp), mesh=mesh, in_specs=(specs, P("data")), out_specs=(P(), specs)
        )

    runs, compile_seconds = {}, {}

    def variant(name, value_and_gradients):
        def step(params, state, tokens):
            _, grads = value_and_gradients(params, tokens)
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        begin = time.perf_counter()
        compiled = jax.jit(step).lower(params, optimizer.init(params), tokens).compile()
        compile_seconds[name] = time.perf_counter() - begin
        state = [(params, optimizer.init(params))]

        def run() -> float:
            begin = time.perf_counter()
            for _ in range(STEPS):
                state[0] = jax.block_until_ready(compiled(*state[0], tokens))
            return (time.perf_counter() - begin) / STEPS

        runs[name] = run

    variant("jit", jax.value_and_grad(loss_by_jit))
    variant("blocks, recomputed", of_mean(True))
    variant("blocks, remat=False", of_mean(False))
    return runs, compile_seconds


def main() -> None:
    from harness.machine import describe, heading

    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--meshes", default="1x2,2x2,1x4,2x4", help="dp x tp (default: 1x2,2x2,1x4,2x4)")
    parser.add_argument("--widths", default="256,512", help="(default: 256,512)")
    parser.add_argument("--rounds", type=int, default=9, help="timed runs of each variant (default: 9)")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    meshes = [tuple(map(int, text.split("x"))) for text in arguments.meshes.split(",")]
    jax.config.update("jax_num_cpu_devices", max(dp * tp for dp, tp in meshes))
    jax.config.update("jax_platforms", "cpu")
    machine = describe()
    print(heading(machine))
    print(f"# {'mesh':>5} {'width':>5} {'variant':>20} {'ms':>8} {'/ jit':>6} (p10-p90)  {'compiling':>9}")
    rows = []
    for dp, tp in meshes:
        for width in map(int, arguments.widths.split(",")):
            runs, seconds = variants(dp, tp, width)
            for row in compared(runs, arguments.rounds):
                row |= {"mesh": f"{dp}x{tp}", "width": width, "compile_seconds": seconds[row["variant"]]}
                rows.append(row)
                print(
                    f"  {row['mesh']:>5} {width:>5} {row['variant']:>20} {row['us'] / 1e3:>8.1f} {row['ratio']:>6.2f} "
                    f"({row['p10']:.2f}-{row['p90']:.2f})  {row['compile_seconds']:>7.1f} s",
                    flush=True,
                )
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"machine": machine, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
