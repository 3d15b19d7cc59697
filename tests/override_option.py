"""For --override-lax: replaces the ring_ functions by those of lax, under override_lax()."""

import jax

import jax_ring

NAMES = (
    "psum", "pmean", "pmax", "pmin", "psum_scatter", "all_gather", "all_to_all", "pswapaxes", "ppermute", "pshuffle",
)  # fmt: skip

override = None  # the active handle of override_lax()


def replace_ring_functions() -> None:
    """Must be called before any test imports the ring_ functions."""
    global override
    for name in NAMES:
        setattr(jax_ring, f"ring_{name}", getattr(jax.lax, name))
    override = jax_ring.override_lax()
