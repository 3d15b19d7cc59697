"""The examples of flax, of its source distribution: their own steps, with data that is made here."""

import importlib
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from programs.registry import divide, example, program, put

SOURCE = "flax-0.12.8"
# Modules that read data sets or write logs.
ABSENT = (
    "tensorflow", "tensorflow_datasets", "grain", "flax.metrics.tensorboard", "clu.metric_writers", "clu.checkpoint",
    "clu.periodic_actions", "clu.parameter_overview", "input_pipeline", "tokenizer", "env_utils", "test_episodes",
    "sampler",
)  # fmt: skip


def load(name: str, module: str = "train"):
    importlib.import_module("flax.training.checkpoints")  # import it first: it looks for TensorFlow
    return example(f"{SOURCE}/examples/{name}", module, ABSENT)


@program(SOURCE, data=2, fsdp=2, tensor=2)
def lm1b(mesh):
    """A transformer with FSDP and tensor parallelism by logical axes. The step donates its state."""
    train = load("lm1b")
    import optax

    config = example(f"{SOURCE}/examples/lm1b/configs", "default").get_config()
    config.update({"ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2, "ici_data_parallelism": 2})
    config.update({"dcn_data_parallelism": 1, "per_device_batch_size": 2, "max_target_length": 32})
    mesh = jax.sharding.Mesh(train.utils.create_device_mesh(config), config.mesh_axes)
    model = train.models.TransformerConfig(
        vocab_size=128, output_vocab_size=128, emb_dim=64, num_heads=4, num_layers=2, qkv_dim=64, mlp_dim=128,
        max_len=32, dtype=jnp.bfloat16,
    )  # fmt: skip
    rate = train.create_learning_rate_schedule(config.learning_rate, warmup_steps=4)
    optimizer = optax.adamw(rate, b1=0.9, b2=0.98, eps=1e-9, weight_decay=config.weight_decay)
    state, on = train.utils.setup_initial_state(
        train.models.TransformerLM(model.replace(deterministic=True)), optimizer, config, jax.random.PRNGKey(0), mesh
    )
    data = jax.sharding.NamedSharding(mesh, jax.P(config.data_sharding))
    step = jax.jit(
        train.train_step, in_shardings=(on, data, None), out_shardings=(on, None), static_argnums=(2, 3, 4),
        donate_argnums=0,
    )  # fmt: skip
    evaluate = jax.jit(train.eval_step, in_shardings=(on.params, data), static_argnums=(2, 3))

    def calculate():
        nonlocal state
        rng, metrics = np.random.default_rng(0), []
        for _ in range(2):
            batch = {"inputs": jnp.asarray(rng.integers(0, 128, (8, 32)))}
            state, each = step(state, batch, model, rate, 0.0, jax.random.PRNGKey(1))
            metrics.append(each)
        metrics.append(evaluate(state.params, batch, model.replace(deterministic=True)))
        return metrics, state.params, state.opt_state

    return calculate


@program(SOURCE, fsdp=4, tensor=2)
def gemma(mesh):
    """Gemma in nnx, with explicit axes, FSDP and tensor parallelism; the step donates model and optimizer."""
    train = load("gemma")
    import optax
    from flax import nnx

    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"))
    shardings = train.ShardingConfig.fsdp_tp_sharding(fsdp_axis_name="fsdp", tensor_parallel_axis_name="tensor")
    config = train.transformer_lib.TransformerConfig.from_dict(
        num_layers=2, num_embed=128, embed_dim=32, hidden_dim=64, num_heads=4, head_dim=16, num_kv_heads=1,
        use_post_attn_norm=False, use_post_ffw_norm=False, attention_types=(1, 1), final_logit_softcap=None,
        dtype=jnp.bfloat16, shd_config=shardings,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    with jax.set_mesh(mesh):
        model = train.transformer_lib.Transformer(config, rngs=nnx.Rngs(params=0, dropout=0))
        optimizer = nnx.Optimizer(model, tx=optax.adamw(1e-3), wrt=nnx.Param)
        metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy())
        step = nnx.jit(
            train.nnx_train_step,
            static_argnames=("label_smoothing", "pad_id"),
            donate_argnames=("model", "optimizer"),
        )

    def calculate():
        for _ in range(2):
            tokens = rng.integers(0, 128, (8, 17))
            batch = {
                "inputs": tokens[:, :-1],
                "targets": tokens[:, 1:],
                "inputs_position": np.tile(np.arange(16), (8, 1)),
                "inputs_segmentation": np.ones((8, 16), int),
            }
            with jax.set_mesh(mesh):
                step(model, optimizer, nnx.Rngs(params=0, dropout=0), put(batch, mesh, "fsdp"), metrics, 0.0, 0)
        return metrics.compute(), nnx.to_pure_dict(nnx.state(model, nnx.Param))

    return calculate


@program(SOURCE, data=8)
def mnist(mesh):
    """nnx: convolutions, batch norm and dropout; its own metrics; the batch divided."""
    train = load("mnist")
    import optax
    from flax import nnx

    model = train.CNN(rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.005, 0.9), wrt=nnx.Param)
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    rngs, rng = nnx.Rngs(0), np.random.default_rng(0)
    nnx.update((model, optimizer, metrics, rngs), put(nnx.state((model, optimizer, metrics, rngs)), mesh))

    def calculate():
        model.train()
        for _ in range(3):
            batch = {"image": rng.random((64, 28, 28, 1), np.float32), "label": rng.integers(0, 10, 64)}
            train.train_step(model, optimizer, metrics, put(batch, mesh, "data"), rngs)
        model.eval()
        train.eval_step(model, metrics, put(batch, mesh, "data"))
        return metrics.compute(), nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.RngState)))

    return calculate


