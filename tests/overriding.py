"""Runs the tests with lax under override_lax() in the place of our functions, for the option --override-lax."""

import jax

import jax_ring

override = None  # the one that is on


def replace_ours_by_lax() -> None:
    """To be called before any test imports our functions."""
    global override
    for name in ("psum", "pmean", "pmax", "pmin", "psum_scatter", "all_gather"):
        setattr(jax_ring, f"ring_{name}", getattr(jax.lax, name))
    override = jax_ring.override_lax()
