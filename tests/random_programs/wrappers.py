"""What random programs are made of beside collectives: control flow and transformations around a function of one value.

All cast to values that vary over every mesh axis where JAX wants equal types, as for what a loop carries.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_ring


def mesh_axes() -> tuple:
    """The axes of the enclosing shard_map."""
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)


def vary(x, axes=None):
    """x, cast to vary over the mesh axes among `axes`, by default over all. No-op without vma tracking."""
    if not jax_ring._compat.check_vma():
        return x
    bound = mesh_axes()
    axes = bound if axes is None else [axis for axis in axes if axis in bound]
    missing = tuple(axis for axis in axes if axis not in jax_ring._compat.varying_axes(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def resize(x, shape):
    """x, repeated or cut to a shape, in row-major order."""
    return jnp.resize(x, shape)


def spread(x, count, dim=0):
    """`count` values stacked along a new dimension, which are x with its elements moved."""
    return jnp.stack([jnp.roll(x, i) if x.ndim else x for i in range(count)], dim)


# ---- Around a function that keeps the type of its argument ----------------------------------------------------------


def scan(body, x, length):
    """`length` times the body. What the iterations see as inputs and return as outputs goes into the result."""

    def step(carry, number):
        carry = vary(body(carry))
        return carry, carry * (number == 0).astype(carry.dtype) if carry.dtype != bool else carry

    last, outputs = lax.scan(step, vary(x), jnp.arange(length))
    return last + outputs[0] if last.dtype != bool else last ^ outputs[0]


def fori(body, x, length):
    """A loop of a length that is known when it is traced, so that it has a derivative in reverse mode."""
    return lax.fori_loop(0, length, lambda _, carry: vary(body(carry)), vary(x))


def while_loop(body, x, length):
    """A loop of a length that is known at run time only."""
    start = (jnp.int32(0), vary(x))
    limit = lax.optimization_barrier(jnp.int32(length))
    return lax.while_loop(lambda state: state[0] < limit, lambda state: (state[0] + 1, vary(body(state[1]))), start)[1]


def cond(body, x, is_true):
    """The body if `is_true`, else x with its elements in reverse order."""
    x = vary(x)
    return lax.cond(is_true, lambda x: vary(body(x)), lambda x: x[::-1] if x.ndim else x, x)


def switch(bodies, x, index):
    """One of the bodies."""
    return lax.switch(index, [lambda x, body=body: vary(body(x)) for body in bodies], vary(x))


def hidden(value):
    """A number as an array that the compiler does not know."""
    return lax.optimization_barrier(jnp.asarray(value))


# ---- Around any function --------------------------------------------------------------------------------------------


def batch(body, x, count, in_axis=0, out_axis=0, name=None):
    """The body under vmap, over `count` values made of x."""
    options = {} if name is None else {"axis_name": name}
    return jax.vmap(body, in_axes=in_axis, out_axes=out_axis, **options)(spread(x, count, in_axis))


def unbatched(body, x, count, name):
    """The body under vmap over a named axis, with the same x for all members. The result has them in front."""
    return jax.vmap(lambda _: body(x), axis_name=name, axis_size=count)(jnp.arange(count))


def remat(body, x, policy=None):
    """The body, evaluated again where its derivative needs it."""
    chosen = None if policy is None else getattr(jax.checkpoint_policies, policy)
    return jax.checkpoint(body, policy=chosen)(x)


def jit(body, x):
    """A jitted function within another."""
    return jax.jit(body)(x)


def custom_vjp(body, x):
    """The body with a rule for its derivative, in which collectives are evaluated a second time."""
    f = jax.custom_vjp(lambda x: vary(body(x)))
    f.defvjp(lambda x: (vary(body(x)), x), lambda x, ct: jax.vjp(lambda x: vary(body(x)), x)[1](ct))
    return f(vary(x))


def custom_jvp(body, x):
    """The body with a rule for its derivative in forward mode."""
    f = jax.custom_jvp(lambda x: vary(body(x)))
    f.defjvp(lambda primals, tangents: jax.jvp(lambda x: vary(body(x)), primals, tangents))
    return f(vary(x))


# ---- Ragged all-to-alls ---------------------------------------------------------------------------------------------


def ragged_plan(seed, size, slices, num_rows, num_received):
    """Random sizes and offsets for `size` ranks with `slices` slices for each: what each rank passes, by argument.

    Also, by rank and row of its result: the row that arrives there among those of all ranks, or -1. No row is sent
    twice, since that has no derivative.
    """
    random = np.random.default_rng(seed)
    sizes = np.zeros((size, size, slices), np.int32)  # by sender, receiver and number
    begins, ends = np.zeros_like(sizes), np.zeros_like(sizes)
    room = np.full(size, num_received)
    sources = np.full((size, num_received), -1, np.int32)
    left = np.full(size, num_rows)
    for sender, receiver in random.permutation([(i, j) for i in range(size) for j in range(size)]):
        for k in range(slices):
            most = min(room[receiver], left[sender], 3)
            n = int(random.integers(most + 1))
            begins[sender, receiver, k] = num_rows - left[sender]
            ends[sender, receiver, k] = at = num_received - room[receiver]
            sizes[sender, receiver, k] = n
            sources[receiver, at : at + n] = sender * num_rows + begins[sender, receiver, k] + np.arange(n)
            left[sender] -= n
            room[receiver] -= n
    received = np.swapaxes(sizes, 0, 1)
    return [x.reshape(size, size * slices) for x in (begins, sizes, ends, received)], sources


def rank_in_group(axes, groups=None):
    """The rank among those of its group."""
    if all(axis in mesh_axes() for axis in (axes if isinstance(axes, tuple) else (axes,))):
        rank = lax.axis_index(axes)
    else:
        # With vma tracking it would vary over the vmap axis, which JAX 0.10.2 does not expect.
        with jax_ring._compat.without_vma():
            rank = lax.axis_index(axes)
    if groups is None:
        return rank
    places = np.zeros(sum(map(len, groups)), np.int32)
    for group in groups:
        places[list(group)] = np.arange(len(group))
    return jnp.asarray(places)[rank]
