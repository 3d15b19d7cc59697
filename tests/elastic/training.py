"""A training that tests run under the launcher: prints a digest of its result, which no fault may change.

    python training.py STEPS FAULTS [--wait-for COUNT] [--directory FOLDER] [--pause SECONDS]

FAULTS is a JSON object: by the launcher's number of a process, the step after which it fails, and how. A leaf of the
state is divided over the ranks, as a sharded optimizer does it. Every process prints the times of what happens.

With --orders FOLDER a process fails as the file FOLDER/PID says, and the file FOLDER/steps may set a lower STEPS.
"""

import argparse
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
FLIP, HANG = 1, 2
WITHIN_STEP = {"flip": FLIP, "callback": HANG}  # what a rank does wrong there, by order
WIDTH = 24  # a multiple of every number of ranks


@jax.custom_vjp
def damaged(x, mask):
    """x, whose gradient has bits flipped in its first element."""
    return x


def _flip(mask, gradient):
    bits = lax.bitcast_convert_type(gradient, jnp.uint32)
    return lax.bitcast_convert_type(bits.at[0].set(bits[0] ^ mask), jnp.float32), np.zeros((), jax.dtypes.float0)


damaged.defvjp(lambda x, mask: (x, mask), _flip)


def loss(params, x, y, mask):
    return ((jnp.tanh(x @ params["w"]) * damaged(params["scale"], mask) - y) ** 2).mean()


def batch(step):
    rng = np.random.default_rng(step)
    return [rng.standard_normal((NUM_SHARDS * 2, WIDTH)).astype(np.float32) for _ in range(2)]


def initial():
    rng = np.random.default_rng(0)
    params = {"w": rng.standard_normal((WIDTH, WIDTH)).astype(np.float32) / 5, "scale": np.ones(WIDTH, np.float32)}
    return params, np.zeros((WIDTH, WIDTH), np.float32)


def make_step(mesh, audits):
    """(params, momentum, x, y, what each rank does wrong, number of the step) -> the next params and momentum."""
    import jax_ring
    from jax_ring.training.same_bits.audit import Audit

    audit = 1 if audits and mesh.size > 1 else None

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), P("data"), P("data"), P("data"), P("data"), P()),
        out_specs=(P(), P("data")), check_vma=False,
    )  # fmt: skip
    def step(params, momentum, x, y, wrong, number):
        flips = wrong[0] == FLIP
        if audit:
            # Only where the audit of this step finds it.
            drawn = Audit("step", audit, number).draw("data", NUM_SHARDS)
            flips &= (lax.axis_index("data") == drawn.owner) | (lax.axis_index("data") == drawn.auditor)
        _, grads = jax_ring.value_and_grad(
            loss, "data", num_shards=NUM_SHARDS, in_axes=(0, 0, None), audit=audit,
            step=number if audit else None,
        )(params, x, y, flips.astype(jnp.uint32))  # fmt: skip
        rows = momentum.shape[0]
        own = lax.dynamic_slice_in_dim(grads["w"], lax.axis_index("data") * rows, rows)
        own += lax.cond(wrong[0] == HANG, _hang_in_callback, lambda: jnp.float32(0))
        # Products with powers of two are exact, so that it does not matter which of them a compiler contracts.
        momentum = momentum * 0.5 + own
        update = jax_ring.ring_all_gather(momentum, "data", tiled=True)
        params = {"w": params["w"] - 0.125 * update, "scale": params["scale"] - 0.125 * grads["scale"]}
        return params, momentum

    return step


def _hang_in_callback():
    return jax.pure_callback(lambda: time.sleep(1000), jax.ShapeDtypeStruct((), jnp.float32))


def on(mesh, spec, x):
    return jax.make_array_from_callback(np.shape(x), jax.NamedSharding(mesh, spec), lambda index: np.asarray(x)[index])


def say(what):
    generation, restart = (os.environ.get(f"JAX_RING_{name}", "-") for name in ("GENERATION", "RESTART"))
    print(f"{time.time():.3f} {what} gen {generation} restart {restart}", flush=True)


def fail(how):
    say(f"fails {how}")
    if how == "raise":
        raise ValueError("bad batch")
    if how == "hang":
        time.sleep(1000)
    os.kill(os.getpid(), getattr(signal, how))


def order(folder, name):
    """What a file says; empty without one."""
    try:
        return pathlib.Path(folder, str(name)).read_text() if folder else ""
    except FileNotFoundError:
        return ""


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", type=int)
    parser.add_argument("faults", type=json.loads)
    parser.add_argument("--wait-for", type=int, default=0, help="how many processes there are to be at the end")
    parser.add_argument("--directory")
    parser.add_argument("--pause", type=float, default=0, help="before each step")
    parser.add_argument("--orders", help="a folder")
    parser.add_argument("--audits", action="store_true", help="in each step")
    options = parser.parse_args()
    if "JAX_COORDINATOR_ADDRESS" in os.environ:
        jax.distributed.initialize()
    import jax_ring

    params, momentum = initial()
    disk = {"directory": options.directory, "every": 4} if options.directory else {}
    state = jax_ring.elastic.State(params=params, momentum=momentum, step=0, **disk)
    fault = options.faults.get(os.environ.get("JAX_RING_LAUNCHED"))

    @jax_ring.elastic.run(min_processes=1, num_shards=NUM_SHARDS)
    def train(state):
        say(f"enters at {state.step} of {jax.process_count()}")
        mesh = jax.sharding.Mesh(jax.devices(), ("data",))
        step = make_step(mesh, options.audits)
        params = jax.tree.map(functools.partial(on, mesh, P()), state.params)
        momentum = on(mesh, P("data"), state.momentum)
        entered = state.step
        while state.step < (last := int(order(options.orders, "steps") or options.steps)):
            time.sleep(options.pause if last == options.steps else 0)
            if (how := order(options.orders, os.getpid())) and how not in WITHIN_STEP:
                fail(how)
            wrong = on(mesh, P("data"), np.full(mesh.size, WITHIN_STEP.get(how, 0), np.uint32))
            x, y = (on(mesh, P("data"), each) for each in batch(state.step))
            params, momentum = step(params, momentum, x, y, wrong, jnp.int32(state.step))
            state.params, state.momentum, state.step = params, momentum, state.step + 1
            if state.step == entered + 1:
                jax.block_until_ready(params)
                say(f"has made step {state.step}")
            if options.orders and state.step % 20 == 0:
                say(f"is at {state.step}")
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
