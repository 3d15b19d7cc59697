"""Gives collectives without a line of the user that of the equation around them.

JAX cuts tracebacks off at the function that it traces, which may be the collective itself, as in
`lax.map(partial(ring_psum, axis_name="data"), x)`, or a function of jax_ring.
"""

from jax.extend.core import ClosedJaxpr, Jaxpr

from jax_ring import _compat

_JAXPRS = (Jaxpr, ClosedJaxpr)


def inherit(jaxpr, traceback):
    """A jaxpr, closed or not, with such lines.

    Functions are not shared between lines, nor within one: what is lowered must not depend on lines, which may differ
    between processes.

    traceback: of the equation that has the jaxpr.
    """
    body = getattr(jaxpr, "jaxpr", jaxpr)
    # A collective has effects, and so has what contains it.
    equations = [_inherit(eqn, traceback) if eqn.effects else eqn for eqn in body.eqns]
    if all(new is old for new, old in zip(equations, body.eqns, strict=True)):
        return jaxpr
    new = body.replace(eqns=equations)
    return new if body is jaxpr else jaxpr.replace(jaxpr=new)


def _inherit(eqn, traceback):
    source, params = eqn.source_info, dict(eqn.params)
    if not _compat.call_site(source):
        source = source.replace(traceback=traceback)
    for name, value in eqn.params.items():
        if isinstance(value, _JAXPRS):
            params[name] = inherit(value, source.traceback)
        elif type(value) is tuple and value and isinstance(value[0], _JAXPRS):  # branches
            params[name] = tuple([inherit(each, source.traceback) for each in value])
    return eqn if source is eqn.source_info and params == eqn.params else eqn.replace(source_info=source, params=params)
