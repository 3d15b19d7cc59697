"""Waits for what calls have returned."""

import itertools
from typing import Any

import jax


def wait(leaves: list[Any], *, of_one_program: bool) -> bool:
    """Waits until the arrays among these are ready or have failed. Returns False if it could wait for none of them.

    Those that were donated before tell nothing.

    of_one_program: whether all are ready at the same time.
    """
    left = (leaf for leaf in leaves if isinstance(leaf, jax.Array) and not leaf.is_deleted())
    waited_for = list(itertools.islice(left, 1 if of_one_program else None))
    try:
        jax.block_until_ready(waited_for)  # at once: each wait of its own would need Python's lock again
    except Exception:  # donated meanwhile, or failed, which raises at the caller as well
        waited_for = [array for array in waited_for if not array.is_deleted()]
    return bool(waited_for) or not any(isinstance(leaf, jax.Array) for leaf in leaves)
