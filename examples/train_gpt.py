"""Trains a small byte-level GPT on the source code of Python's standard library, and prints a sample.

    python examples/train_gpt.py [--devices 8] [--steps 300] [--dtype float32|bfloat16] [--wire int8]

Each device has a copy of the parameters and a part of each batch. The parameters of a layer pass through
`reduce_in_backward` where they are used, so that their gradients are reduced while earlier layers are still in the
backward pass. With bfloat16, matrix products and gradients on the wire have 16 bits, parameters 32. With --wire the
gradients are reduced after the backward pass, rounded to that type, and each step sends what rounding removed before.
"""

import argparse
import functools
import pathlib
import sys
import sysconfig

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from jax_ring import (
    allreduce_gradients,
    assert_replicated,
    feedback_specs,
    reduce_in_backward,
    ring_pmean,
    value_and_grad,
)

VOCABULARY = 256  # bytes
HEADS = 4


@chex.dataclass(frozen=True)
class TrainState:
    """What a step updates: a pytree, which jit donates and shard_map replicates as a whole."""

    params: chex.ArrayTree
    opt_state: optax.OptState


def load_text() -> np.ndarray:
    files = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)


def init_params(key: chex.PRNGKey, width: int, layers: int, context: int) -> chex.ArrayTree:
    def normal(*shape, scale=0.02):
        nonlocal key
        key, now = jax.random.split(key)
        return scale * jax.random.normal(now, shape)

    return {
        "tokens": normal(VOCABULARY, width),
        "positions": normal(context, width),
        "layers": {  # stacked along the first dimension
            "norm1": jnp.ones((layers, width)),
            "qkv": normal(layers, width, 3 * width),
            "merge_heads": normal(layers, width, width, scale=0.02 / np.sqrt(2 * layers)),
            "norm2": jnp.ones((layers, width)),
            "up": normal(layers, width, 4 * width),
            "down": normal(layers, 4 * width, width, scale=0.02 / np.sqrt(2 * layers)),
        },
        "norm": jnp.ones(width),
    }


def normalized(x: chex.Array, scale: chex.Array) -> chex.Array:
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def block(x: chex.Array, layer: chex.ArrayTree) -> chex.Array:
    *batch, length, width = x.shape
    qkv = normalized(x, layer["norm1"]) @ layer["qkv"]
    q, k, v = jnp.moveaxis(qkv.reshape(*batch, length, 3, HEADS, width // HEADS), -3, 0)
    attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + attended.reshape(x.shape) @ layer["merge_heads"]
    return x + jax.nn.gelu(normalized(x, layer["norm2"]) @ layer["up"]) @ layer["down"]


def logits(
    params: chex.ArrayTree, tokens: chex.Array, dtype=jnp.float32, hook=lambda params: params, unroll: int = 1
) -> chex.Array:
    """Logits of the next byte at each position.

    `hook` is applied to parameters where they are used. So many layers as `unroll` says are compiled one after the
    other: on GPUs, the gradients of one can then be reduced beside the backward pass of the next.
    """

    def cast(params):
        return jax.tree.map(lambda p: p.astype(dtype), hook(params))

    outer = cast({name: params[name] for name in ("tokens", "positions", "norm")})
    x = outer["tokens"][tokens] + outer["positions"][: tokens.shape[-1]]
    x, _ = lax.scan(lambda x, layer: (block(x, cast(layer)), None), x, params["layers"], unroll=unroll)
    return (normalized(x, outer["norm"]) @ outer["tokens"].T).astype(jnp.float32)


def loss(params: chex.ArrayTree, tokens: chex.Array, **options) -> chex.Scalar:
    """The mean loss in nats over all bytes but the first of each row."""
    scores = logits(params, tokens[:, :-1], **options)
    return optax.softmax_cross_entropy_with_integer_labels(scores, tokens[:, 1:]).mean()


def make_train_step(mesh, optimizer, dtype=jnp.float32, in_backward=True, unroll=1, **reduction):
    """A step from (state, tokens) to (state, loss). The tokens are split over "data"."""

    def hook(params):
        return reduce_in_backward(params, "data", **reduction) if in_backward else params

    local_loss = functools.partial(loss, dtype=dtype, hook=hook, unroll=unroll)
    value_and_mean_grad = value_and_grad(local_loss, "data", reduced_in_backward=in_backward, **reduction)
    return train_step_of(mesh, optimizer, value_and_mean_grad)


def train_step_of(mesh, optimizer, value_and_mean_grad):
    """A step from (state, tokens) to (state, loss), with the gradients that a function of (params, tokens) returns."""

    @functools.partial(jax.jit, donate_argnums=0)
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=(P(), P()))
    def train_step(state: TrainState, tokens: chex.Array) -> tuple[TrainState, chex.Scalar]:
        value, grads = value_and_mean_grad(state.params, tokens)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        return TrainState(params=optax.apply_updates(state.params, updates), opt_state=opt_state), value

    return train_step


def make_feedback_step(mesh, optimizer, opt_specs, dtype=jnp.float32):
    """The same for an optimizer that reduces gradients with error feedback, so that its state differs between ranks."""
    specs = TrainState(params=P(), opt_state=opt_specs)

    @functools.partial(jax.jit, donate_argnums=0)
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(specs, P("data")), out_specs=(specs, P()))
    def train_step(state: TrainState, tokens: chex.Array) -> tuple[TrainState, chex.Scalar]:
        local = jax.tree.map(lambda p: lax.pcast(p, "data", to="varying"), state.params)
        value, grads = jax.value_and_grad(functools.partial(loss, dtype=dtype))(local, tokens)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        state = TrainState(params=optax.apply_updates(state.params, updates), opt_state=opt_state)
        return state, ring_pmean(value, "data")

    return train_step


