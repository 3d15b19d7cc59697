"""override_lax(partitioner=...): which programs it reaches, what stays XLA's and why, and that nothing mixes."""

import contextlib
import functools
import logging
import os
import re
import subprocess
import sys
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits, make_mesh, run_python
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ring
from jax_ring import _compat, override_lax, runtime
from jax_ring.lowering import topology
from jax_ring.lowering.hlo import collectives, hook, proto
from jax_ring.lowering.hlo.proto import Message, integer

MESH = make_mesh()
ROWS, WHOLE = NamedSharding(MESH, P("i")), NamedSharding(MESH, P())
X = np.arange(16, dtype=np.float32).reshape(8, 2)
# The name alone may also be that of a folder in the table of files.
BY_ENGINE = 'custom_call_target="jax_ring_all_reduce"'


def column_sums(x):
    return (x * 2).sum(0)


def compiled(fun=column_sums, x=X, **options) -> str:
    @functools.wraps(fun)
    def fun_of_its_own(*args):  # JAX has not compiled it before
        return fun(*args)

    return (
        jax.jit(fun_of_its_own, in_shardings=ROWS, **{"out_shardings": WHOLE, **options}).lower(x).compile().as_text()
    )


def is_engines(text: str) -> bool:
    engine, xla = BY_ENGINE in text, " all-reduce(" in text
    assert engine != xla
    return engine


@pytest.mark.parametrize(("partitioner", "expected"), [(None, True), (True, True), (False, False)])
def test_the_setting(partitioner, expected):
    with override_lax(partitioner=partitioner):
        assert is_engines(compiled()) == expected
    assert not is_engines(compiled())


def test_programs_that_are_only_lowered_for_gpus():
    """Without JAX's plugin for GPUs nothing compiles them here."""
    traced = jax.jit(column_sums, in_shardings=ROWS, out_shardings=WHOLE).trace(X)
    with override_lax():
        assert "jax_ring.partitioner" not in traced.lower(lowering_platforms=("cuda",)).as_text()
        assert "jax_ring.partitioner" in traced.lower(lowering_platforms=("cpu",)).as_text()


def test_the_last_override_counts():
    with override_lax(partitioner=False):
        outer = override_lax()
        assert is_engines(compiled())
        inner = override_lax(partitioner=False)
        assert not is_engines(compiled())
        outer.close()
        assert not is_engines(compiled())
        inner.close()
        assert not is_engines(compiled())


@pytest.mark.parametrize("value", [1, "auto", []])
def test_other_values(value):
    with pytest.raises(
        TypeError, match=re.escape(f"override_lax: partitioner must be None, True or False, got {value!r}")
    ):
        override_lax(partitioner=value)


def test_programs_never_mix():
    f = jax.jit(column_sums, in_shardings=ROWS, out_shardings=WHOLE)
    for _ in range(2):
        for partitioner in (None, False):
            with override_lax(partitioner=partitioner):
                assert is_engines(f.lower(X).compile().as_text()) == (partitioner is None)
                assert_same_bits(f(X), column_sums(X))
        assert not is_engines(f.lower(X).compile().as_text())
        jax.clear_caches()


def test_a_thread_has_its_own():
    found = {}

    def run(i):
        with override_lax() if i % 2 else contextlib.nullcontext():
            found[i] = is_engines(compiled(lambda x: column_sums(x) + i))

    threads = [threading.Thread(target=run, args=[i]) for i in range(6)]
    with override_lax():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == {i: bool(i % 2) for i in range(6)}


def test_programs_of_one_device_are_as_before():
    def text():
        return jax.jit(column_sums).lower(jnp.ones((8, 2))).as_text()

    before = text()
    with override_lax():
        assert text() == before


def test_donation(caplog):
    caplog.set_level(logging.INFO, "jax_ring")
    options = {"donate_argnums": 0, "out_shardings": ROWS}

    def f(x):
        return x - x.sum(0)

    with override_lax():
        text = compiled(f, **options)
    with override_lax(partitioner=True):
        changed = compiled(f, **options)
    assert is_engines(changed)
    if _compat.CHANGED_HLO_LOSES_ALIASES:
        assert not is_engines(text)
        assert "input_output_alias" in text
        assert "input_output_alias" not in changed
        assert "each collective of jit_f is left to XLA: it donates buffers" in caplog.text
    else:
        assert is_engines(text)
        assert "input_output_alias" in text
        assert "input_output_alias" in changed


