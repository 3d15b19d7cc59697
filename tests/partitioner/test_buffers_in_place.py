"""Sums in place, as XLA's buffer assignment has them: the operand's buffer, which no other live value shares."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_mesh
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tiers import full_but

from jax_ring import override_lax

MESH = make_mesh()
WHOLE, ROWS = NamedSharding(MESH, P()), NamedSharding(MESH, P("i"))
VALUE = re.compile(r"^ value: <\d+ (\S+) @\d+> \(size=(\d+),offset=(\d+)\)")
RANGE = re.compile(r"^ {4}(\S+):(\d+)-(\d+)$", re.MULTILINE)
CALL = re.compile(r'%?(\S+) = [^\n]*? custom-call\(([^)]*)\), custom_call_target="jax_ring_all_reduce"([^\n]*)')
ALIAS = re.compile(r"\{(\d*)\}: \((\d+), \{\}\)")


def step(w, v, x):
    def loss(w, v):
        return jnp.mean(jnp.tanh(x @ w) @ v)

    g, h = jax.grad(loss, (0, 1))(w, v)
    return w - 0.1 * g, v - h, x.sum(0) + 1


def read_twice(w, v, x):
    g = x.T @ jnp.tanh(x @ w)
    return lax.with_sharding_constraint(g, WHOLE) + g.sum(), v, (x.sum(0), x.sum(0) * 2)


def reshaped(w, v, x):
    g = (x.T @ (x @ w)).reshape(-1, 4)
    return (g * 2).reshape(w.shape) + w, v + g[:8], jnp.exp(g.T).sum(1)


def in_branches(w, v, x):
    g = x.T @ (x @ w)
    return lax.cond(g.sum() > 0, lambda: w + x.T @ jnp.sin(x @ w), lambda: w - (x.T @ (x @ w)) * 2), v * 2, x.max(0)


def operand_read_twice(w, v, x):
    y = (x @ w).reshape(MESH.size, -1)  # one row on each device
    return x.T @ jnp.sin(x @ w) + w, v + y.sum(), y - y.sum(0)


PROGRAMS = {
    "a step": (step, 3),
    "read twice": (read_twice, 1),
    "reshaped": (reshaped, 1),
    "branches": (in_branches, 1),
    "operand read twice": (operand_read_twice, 1),
}


def key(name: str, index: str = "") -> str:
    """A value as the files name it."""
    return name if "{" in name else f"{name}{{{index}}}"


def chain_of(value: str, text: str) -> list[str]:
    """A value and those of which it is a bitcast."""
    found = re.search(rf"%{re.escape(value)} = \S+ (\S+?)\(%?([\w.-]*)", text)
    assert found
    assert found[1] != "parameter"
    return [value, *(chain_of(found[2], text) if found[1] == "bitcast" else [])]


@pytest.mark.parametrize("donated", [(), (0, 1)], ids=["kept", "donated"])
@pytest.mark.parametrize("name", full_but(PROGRAMS, ["a step"]))
def test_no_live_value_shares_the_buffer(name, donated, tmp_path):
    fun, least = PROGRAMS[name]
    arguments = [jax.ShapeDtypeStruct(shape, np.float32) for shape in ((16, 8), (8, 4), (32, 16))]
    f = jax.jit(fun, in_shardings=(WHOLE, WHOLE, ROWS), out_shardings=WHOLE, donate_argnums=donated)
    with override_lax(partitioner=True):
        dump = {"xla_dump_to": str(tmp_path), "xla_dump_hlo_as_text": True}
        text = f.lower(*arguments).compile(compiler_options=dump).as_text()
    (assigned,), (ranges,) = (
        list(tmp_path.glob(f"*optimizations-{what}.txt")) for what in ("buffer-assignment", "live-range")
    )
    places, allocation, is_shared = {}, "", False
    for line in assigned.read_text().splitlines():
        if line.startswith("allocation"):
            allocation, is_shared = line.split(":")[0], "thread-local" not in line
        elif is_shared and (found := VALUE.match(line)):
            places[key(found[1])] = allocation, int(found[3]), int(found[3]) + int(found[2])
    live = {found[0]: (int(found[1]), int(found[2])) for found in RANGE.findall(ranges.read_text())}
    aliases = [
        (key(result, index), key(operands.replace("%", "").split(", ")[int(operand)]))
        for result, operands, rest in CALL.findall(text)
        for index, operand in ALIAS.findall(rest)
    ]
    assert len(aliases) >= least
    # XLA ends the live range of a buffer where its alias begins, so later readers do not show in it.
    for _, operand in aliases:
        for value in chain_of(operand.partition("{")[0], text):
            assert len(re.findall(rf"%{re.escape(value)}(?![\w.-])", text)) == 2, f"{value} has other readers"
    for result, operand in aliases:
        if operand in places:
            assert places[result] == places[operand]
    assert any(operand in places for _, operand in aliases)
    values = [(each, *places[each], *live[each]) for each in places if each in live]
    assert {result for result, _ in aliases} <= {each for each, *_ in values}
    for (one, *of_one), (other, *of_other) in itertools.combinations(values, 2):
        (a, begin, end, first, last), (b, other_begin, other_end, other_first, other_last) = of_one, of_other
        if a == b and max(begin, other_begin) < min(end, other_end):
            assert max(first, other_first) >= min(last, other_last), f"{one} and {other} share a buffer"