@functools.partial(jax.jit, static_argnums=(2, 3))
def sample_bytes(params: chex.ArrayTree, start: chex.Array, length: int, context: int, key: chex.PRNGKey) -> chex.Array:
    """Samples `length` bytes after `start`, at temperature 0.8."""

    def step(carry, key):
        window, filled = carry
        scores = logits(params, window)[filled - 1]
        byte = jax.random.categorical(key, scores / 0.8).astype(window.dtype)
        full = filled == context
        window = jnp.where(full, jnp.roll(window, -1), window).at[jnp.where(full, context - 1, filled)].set(byte)
        return (window, jnp.minimum(filled + 1, context)), byte

    window = jnp.zeros(context, jnp.int32).at[: start.size].set(start)
    return lax.scan(step, (window, start.size), jax.random.split(key, length))[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=8, help="a divisor of --batch (default: 8)")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=16, help="rows per batch (default: 16)")
    parser.add_argument("--context", type=int, default=64, help="context length in bytes (default: 64)")
    parser.add_argument("--width", type=int, default=128, help=f"model width, a multiple of {HEADS} (default: 128)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--sample", type=int, default=400, help="bytes to sample at the end (default: 400)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--wire", help="send gradients in this dtype with error feedback, such as int8 (8-bit blocks)")
    args = parser.parse_args()
    if args.devices < 1 or args.batch % args.devices:
        parser.error(f"--devices must divide the batch size {args.batch}, got {args.devices}")
    if args.width % HEADS or args.steps < 1:
        parser.error(f"--width must be a multiple of {HEADS}, and --steps positive; got {args.width} and {args.steps}")
    jax.config.update("jax_num_cpu_devices", args.devices)
    jax.config.update("jax_platforms", "cpu")

    console = Console()
    text = load_text()
    mesh = jax.sharding.Mesh(jax.devices(), ("data",))
    params = init_params(jax.random.key(0), args.width, args.layers, args.context)
    optimizer = optax.adam(optax.warmup_cosine_decay_schedule(0, 3e-3, args.steps // 10, args.steps))
    params = jax.device_put(params, jax.NamedSharding(mesh, P()))
    if args.wire:
        reduce = allreduce_gradients("data", wire=args.wire, error_feedback=True)
        optimizer = optax.chain(reduce, optimizer)
        specs = feedback_specs(jax.eval_shape(optimizer.init, params), "data")
        opt_state = jax.jit(jax.shard_map(optimizer.init, mesh=mesh, in_specs=P(), out_specs=specs))(params)
        train_step = make_feedback_step(mesh, optimizer, specs, jnp.dtype(args.dtype))
    else:
        opt_state = jax.device_put(optimizer.init(params), jax.NamedSharding(mesh, P()))
        wire = args.dtype if args.dtype == "bfloat16" else None
        train_step = make_train_step(mesh, optimizer, jnp.dtype(args.dtype), wire=wire)
    state = TrainState(params=params, opt_state=opt_state)
    size = sum(p.size for p in jax.tree.leaves(params))
    console.print(f"{size} parameters, {len(text)} bytes of Python, {args.devices} CPU devices")

    rng = np.random.default_rng(0)
    columns = (
        TextColumn(args.wire or args.dtype), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("{task.fields[status]}"),
    )  # fmt: skip
    losses = []
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=args.steps, status="compiling")
        for _ in range(args.steps):
            starts = rng.integers(0, len(text) - args.context - 1, args.batch)
            tokens = text[starts[:, None] + np.arange(args.context + 1)].astype(np.int32)
            state, value = train_step(state, tokens)
            losses.append(float(value))
            progress.update(bar, advance=1, status=f"loss {losses[-1]:.3f} nats per byte")
    assert_replicated(state.params)
    start = np.frombuffer(b"def ", np.uint8).astype(np.int32)
    sample = sample_bytes(jax.device_get(state.params), start, args.sample, args.context, jax.random.key(1))
    console.rule("a sample")
    console.print("def " + bytes(sample.astype(np.uint8).tolist()).decode("latin-1"), markup=False, highlight=False)
    console.rule()
    console.print(f"Loss of the first step {losses[0]:.3f}, mean of the last ten {np.mean(losses[-10:]):.3f}.")
    console.print(f"The parameters are the same on all {args.devices} devices.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