def test_results_in_host_memory(caplog):
    """JAX forgets where they are if the program is changed, and raises or returns them in device memory."""
    host = NamedSharding(MESH, P("i"), memory_kind="pinned_host")
    x, x_on_host = jax.device_put(X, ROWS), jax.device_put(X, host)
    cases = [
        (jax.jit(lambda x: (x.sum(), x - x.mean(0)), out_shardings=(WHOLE, host)), x),
        (jax.jit(lambda x: (x.sum(), jax.device_put(x - x.mean(0), host))), x),
        (jax.jit(lambda x: (x.sum(), x - x.mean(0))), x_on_host),
    ]
    for f, arg in cases:
        with override_lax(partitioner=True), caplog.at_level(logging.INFO, logger="jax_ring"):
            _, result = f(arg)
        assert result.sharding.memory_kind == "pinned_host"
        assert_same_bits(result, X - X.mean(0))
    assert len(re.findall("a result is not in the device's own memory", caplog.text)) == len(cases)


def test_what_stays_xlas_is_logged(caplog):
    caplog.set_level(logging.INFO, "jax_ring")
    with override_lax():
        assert " all-reduce(" in compiled(lambda x: x.prod(0))
    (record,) = [record for record in caplog.records if "left to XLA" in record.message]
    assert record.message.endswith(" is left to XLA: the engine does not reduce float32 by 'multiply'")


def test_strict(monkeypatch):
    monkeypatch.setattr(runtime, "STRICT", True)
    with override_lax():
        assert is_engines(compiled())
        with pytest.raises(jax.errors.JaxRuntimeError, match="JAX_RING_STRICT=1 forbids it"):
            compiled(lambda x: x.prod(0))


def test_all_else_stays_as_it_was(monkeypatch):
    programs = []

    def transform(platform, program, transform=hook.transform):
        if (changed := transform(platform, program)) is not None:
            programs.append((Message.parse(program), Message.parse(changed)))
        return changed

    monkeypatch.setattr(hook, "transform", transform)
    with override_lax():
        assert is_engines(compiled(lambda x: jax.lax.cond(x[0, 0] > 0, lambda x: jnp.sort(x, 0), jnp.sin, x).sum(0)))
    ((before, after),) = programs
    assert before.without(proto.COMPUTATIONS) == after.without(proto.COMPUTATIONS)
    bodies = {body.integer(proto.COMPUTATION_ID): body for body in after.messages(proto.COMPUTATIONS)}
    num_replaced = 0
    for body in before.messages(proto.COMPUTATIONS):
        other = bodies.pop(body.integer(proto.COMPUTATION_ID))
        assert body.without(proto.INSTRUCTIONS) == other.without(proto.INSTRUCTIONS)
        now = {each.integer(proto.ID): each for each in other.messages(proto.INSTRUCTIONS)}
        for each in body.messages(proto.INSTRUCTIONS):
            is_replaced = collectives.is_collective(each.text(proto.OPCODE))
            num_replaced += is_replaced
            assert is_replaced or each.to_bytes() == now[each.integer(proto.ID)].to_bytes()
    assert num_replaced > 1
    assert not bodies


def test_unknown_fields_leave_a_collective_to_xla(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "jax_ring")
    instructions = Message.messages

    def with_a_new_field(self, number):
        found = instructions(self, number)
        for each in found if number == proto.INSTRUCTIONS else []:
            if each.raw(2) == b"all-reduce":
                each.fields.append(integer(1234, 1))
        return found

    monkeypatch.setattr(Message, "messages", with_a_new_field)
    with override_lax():
        assert not is_engines(compiled())
    assert "is left to XLA: it has the unknown fields [1234]" in caplog.text


