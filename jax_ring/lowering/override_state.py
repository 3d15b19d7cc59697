"""Whether `override_lax()` is on in this thread, and with which settings."""

from typing import NamedTuple

import jax

from jax_ring import runtime
from jax_ring.options import Order


class Settings(NamedTuple):
    """Those of `override_lax()`."""

    partitioner: bool | None = None
    order: Order = "rank"


# A user context is part of the key of all of JAX's caches, from traced functions to compiled programs, so that programs
# lowered with and without the override never mix. JAX does not allow creating one while other threads trace, so it is
# created at import. Its value is False or the settings. In threads without an override it is the one given here.
enabled = jax.make_user_context(Settings() if runtime.OVERRIDE else False)


def for_xla():
    """A context in which the collectives of `lax` lower to XLA's: for the steps of a call that are XLA's."""
    return enabled(False)
