"""For --jax-ring-override: replaces the ring_ functions by those of lax, which the option lowers to jax_ring."""

import jax

import jax_ring

NAMES = (
    "psum", "pmean", "pmax", "pmin", "psum_scatter", "all_gather", "all_to_all", "pswapaxes", "ppermute", "pshuffle",
)  # fmt: skip


def replace_ring_functions() -> None:
    """Must be called before any test imports the ring_ functions."""
    for name in NAMES:
        setattr(jax_ring, f"ring_{name}", getattr(jax.lax, name))