@program(SOURCE, data=4, model=2)
def vae(mesh):
    """A variational autoencoder, called without jit: each operation is a program of its own. Weights divided."""
    train = load("vae")
    import optax

    model = train.models.model(8)
    rng = np.random.default_rng(0)
    batch = put((rng.random((32, 784)) > 0.5).astype(np.float32), mesh, "data")
    params = jax.jit(model.init)(jax.random.key(0), jnp.ones((32, 784)), jax.random.key(1))["params"]
    state = train.train_state.TrainState.create(
        apply_fn=model.apply, params=divide(params, mesh, "model"), tx=optax.adam(1e-3)
    )

    def calculate():
        nonlocal state
        for i in range(2):
            state = train.train_step(state, batch, jax.random.key(i), 8)
        z = put(rng.normal(size=(16, 8)).astype(np.float32), mesh, "data")
        return state.params, train.eval_f(state.params, batch, z, jax.random.key(9), 8)

    return calculate


@program(SOURCE, data=8)
def seq2seq(mesh):
    """An LSTM that adds numbers and samples its answers."""
    from absl import flags

    pipeline = example(f"{SOURCE}/examples/seq2seq", "input_pipeline")
    train = load("seq2seq")

    flags.FLAGS(["train", "--hidden_size=32"])
    table = pipeline.CharacterTable("0123456789+= ", 3)
    key = jax.random.key(0)
    state, metrics = put(train.get_train_state(key, table), mesh), []

    def calculate():
        nonlocal state
        for _ in range(2):
            state, each = train.train_step(state, put(table.get_batch(32), mesh, "data"), key, table.eos_id)
            metrics.append(each)
        answers = train.decode(state.params, put(table.get_batch(16)["query"], mesh, "data"), key, table)
        return metrics, state.params, answers

    return calculate


@program(SOURCE, data=4, model=2)
def sst2(mesh):
    """Text classification by a bidirectional LSTM with attention; weights divided."""
    train = load("sst2")
    config = example(f"{SOURCE}/examples/sst2/configs", "default").get_config()
    config.update({"vocab_size": 64, "embedding_size": 24, "hidden_size": 16})
    model = train.model_from_config(config)
    state = train.create_train_state(jax.random.key(0), config, model)
    state = state.replace(params=divide(state.params, mesh, "model"))
    step, evaluate = jax.jit(train.train_step), jax.jit(train.eval_step)
    rng, metrics = np.random.default_rng(0), []

    def calculate():
        nonlocal state
        for _ in range(2):
            batch = {"token_ids": rng.integers(2, 64, (32, 12)), "length": rng.integers(3, 12, 32)}
            batch = put(batch | {"label": rng.integers(0, 2, 32).astype(np.float32)}, mesh, "data")
            state, each = step(state, batch, {"dropout": jax.random.key(1)})
            metrics.append(each)
        return metrics, state.params, evaluate(state, batch, None)

    return calculate


