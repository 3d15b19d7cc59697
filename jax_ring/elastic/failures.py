"""Which exceptions mean that a generation's members have changed, and what to say of others."""

import traceback
from collections.abc import Iterator

import jax

from jax_ring import foreign_errors, runtime


class Leave(BaseException):
    """Ends `train` after a commit, so that a new process can join. No Exception, which `train` might catch."""


def why_left(error: BaseException) -> str | None:
    """Why an exception of `train` makes this process leave its generation; else None.

    So does one raised while such an error was handled, unless `from None` or an exit.
    """
    if isinstance(error, Leave):
        return str(error)
    if not isinstance(error, Exception):
        return None
    for each in _chain(error):
        # JAX chooses the type: awaiting a result raises ValueError.
        if isinstance(each, jax.errors.JaxRuntimeError | ValueError) and _is_of_a_member(each):
            return str(each)
    return None


def _is_of_a_member(error: Exception) -> bool:
    failure = runtime.failure_of(error)
    if failure is not None:
        return failure.code == "DEADLINE_EXCEEDED"
    return foreign_errors.MEMBER_GONE.search(str(error)) is not None


def explain(error: BaseException, generation: int) -> None:
    """Adds advice where an object of an earlier generation was used."""
    if generation and any(foreign_errors.DEAD.search(str(each)) for each in _chain(error)):
        error.add_note(
            f"jax_ring.elastic: this is generation {generation} of the job. Arrays, devices, meshes and jitted "
            "functions over them that were made before it are dead. Make them inside the function that "
            "jax_ring.elastic.run decorates, from the arrays in its state."
        )


def clear(error: BaseException) -> None:
    """Frees what an exception's frames hold, such as arrays."""
    for each in _chain(error):
        traceback.clear_frames(each.__traceback__)
        each.__traceback__ = None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ if error.__suppress_context__ else error.__context__
