"""The price of the same bits on any mesh: a training step of a GPT, against the same by jit and its partitioner.

    python benchmarks/any_mesh.py --json any_mesh.json

Meshes are data x tensor parallel. With tensor parallelism the peer divides heads, hidden units and vocabulary over the
axis "model" by NamedSharding, and computes them in whole matrix products; with blocks, a rank computes its B/tp blocks
one after the other. Where the second number is 1 the peer is FSDP: parameters are divided over the axis "data" and
gathered in each layer by sharding constraints, and ours are ZeRO stage 3, whole and layer by layer.

What is compared runs interleaved. A ratio is that of medians, with its 95 % interval by the bootstrap of pairs. Memory
is what XLA plans for one device besides the step's arguments. The time to compile is that of one compilation.
"""

import argparse
import functools
import itertools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from harness import intervals, options, report
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

HEADS, LAYERS, CONTEXT, VOCABULARY, ROWS = 8, 2, 64, 1024, 8
STEPS = 5  # in a run
OPTIMIZER = optax.adam(1e-3)


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


def embedded(tokens_of, tokens):
    return tokens_of[tokens[..., :-1]]


def whole_layer(block, x):
    """Whole products, which the partitioner divides by heads, hidden units and vocabulary."""
    heads = attended(*jnp.einsum("ntw,bcwh->cbnth", normalized(x), block["qkv"]))
    x = x + jnp.einsum("bnth,bhw->ntw", heads, block["out"])
    hidden = jax.nn.gelu(jnp.einsum("ntw,bwh->ntbh", normalized(x), block["up"]))
    return x + jnp.einsum("ntbh,bhw->ntw", hidden, block["down"])


def loss_of(vocabulary, given):
    x, tokens = given
    logits = jnp.einsum("ntw,bwv->ntbv", normalized(x), vocabulary)
    return next_tokens(logits.reshape(*x.shape[:2], VOCABULARY), tokens[:, 1:])


def of_layers(blocks):
    return {name: jnp.moveaxis(x, 1, 0) for name, x in blocks.items() if name != "vocabulary"}


def loss_by_jit(params, tokens, gathered=lambda tree: tree, remat=False):
    def layer(x, block):
        return whole_layer(gathered(block), x), None

    x = embedded(gathered(params["tokens"]), tokens)
    x, _ = lax.scan(jax.checkpoint(layer) if remat else layer, x, of_layers(params["blocks"]))
    return loss_of(gathered(params["blocks"]["vocabulary"]), (x, tokens))


def loss_in_blocks(params, tokens, remat):
    from jax_ring import block_index, block_max, block_sum

    def total(f):
        return block_sum(f, "model", HEADS, remat=remat)

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

    x, _ = lax.scan(layer, x, of_layers(params["blocks"]))
    x, vocabulary = normalized(x), params["blocks"]["vocabulary"]
    largest = block_max(lambda block, x: (x @ block).max(-1), "model")(vocabulary, x)
    denominator, of_next = total(likelihoods)(vocabulary, (x, largest, tokens[:, 1:]))
    return (jnp.log(denominator) + largest - of_next).mean()


def tensor_parallel(mesh, params) -> dict:
    """By name, a step from (params, state, tokens) to (params, state), and its params and state."""
    from jax_ring import value_and_grad

    specs = {"tokens": P(), "blocks": P("model")}
    params = {name: jax.device_put(tree, NamedSharding(mesh, specs[name])) for name, tree in params.items()}

    def of_mean(remat):
        loss = functools.partial(loss_in_blocks, remat=remat)
        of_shard = value_and_grad(loss, "data", num_shards=mesh.shape["data"])
        return jax.shard_map(of_shard, mesh=mesh, in_specs=(specs, P("data")), out_specs=(P(), specs))

    def step_of(value_and_gradients):
        def step(params, state, tokens):
            updates, state = OPTIMIZER.update(value_and_gradients(params, tokens)[1], state, params)
            return optax.apply_updates(params, updates), state

        return step, params, OPTIMIZER.init(params)

    return {
        "jit": step_of(jax.value_and_grad(loss_by_jit)),
        "blocks, recomputed": step_of(of_mean(True)),
        "blocks, products kept": step_of(of_mean(False)),
    }