@program(SOURCE, nodes=8)
def ogbg_molpcba(mesh):
    """A graph network (jraph) on a graph whose nodes and edges are divided: sums over segments cross devices."""
    train = load("ogbg_molpcba")
    import jraph

    config = example(f"{SOURCE}/examples/ogbg_molpcba/configs", "default").get_config()
    config.update({"latent_size": 16, "message_passing_steps": 2, "num_classes": 8})
    rng = np.random.default_rng(0)
    n_node, n_edge = np.full(8, 16), np.full(8, 48)
    first = np.repeat(np.arange(8) * 16, 48)
    graphs = jraph.GraphsTuple(
        nodes=rng.normal(size=(128, 9)).astype(np.float32), edges=rng.normal(size=(384, 3)).astype(np.float32),
        senders=first + rng.integers(0, 16, 384), receivers=first + rng.integers(0, 16, 384),
        n_node=n_node, n_edge=n_edge, globals=rng.integers(0, 2, (8, 8)).astype(np.float32),
    )  # fmt: skip
    graphs = put(graphs, mesh, "nodes")
    net = train.create_model(config, deterministic=True)
    params = jax.jit(net.init)(jax.random.key(0), train.replace_globals(graphs))
    state = train.train_state.TrainState.create(
        apply_fn=train.create_model(config, deterministic=False).apply, params=params, tx=train.create_optimizer(config)
    )

    def calculate():
        nonlocal state
        result = []
        for i in range(2):
            state, metrics = train.train_step(state, graphs, {"dropout": jax.random.key(i)})
            result.append(metrics)
        return result, state.params, train.evaluate_step(state.replace(apply_fn=net.apply), graphs)

    return calculate


@program(SOURCE, data=8)
def ppo(mesh):
    """Proximal policy optimization: advantages, and an epoch of minibatches in one program."""
    lib = load("ppo", "ppo_lib")
    model = lib.models.ActorCritic(num_outputs=4)
    config = example(f"{SOURCE}/examples/ppo/configs", "default").get_config()
    params = lib.get_initial_params(jax.random.key(0), model)
    state = put(lib.create_train_state(params, model, config, 10), mesh)
    rng = np.random.default_rng(0)
    rewards, values = rng.normal(size=(4, 8)), rng.normal(size=(5, 8))

    def calculate():
        nonlocal state
        advantages = lib.gae_advantages(
            *put((rewards, np.ones((4, 8)), values), mesh, None, "data"), config.gamma, config.lambda_
        )
        trajectories = (
            rng.integers(0, 255, (32, 84, 84, 4)).astype(np.float32), rng.integers(0, 4, 32),
            np.log(rng.random(32)).astype(np.float32), rng.normal(size=32).astype(np.float32),
        )  # fmt: skip
        trajectories = (*put(trajectories, mesh, "data"), advantages.reshape(-1))
        state, loss = lib.train_step(
            state, trajectories, 16, clip_param=0.1, vf_coeff=config.vf_coeff, entropy_coeff=config.entropy_coeff
        )
        return advantages, loss, state.params

    return calculate


def toy(name: str) -> SimpleNamespace:
    """Runs a toy example of nnx to its end, with few steps and without its plots."""
    import sys
    from pathlib import Path

    path = next(
        file for entry in sys.path if (file := Path(entry) / SOURCE / "examples/nnx_toy_examples" / name).is_file()
    )
    plots = {name: mock.MagicMock() for name in ("matplotlib", "matplotlib.pyplot")}
    with mock.patch.dict(sys.modules, plots), mock.patch("jax.debug.visualize_array_sharding"):
        names = {"__name__": name}
        exec(compile(path.read_text(), str(path), "exec"), names)
    return SimpleNamespace(**names)


@program(SOURCE, data=8)
def nnx_data_parallel(mesh):
    """The script 04_data_parallel_with_jit.py as it is, to its end."""
    from flax import nnx

    def calculate():
        names = toy("04_data_parallel_with_jit.py")
        return names.loss, nnx.to_pure_dict(nnx.state(names.model)), names.y_pred

    return calculate


@program(SOURCE, data=2, model=4)
def nnx_fsdp(mesh):
    """The script 10_fsdp_and_optimizer.py as it is, to its end: 10 000 steps."""
    from flax import nnx

    def calculate():
        names = toy("10_fsdp_and_optimizer.py")
        return np.array(names.losses), nnx.to_pure_dict(nnx.state(names.model)), names.y_pred

    return calculate
