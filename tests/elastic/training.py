"""A training that tests run under the launcher: prints a digest of its result, which no fault may change.

    python training.py STEPS FAULTS [--wait-for COUNT] [--directory FOLDER] [--keep host] [--pause SECONDS]

FAULTS is a JSON object: by the launcher's number of a process, the step after which it fails, and how. A leaf of the
state is divided over the ranks, as a sharded optimizer does it. Every process prints the times of what happens.
"""

import argparse
import contextlib
import functools
import hashlib
import json
import os
import pathlib
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

NUM_SHARDS = 12
WIDTH = 24  # a multiple of every number of ranks
KEPT_FROM_THE_START = []


def loss(params, x, y):
    return ((jnp.tanh(x @ params["w"]) * params["scale"] - y) ** 2).mean()


def batch(step):
    rng = np.random.default_rng(step)
    return [rng.standard_normal((NUM_SHARDS * 2, WIDTH)).astype(np.float32) for _ in range(2)]


def initial():
    rng = np.random.default_rng(0)
    params = {"w": rng.standard_normal((WIDTH, WIDTH)).astype(np.float32) / 5, "scale": np.ones(WIDTH, np.float32)}
    return params, np.zeros((WIDTH, WIDTH), np.float32)


def make_step(mesh):
    import jax_ring

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), P("data"), P("data"), P("data")), out_specs=(P(), P("data")),
        check_vma=False,
    )  # fmt: skip
    def step(params, momentum, x, y):
        _, grads = jax_ring.value_and_grad(loss, "data", num_shards=NUM_SHARDS)(params, x, y)
        rows = momentum.shape[0]
        own = lax.dynamic_slice_in_dim(grads["w"], lax.axis_index("data") * rows, rows)
        # Products with powers of two are exact, so that it does not matter which of them a compiler contracts.
        momentum = momentum * 0.5 + own
        update = jax_ring.ring_all_gather(momentum, "data", tiled=True)
        params = {"w": params["w"] - 0.125 * update, "scale": params["scale"] - 0.125 * grads["scale"]}
        return params, momentum

    return step


def on(mesh, spec, x):
    return jax.make_array_from_callback(np.shape(x), jax.NamedSharding(mesh, spec), lambda index: np.asarray(x)[index])


def num_sockets():
    """Those of TCP and UDP, which JAX's clients have; the connection to the launcher is another kind."""
    links = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    tables = "".join(pathlib.Path(f"/proc/self/net/{name}").read_text() for name in ("tcp", "tcp6"))
    inodes = {line.split()[9] for line in tables.splitlines() if len(line.split()) > 9}
    return sum(link.startswith("socket:") and link[8:-1] in inodes for link in links)


def say(what):
    print(f"{time.time():.3f} {what} gen {os.environ.get('JAX_RING_GENERATION', '-')}", flush=True)


def fail(how):
    say(f"fails {how}")
    if how == "raise":
        raise ValueError("bad batch")
    if how == "hang":
        time.sleep(1000)
    os.kill(os.getpid(), getattr(signal, how))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", type=int)
    parser.add_argument("faults", type=json.loads)
    parser.add_argument("--wait-for", type=int, default=0, help="how many processes there are to be at the end")
    parser.add_argument("--directory")
    parser.add_argument("--keep", default="process")
    parser.add_argument("--pause", type=float, default=0, help="before each step")
    parser.add_argument("--use-dead-array", action="store_true")
    options = parser.parse_args()
    if "JAX_RING_CONTROL" in os.environ:
        jax.distributed.initialize()
    import jax_ring

    params, momentum = initial()
    disk = {"directory": options.directory, "every": 4} if options.directory else {}
    state = jax_ring.elastic.State(params=params, momentum=momentum, step=0, keep=options.keep, **disk)
    fault = options.faults.get(os.environ.get("JAX_RING_LAUNCHED"))

    @jax_ring.elastic.run(min_processes=1, num_shards=NUM_SHARDS)
    def train(state):
        say(f"enters at {state.step} of {jax.process_count()}")
        mesh = jax.sharding.Mesh(jax.devices(), ("data",))
        step = make_step(mesh)
        if options.use_dead_array:
            KEPT_FROM_THE_START.append(jnp.ones(2))
            np.asarray(KEPT_FROM_THE_START[0])
        params = jax.tree.map(functools.partial(on, mesh, P()), state.params)
        momentum = on(mesh, P("data"), state.momentum)
        entered = state.step
        while state.step < options.steps:
            time.sleep(options.pause)
            x, y = batch(state.step)
            params, momentum = step(params, momentum, on(mesh, P("data"), x), on(mesh, P("data"), y))
            state.params, state.momentum, state.step = params, momentum, state.step + 1
            if state.step == entered + 1:
                jax.block_until_ready(params)
                say(f"has made step {state.step} with {num_sockets()} sockets")
            if fault and state.step == fault[0]:
                fail(fault[1])
            state.commit()
        while jax.process_count() < options.wait_for:
            time.sleep(0.02)
            state.commit()
        leaves = [np.asarray(leaf.addressable_data(0)) for leaf in jax.tree.leaves(params)]
        return hashlib.sha256(b"".join(leaf.tobytes() for leaf in leaves)).hexdigest()

    print(f"digest {train(state)} of {jax.process_count()}", flush=True)


if __name__ == "__main__":
    main()
