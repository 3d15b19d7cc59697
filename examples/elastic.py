"""Trains on handwritten digits in several processes, and goes on when some of them are lost.

    python -m jax_ring.launch -n 4 --devices 2 --max-restarts 3 examples/elastic.py [--epochs 10] [--kill 0:3]

Kill a process while it runs (`kill -9`, or `--kill RANK:EPOCH`): the launcher ends the others, and new ones go on from
the last commit: as many as before while restarts are left, then one fewer each time. The digest of the parameters that
is printed at the end is the same whatever happens, because the sums of 24 shards do not depend on the number of
processes.
"""

import argparse
import functools
import hashlib
import os
import signal
import time

import jax
import numpy as np
import optax
from jax.sharding import PartitionSpec as P
from train_digits import BATCH, OPTIMIZER, init_params, load_data, logits, loss

import jax_ring

NUM_SHARDS = 24


def make_train_step(mesh):
    """One step. The loss is computed and summed by shards, so that no bit depends on the number of devices."""

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P(), P("data"), P("data")), out_specs=(P(), P(), P()))
    def train_step(params, opt_state, images, labels):
        value_and_grad = jax_ring.value_and_grad(loss, "data", num_shards=NUM_SHARDS)
        mean_loss, grads = value_and_grad(params, images, labels)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, mean_loss

    return train_step


def batch_of_step(step, images, labels):
    """The whole batch of a step, the same on any number of processes: a function of the step alone."""
    epoch, index = divmod(step, len(labels) // BATCH)
    order = np.random.default_rng(epoch).permutation(len(labels))
    batch = order[index * BATCH : (index + 1) * BATCH]
    return images[batch], labels[batch]


def to_devices(mesh, spec, tree):
    """Arrays of numpy, which every process has, as arrays on the devices of all processes."""
    sharding = jax.NamedSharding(mesh, spec)
    return jax.tree.map(lambda x: jax.make_array_from_callback(np.shape(x), sharding, lambda i: np.asarray(x)[i]), tree)


@jax_ring.elastic.run(min_processes=1, num_shards=NUM_SHARDS)
def train(state, data, epochs, kill):
    """Called by new processes, with the state of the last commit, whenever some were lost or have joined."""
    train_images, test_images, train_labels, test_labels = data
    steps_per_epoch = len(train_labels) // BATCH

    def say(text):
        if jax.process_index() == 0:
            print(text, flush=True)

    mesh = jax.sharding.Mesh(jax.devices(), ("data",))
    train_step = make_train_step(mesh)
    params, opt_state = to_devices(mesh, P(), (state.params, state.opt_state))
    say(f"{jax.process_count()} processes with {mesh.size} devices, from step {state.step}")
    while state.step < epochs * steps_per_epoch:
        batch = to_devices(mesh, P("data"), batch_of_step(state.step, train_images, train_labels))
        params, opt_state, mean_loss = train_step(params, opt_state, *batch)
        state.params, state.opt_state, state.step = params, opt_state, state.step + 1
        epoch, done = divmod(state.step, steps_per_epoch)
        if done == 0:
            say(f"epoch {epoch}: loss {float(mean_loss):.4f}")
        # The launcher numbers processes on and on, so that none started later kills itself.
        if done == 0 and kill == (os.environ.get("JAX_RING_LAUNCHED"), epoch):
            os.kill(os.getpid(), signal.SIGKILL)
        state.commit()
    on_host = [np.asarray(leaf.addressable_data(0)) for leaf in jax.tree.leaves(params)]
    held_out = logits(jax.tree.unflatten(jax.tree.structure(params), on_host), test_images).argmax(-1) == test_labels
    say(f"held-out accuracy {held_out.mean():.2%}")
    return hashlib.sha256(b"".join(leaf.tobytes() for leaf in on_host)).hexdigest()


def rank_and_epoch(text):
    rank, _, epoch = text.partition(":")
    return rank, int(epoch)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--kill", type=rank_and_epoch, metavar="RANK:EPOCH", help="a process that kills itself")
    args = parser.parse_args()
    data = load_data()
    # Before any other use of JAX. Without the launcher this is a one-process program.
    if "JAX_COORDINATOR_ADDRESS" in os.environ:
        jax.distributed.initialize()
    params = jax.device_get(init_params(jax.random.key(0)))
    state = jax_ring.elastic.State(params=params, opt_state=jax.device_get(OPTIMIZER.init(params)), step=0)
    began = time.perf_counter()
    digest = train(state, data, args.epochs, args.kill)
    print(f"trained in {time.perf_counter() - began:.1f} s, with {state.commits} commits")
    print(f"parameters {digest[:16]}, whichever processes were lost")


if __name__ == "__main__":
    main()
