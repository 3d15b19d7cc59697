"""Trains a small network on handwritten digits in several processes, each with its own part of the data.

    python -m jax_ring.launch -n 4 examples/multi_process.py [--epochs 10]

The training step is that of train_digits.py; it does not depend on processes. Each process runs this whole program, and
calls the same jitted functions in the same order. Arrays span the devices of all processes, and each process provides
and sees the shards on its own devices. Without the launcher, a single process has all the data.
"""

import argparse
import hashlib
import os
import sys

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec as P
from train_digits import BATCH, OPTIMIZER, accuracy, init_params, load_data, loss, make_train_step

import jax_ring
from jax_ring import value_and_grad


def init(key):
    params = init_params(key)
    return params, OPTIMIZER.init(params)


def own_batches(images, labels, mesh, rng):
    """Global batches, to which this process contributes a part from its own examples, in its own random order."""
    examples, size = len(labels) // jax.process_count(), BATCH // jax.process_count()
    own = slice(jax.process_index() * examples, (jax.process_index() + 1) * examples)
    images, labels = images[own], labels[own]
    order = rng.permutation(examples)
    for start in range(0, examples - size + 1, size):
        batch = order[start : start + size]
        # Shape (BATCH, ...), the parts in process order.
        yield tuple(
            jax.make_array_from_process_local_data(jax.NamedSharding(mesh, P("data")), part[batch])
            for part in (images, labels)
        )


def same_on_all_processes(params):
    """Whether all processes have the same bits, and a digest of the bits of this process."""
    digest = hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(params)))
    digests = multihost_utils.process_allgather(np.frombuffer(digest.digest(), np.uint8))
    return len({part.tobytes() for part in digests.reshape(jax.process_count(), -1)}) == 1, digest.hexdigest()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()
    # Before any other use of JAX. Under Slurm and Open MPI, too, this needs no arguments.
    if "JAX_NUM_PROCESSES" in os.environ:
        jax.distributed.initialize()
    if BATCH % jax.device_count():
        parser.error(f"the number of devices must divide the batch size {BATCH}, got {jax.device_count()}")

    def print_once(text):
        if jax.process_index() == 0:
            print(text)

    # The devices of all processes, ordered by process.
    mesh = jax.sharding.Mesh(jax.devices(), ("data",))
    train_images, test_images, train_labels, test_labels = load_data()
    params, opt_state = jax.jit(init, out_shardings=jax.NamedSharding(mesh, P()))(jax.random.key(0))
    train_step = make_train_step(mesh, value_and_grad(loss, "data"))
    rng = np.random.default_rng(jax.process_index())

    images, labels = next(own_batches(train_images, train_labels, mesh, rng))
    print_once(f"processes: {jax.process_count()}, devices: {jax.device_count()}")
    for collective in jax_ring.explain(train_step, params, opt_state, images, labels).collectives:
        why = f": {collective.why}" if collective.why else ""
        print_once(f"{collective.name} of {collective.num_bytes:,} bytes is served by {collective.served_by}{why}")

    for epoch in range(args.epochs):
        losses = []
        for images, labels in own_batches(train_images, train_labels, mesh, rng):
            params, opt_state, mean_loss = train_step(params, opt_state, images, labels)
            losses.append(float(mean_loss))
        print_once(f"epoch {epoch + 1}: mean loss {np.mean(losses):.4f}")
    # All processes must call this: the parameters span them all.
    held_out = float(accuracy(params, test_images, test_labels))
    print_once(f"held-out accuracy {held_out:.2%}")

    same, digest = same_on_all_processes(params)
    verdict = "the same on all processes" if same else "NOT the same on all processes"
    print(f"process {jax.process_index()} has parameters {digest[:16]}, {verdict}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
