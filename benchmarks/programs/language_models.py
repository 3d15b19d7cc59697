"""Language models of other packages, sharded by their own constraints or by NamedSharding."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np

from programs.registry import divide, program, put, without

# Modules that Tunix imports to read checkpoints, write logs and talk to other programs.
ABSENT = ("sentencepiece", "perfetto", "tensorboardX", "tensorflow", "grain", "wandb", "kagglehub")


def tokens(shape, below: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, below, shape)


@program("google-tunix", fsdp=2, tp=2)
def qwen3_moe(mesh):
    """Qwen3 of Tunix with a mixture of experts: experts divided over one axis, their weights over the other."""
    import optax
    from flax import nnx

    qwen3 = without(ABSENT, "tunix.models.qwen3.model")

    config = qwen3.ModelConfig(
        num_layers=1, vocab_size=64, embed_dim=32, hidden_dim=32, num_heads=4, head_dim=8, num_kv_heads=2,
        rope_theta=10_000, norm_eps=1e-6, num_experts=4, num_experts_per_tok=2, use_tied_embedding=True,
    )  # fmt: skip
    batch = put(tokens((8, 16), 64), mesh, "fsdp")
    positions, mask = jnp.tile(jnp.arange(16), (8, 1)), jnp.tril(jnp.ones((8, 16, 16), bool))

    @nnx.jit
    def make():
        model = qwen3.Qwen3(config, rngs=nnx.Rngs(0))
        state = nnx.state(model)
        nnx.update(model, jax.lax.with_sharding_constraint(state, nnx.get_partition_spec(state)))
        return model

    @nnx.jit
    def step(model, optimizer, batch):
        def loss(model):
            logits, _ = model(batch, positions, None, mask)
            return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], batch[:, 1:]).mean()

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    def calculate():
        with mesh:
            model = make()
            optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
            losses = [step(model, optimizer, batch) for _ in range(2)]
        return losses, nnx.to_pure_dict(nnx.state(model, nnx.Param))

    return calculate


@program("transformers", data=2, model=4)
def gpt2(mesh):
    """GPT-2 of transformers in flax: weights divided over one axis, the batch over the other."""
    import optax
    from transformers import FlaxGPT2LMHeadModel, GPT2Config

    config = GPT2Config(
        vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    model = FlaxGPT2LMHeadModel(config, seed=0)
    params, tx = divide(model.params, mesh, "model"), optax.adamw(1e-3)
    batch = put(tokens((8, 16), 64), mesh, "data")

    @jax.jit
    def step(params, state, batch):
        def loss(params):
            logits = model(batch, params=params).logits[:, :-1]
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = tx.update(grads, state, params)
        return value, optax.apply_updates(params, updates), state

    state = jax.jit(tx.init)(params)

    def calculate():
        first, now, of_tx = step(params, state, batch)
        return first, step(now, of_tx, batch)

    return calculate


@program("dm-haiku", data=4, model=2)
def haiku_transformer(mesh):
    """The transformer among haiku's examples, by its own update function."""
    train = importlib.import_module("examples.transformer.train")
    first = jnp.asarray(tokens((8, train.SEQUENCE_LENGTH), 100))
    data = train.dataset.Batch(inputs=first, targets=jnp.roll(first, -1, 1))
    state = divide(train.init(jax.random.key(0), data), mesh, "model")
    data = put(data, mesh, "data")

    def calculate():
        now, metrics = train.update(state, data)
        return metrics, train.update(now, data)

    return calculate