def test_a_failure_leaves_the_program_to_xla(monkeypatch):
    def fail(*arguments):
        raise KeyError("a program of another kind")

    monkeypatch.setattr(hook, "_devices_of", fail)
    with override_lax(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert not is_engines(compiled())
    assert "jax_ring leaves the collectives of jit_column_sums to XLA" in str(caught[-1].message)
    assert "KeyError: 'a program of another kind'" in str(caught[-1].message)
    monkeypatch.setattr(runtime, "STRICT", True)
    with override_lax(), pytest.raises(jax.errors.JaxRuntimeError, match="a program of another kind"):
        compiled(lambda x: column_sums(x) + 1)


def test_a_process_that_does_not_say_where_it_is_is_an_error(monkeypatch):
    """Other processes may know, replace the collectives, and wait for this one."""

    def fail(*arguments):
        raise RuntimeError("process 1 did not publish its host")

    monkeypatch.setattr(topology, "levels_of", fail)
    with override_lax(), pytest.raises(jax.errors.JaxRuntimeError, match="process 1 did not publish its host"):
        compiled()


def test_exported_programs_are_those_of_their_callers():
    def export():
        return jax.export.export(jax.jit(column_sums, in_shardings=ROWS, out_shardings=WHOLE))(X)

    plain = export()
    with override_lax():
        exported = export()
        assert "custom_call @jax_ring" not in exported.mlir_module()  # locations have the names of folders
        assert is_engines(compiled(plain.call))
    assert not is_engines(compiled(exported.call))


def test_pmap():
    mapped = jax.pmap(lambda x: jax.lax.psum(x, "i"), axis_name="i")
    expected = mapped(X)
    with override_lax():
        assert_same_bits(mapped(X), expected)


@pytest.mark.jax_processes(1, devices=8)  # the recorder names a limited number of a process's calls
def test_errors_and_the_record_name_the_users_line():
    line = column_sums.__code__.co_firstlineno + 1
    with override_lax():
        text = compiled()
        jax.block_until_ready(jax.jit(column_sums, in_shardings=ROWS, out_shardings=WHOLE)(X))
        found = jax_ring.explain(jax.jit(column_sums, in_shardings=ROWS, out_shardings=WHOLE), X)
    assert re.search(rf'site = "[^"]*{re.escape(__file__.rpartition("/")[2])}:{line} \(column_sums\)"', text)
    assert 'call = "all-reduce of float32[2] over channel 1 of XLA\'s partitioner"' in text
    (instruction,) = found.instructions
    assert (instruction.name, instruction.num_bytes, instruction.group_sizes) == ("jax_ring_all_reduce", 8, (8,))
    last = jax_ring.flight_recorder().calls[-1]
    assert "all-reduce of float32[2] over channel 1" in last.call


CACHED = """
import jax, numpy as np, jax_ring, sys
from jax.sharding import NamedSharding, PartitionSpec as P
jax.config.update("jax_compilation_cache_dir", {folder!r})
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
mesh = jax.make_mesh((8,), ("i",))
f = jax.jit(lambda x: (x * 2).sum(0), out_shardings=NamedSharding(mesh, P()))
x = jax.device_put(np.ones((8, 2), np.float32), NamedSharding(mesh, P("i")))
print('custom_call_target="jax_ring_all_reduce"' in f.lower(x).compile().as_text())
with jax_ring.override_lax():
    lowered, products = f.lower(x), jax.jit(lambda x: x.prod(0) + x.sum(0), out_shardings=NamedSharding(mesh, P()))
print('custom_call_target="jax_ring_all_reduce"' in lowered.compile().as_text())
with jax_ring.override_lax():
    print('custom_call_target="jax_ring_all_reduce"' in f.lower(x).compile().as_text(), *f(x))
    try:
        print('custom_call_target="jax_ring_all_reduce"' in products.lower(x).compile().as_text())
    except jax.errors.JaxRuntimeError as error:
        print("forbids" in str(error) and "forbidden")
"""


@pytest.mark.full
def test_the_persistent_cache(tmp_path):
    """A program is lowered and compiled under the override, or only lowered, or neither."""
    for strict, of_products in (("", "True"), ("", "True"), ("1", "forbidden")):
        result = run_python(CACHED.format(folder=str(tmp_path)), JAX_RING_STRICT=strict)
        assert result.stdout.split() == ["False", "True", "True", "16.0", "16.0", of_products], result.stderr
    # Each once without the override, with it, and with it and JAX_RING_STRICT=1, where the products cannot be compiled.
    assert len(list(tmp_path.glob("jit__lambda*-cache"))) == 4


UNCHANGED = """
import importlib.util, sys, threading
importlib.util.find_spec("jax")  # as packages do that can use JAX
assert "jax" not in sys.modules and "jax_ring" not in sys.modules
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
print("jax_ring" in sys.modules, *sys.argv[1:], sys.flags.optimize)
mesh = jax.make_mesh((8,), ("i",))
def run():
    f = jax.jit(lambda x: (x * 2).sum(0), out_shardings=NamedSharding(mesh, P()))
    x = jax.device_put(np.ones((8, 2), np.float32), NamedSharding(mesh, P("i")))
    print('custom_call_target="jax_ring_all_reduce"' in f.lower(x).compile().as_text())
run()
thread = threading.Thread(target=run)
thread.start()
thread.join()
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("expected", "command"),
    [
        (True, ["-O", "-m", "jax_ring", "run", "unchanged.py"]),
        (True, ["-O", "-m", "jax_ring", "run", "-m", "unchanged"]),
        (True, ["-m", "jax_ring.launch", "-n", "1", "--devices", "8", "unchanged.py"]),
        (False, ["unchanged.py"]),
    ],
)
def test_a_program_that_is_not_edited(expected, command, tmp_path):
    (tmp_path / "unchanged.py").write_text(UNCHANGED)
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    if "jax_ring.launch" in command:
        environment["JAX_RING_OVERRIDE"] = "1"
    result = subprocess.run(
        [sys.executable, *command, "--epochs", "3"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    words = result.stdout.replace("[0] ", "").split()  # as the launcher begins lines
    assert words == [str(expected), "--epochs", "3", str(int("-O" in command)), str(expected), str(expected)]


@pytest.mark.full
def test_the_variable_is_checked():
    result = run_python("import jax_ring", JAX_RING_OVERRIDE="yes")
    assert "JAX_RING_OVERRIDE must be 1 (override_lax() in all threads) or 0, got 'yes'" in result.stderr
