"""Gives collectives without a line of the user that of the equation around them.

JAX cuts tracebacks off at the function that it traces, which may be the collective itself, as in
`lax.map(partial(ring_psum, axis_name="data"), x)`, or a function of jax_ring.
"""

from typing import Any

from jax_ring import _compat


def inherit(value: Any, traceback) -> Any:
    """A jaxpr with such lines, and a tuple of jaxprs. Other values stay.

    Functions are not shared between lines, nor within one: what is lowered must not depend on lines, which may differ
    between processes.

    traceback: of the equation that has the value.
    """
    if type(value) is tuple:
        return tuple([inherit(each, traceback) for each in value])
    if not _compat.is_jaxpr(value):
        return value
    jaxpr = getattr(value, "jaxpr", value)
    # A collective has effects, and so has what contains it.
    equations = [_inherit(eqn, traceback) if eqn.effects else eqn for eqn in jaxpr.eqns]
    if all(new is old for new, old in zip(equations, jaxpr.eqns, strict=True)):
        return value
    new = jaxpr.replace(eqns=equations)
    return new if value is jaxpr else value.replace(jaxpr=new)


def _inherit(eqn, traceback):
    source = eqn.source_info
    if not _compat.call_site(source):
        source = source.replace(traceback=traceback)
    params = {name: inherit(value, source.traceback) for name, value in eqn.params.items()}
    return eqn if source is eqn.source_info and params == eqn.params else eqn.replace(source_info=source, params=params)
