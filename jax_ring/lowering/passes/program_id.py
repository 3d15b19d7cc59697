"""The name of the program under lowering, the same in all processes, which match calls by it.

Programs of one name may run at once from two threads, in another order in each process. So a digest is added of what
the shard_maps' bodies compute, by the expressions of their results: without locations, callbacks, whose addresses
differ, and prints, which one process may have alone.
"""

import dataclasses
import enum
import hashlib
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal
from jax.extend.mlir import ir

from jax_ring import _compat
from jax_ring.distributed import discovery
from jax_ring.lowering.module_state import state_of

_MAX_BYTES = 1 << 16  # size limit of an array that is part of a program


def name_of(ctx: _compat.LoweringContext) -> str:
    """The program's name between processes.

    Before the '#' it is the same everywhere. Behind it programs of that name are counted; a process may lower more, to
    print or run one alone.
    """
    state = state_of(ctx)
    if state.program:
        return state.program
    name = _compat.module_name(ctx)
    if state.number is None:
        state.number = discovery.next_number(name)
    return f"{name}/{state.digest}#{state.number}"


def note_body(ctx: _compat.LoweringContext, jaxpr: Any) -> None:
    """Adds a shard_map's body to its program's digest."""
    state = state_of(ctx)
    before = state.digest or _digest(*_compat.main_argument_types(ctx))
    state.digest = _digest(before, digest_of(jaxpr))


def name_of_program(module: ir.Module, jaxpr: Any) -> str:
    """The name between processes of a whole program, lowered from this jaxpr."""
    main = next(op for op in module.body.operations if ir.StringAttr(op.attributes["sym_name"]).value == "main")
    marks = [str(main.attributes[name]) for name in ("arg_attrs", "res_attrs") if name in main.attributes]
    name = ir.StringAttr(module.operation.attributes["sym_name"]).value
    types = str(main.attributes["function_type"])
    return f"{name}/{_digest(digest_of(jaxpr), types, *marks)}#{discovery.next_number(f'{name}, as a whole')}"


def digest_of(jaxpr: Any) -> str:
    """A digest of a jaxpr, the same in all processes."""
    return _Digests().of_jaxpr(jaxpr)


def _digest(*texts: str) -> str:
    return hashlib.blake2b("\0".join(texts).encode(errors="replace"), digest_size=8).hexdigest()


class _Digests:
    """Digests of jaxprs, each computed once."""

    def __init__(self) -> None:
        self._of_jaxpr: dict[int, str] = {}

    def of_jaxpr(self, jaxpr) -> str:
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)  # drop the constants: their values may be on a device
        if id(jaxpr) not in self._of_jaxpr:
            self._of_jaxpr[id(jaxpr)] = self._look_at(jaxpr)
        return self._of_jaxpr[id(jaxpr)]

    def _look_at(self, jaxpr) -> str:
        digests = {}  # variable to the digest of its expression
        for i, var in enumerate((*jaxpr.constvars, *jaxpr.invars)):
            digests[var] = _digest("argument", str(i), str(var.aval.shape), str(var.aval.dtype))

        def of_atom(atom) -> str:
            return _text_of_array(atom.val) if isinstance(atom, Literal) else digests[atom]

        for eqn in jaxpr.eqns:
            inputs = [of_atom(atom) for atom in eqn.invars]
            digest = _digest(eqn.primitive.name, self._text_of(eqn.params), *inputs)
            for i, var in enumerate(eqn.outvars):
                digests[var] = f"{digest}.{i}"
        return _digest(*map(of_atom, jaxpr.outvars))

    def _text_of(self, value) -> str:
        """A parameter as text, as far as processes agree."""
        if value is None or isinstance(value, (bool, int, float, complex, str, bytes, np.dtype, enum.Enum)):
            return repr(value)
        if isinstance(value, dict):
            # Sets and dictionaries may be in any order.
            return "{" + ",".join(sorted(f"{self._text_of(k)}:{self._text_of(v)}" for k, v in value.items())) + "}"
        if isinstance(value, (set, frozenset)):
            return "{" + ",".join(sorted(map(self._text_of, value))) + "}"
        if isinstance(value, (tuple, list)):
            return "(" + ",".join(map(self._text_of, value)) + ")"
        if _compat.is_jaxpr(value):
            return self.of_jaxpr(value)
        if isinstance(value, (np.ndarray, np.generic)):
            return _text_of_array(value)
        if dataclasses.is_dataclass(value):
            fields = [self._text_of(getattr(value, field.name)) for field in dataclasses.fields(value)]
            return f"{type(value).__name__}({','.join(fields)})"
        return type(value).__name__


def _text_of_array(value) -> str:
    if isinstance(value, jax.Array):  # it may be on a device, and not be computed yet
        return f"{value.dtype}{value.shape}"
    array = np.asarray(value)
    content = array.tobytes().hex() if array.nbytes <= _MAX_BYTES and not array.dtype.hasobject else ""
    return f"{array.dtype}{array.shape}{content}"