def divided_parameters(mesh, params) -> dict:
    """By name, such a step, its params and state: of parameters that are divided over the axis "data"."""
    from jax_ring import value_and_grad, zero

    num_shards = mesh.shape["data"]
    over_data, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    divided = jax.device_put(params, over_data)
    state = jax.tree.map(lambda x: jax.device_put(x, over_data if x.ndim else whole), OPTIMIZER.init(params))

    def by_jit(remat):
        gathered = functools.partial(lax.with_sharding_constraint, shardings=whole)
        loss = functools.partial(loss_by_jit, gathered=gathered, remat=remat)

        def step(params, state, tokens):
            gradients = lax.with_sharding_constraint(jax.grad(loss)(params, tokens), over_data)
            updates, state = OPTIMIZER.update(gradients, state, params)
            return optax.apply_updates(params, updates), state

        return step, divided, state

    optimizer = zero.sharded_optimizer(OPTIMIZER, "data", stage=3, order="tree", num_shards=num_shards)
    layer = functools.partial(zero.sharded_layer, axis_name="data", num_shards=num_shards)

    def in_the_step(shards, tokens):
        """Gathers all at once, and keeps what the backward pass needs."""
        of_mean = value_and_grad(loss_by_jit, "data", num_shards=num_shards, reduce_gradients=False)
        return of_mean(optimizer.gather(shards), tokens)[1]

    def layer_by_layer(shards, tokens):
        """Gathers layers one after the other, in both passes, and recomputes them."""

        def loss(shards):
            x = layer(embedded)(shards["tokens"], tokens[None])
            x = layer(whole_layer)(shards["layers"], x)
            return layer(loss_of)(shards["vocabulary"], (x, tokens[None])).sum() / num_shards

        return jax.grad(loss)(shards)

    def sharded_by_layer(params):
        shards = {"tokens": optimizer.shard(params["tokens"]), "layers": params["blocks"]}
        shards["layers"] = jax.vmap(optimizer.shard)(of_layers(params["blocks"]))
        return shards | {"vocabulary": optimizer.shard(params["blocks"]["vocabulary"])}

    def by_zero(shard, specs, gradients_of):
        mapped = functools.partial(jax.shard_map, mesh=mesh)

        def step(shards, state, tokens):
            updates, state = optimizer.update(gradients_of(shards, tokens), state, shards)
            return optax.apply_updates(shards, updates), state

        shards = jax.jit(mapped(shard, in_specs=P(), out_specs=specs))(params)
        of_state = optimizer.specs(shards)
        state = jax.jit(mapped(optimizer.init, in_specs=(specs,), out_specs=of_state))(shards)
        return mapped(step, in_specs=(specs, of_state, P("data")), out_specs=(specs, of_state)), shards, state

    by_layer = {"tokens": P("data"), "layers": P(None, "data"), "vocabulary": P("data")}
    return {
        "jit": by_jit(False),
        "jit, recomputed": by_jit(True),
        "stage 3": by_zero(optimizer.shard, P("data"), in_the_step),
        "layer by layer": by_zero(sharded_by_layer, by_layer, layer_by_layer),
    }


def variants(dp: int, tp: int, width: int) -> tuple[dict[str, Callable[[], float]], dict[str, dict]]:
    """Runs that return the seconds of a step; and of each the seconds to compile and the bytes that a device needs."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[: dp * tp]).reshape(dp, tp), ("data", "model"))
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (ROWS * dp, CONTEXT + 1)).astype(np.int32)
    tokens = jax.device_put(tokens, NamedSharding(mesh, P("data")))
    runs, compiled = {}, {}
    for name, (step, *both) in (divided_parameters if tp == 1 else tensor_parallel)(mesh, init_params(width)).items():
        begin = time.perf_counter()
        program = jax.jit(step).lower(*both, tokens).compile()
        seconds = time.perf_counter() - begin
        compiled[name] = {"compile_seconds": seconds, "bytes": program.memory_analysis().temp_size_in_bytes}
        carry = [both]

        def run(program=program, carry=carry) -> float:
            begin = time.perf_counter()
            for _ in range(STEPS):
                carry[0] = jax.block_until_ready(program(*carry[0], tokens))
            return (time.perf_counter() - begin) / STEPS

        runs[name] = run
    return runs, compiled


def measured(runs: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """The seconds of each run in some rounds, interleaved, each time another one first; after one that is not timed."""
    names, seconds = list(runs), {name: [] for name in runs}
    for i in range(1 + rounds):
        shift = i % len(names)
        for name in names[shift:] + names[:shift]:
            duration = runs[name]()
            if i:
                seconds[name].append(duration)
    return seconds


def mesh(text: str) -> tuple[int, int]:
    if text.count("x") != 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not like 2x1")
    dp, tp = map(options.count, text.split("x"))
    return dp, tp


def main() -> None:
    from harness.machine import describe, heading

    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--meshes", type=options.several(mesh), default="1x2,2x2,1x4,2x1,4x1", help="dp x tp (%(default)s)"
    )
    parser.add_argument("--widths", type=options.several(options.count), default="256,512", help="(%(default)s)")
    parser.add_argument("--rounds", type=options.count, default=9, help="timed runs of each variant (default: 9)")
    parser.add_argument("--json", type=options.file, metavar="FILE")
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", max(dp * tp for dp, tp in arguments.meshes))
    jax.config.update("jax_platforms", "cpu")
    machine = describe()
    print(heading(machine))
    print(f"# {'mesh':>5} {'width':>5} {'variant':>21} {'ms':>8} {'/ jit':>18} {'MB':>7} {'compiling':>10}")
    with report.written_to(arguments.json, machine) as rows:
        for (dp, tp), width in itertools.product(arguments.meshes, arguments.widths):
            runs, compiled = variants(dp, tp, width)
            seconds = measured(runs, arguments.rounds)
            for name, own in seconds.items():
                row = {"mesh": f"{dp}x{tp}", "width": width, "variant": name, "seconds": own} | compiled[name]
                rows.append(row)
                print(
                    f"  {row['mesh']:>5} {width:>5} {name:>21} {np.median(own) * 1e3:>8.1f} "
                    f"{intervals.ratio(own, seconds['jit']).bounds():>18} {row['bytes'] / 1e6:>7.1f} "
                    f"{row['compile_seconds']:>8.1f} s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
