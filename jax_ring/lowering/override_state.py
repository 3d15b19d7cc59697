"""Whether `override_lax()` is on in this thread, and its settings."""

from typing import NamedTuple

import jax

from jax_ring import runtime
from jax_ring.options import Order


class Settings(NamedTuple):
    partitioner: bool | None = None
    order: Order = "rank"


# False or the settings. A user context is part of the key of all of JAX's caches, from traced functions to compiled
# programs, so programs lowered with and without the override never mix. JAX does not allow creating one while other
# threads trace, so create it at import. Threads without an override see the initial value.
enabled = jax.make_user_context(Settings() if runtime.OVERRIDE else False)


def for_xla():
    """A context in which `lax` lowers to XLA, for XLA's steps of a call."""
    return enabled(False)
