"""A missing rank: the call times out with an error that names the rank, and the process continues."""

import jax
import pytest
from helpers import run_python
from tiers import full_but

pytestmark = pytest.mark.one_pair  # native code

PROGRAM = """
import time
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P
from jax_ring import ring_psum

mesh = Mesh(jax.devices(), ("data",))

def mapped(f):
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False))

def skipped_by(absent, **options):
    def f(x):
        def call(x):
            return ring_psum(x, "data", **options)
        return lax.cond(jnp.isin(lax.axis_index("data"), jnp.array(absent)), lambda x: x, call, x)
    return mapped(f)

def error_of(f, x):
    began = time.monotonic()
    try:
        jax.block_until_ready(f(x))
    except jax.errors.JaxRuntimeError as error:
        return str(error), time.monotonic() - began
    raise AssertionError("no error")

x = jnp.arange(8 * 6.0).reshape(16, 3)
healthy = mapped(lambda x: ring_psum(x, "data"))
def check_health():
    expected = np.tile(np.asarray(x).reshape(8, 2, 3).sum(0), (8, 1))
    np.testing.assert_array_equal(healthy(x), expected)
check_health()
"""


def run(body: str, **environment) -> str:
    result = run_python(PROGRAM + body, **{"JAX_RING_TIMEOUT_S": "1.5", **environment})
    assert result.returncode == 0, result.stderr
    return result.stderr


def test_names_axis_message_missing_rank_and_call_site():
    run("""
text, seconds = error_of(skipped_by([3]), x)
assert text.startswith("DEADLINE_EXCEEDED: ring_psum of float32[2,3] over axis 'data', called at <string>:"), text
assert "7 of 8 ranks arrived within 1.5 s" in text
assert "Missing: rank 3 (mesh position 3)" in text
assert "(skipped_by.<locals>.f.<locals>.call)" in text
assert "waits in" not in text
assert "JAX_RING_TIMEOUT_S" in text
assert seconds >= 1.5, seconds
check_health()
""")


@pytest.mark.full
def test_the_failure_as_fields():
    run("""
import jax_ring, re
failures = []
for absent in ([3], [0, 5]):
    text, _ = error_of(skipped_by(absent), x)
    number = int(re.search(r" \\[failure (\\d+)\\]$", text)[1])
    failure = jax_ring.runtime.failure(number)
    assert failure == jax_ring.runtime.failure_of(text), failure
    assert failure[:6] == (number, "DEADLINE_EXCEEDED", "deadline", None, absent[0], ""), failure
    assert text == f"DEADLINE_EXCEEDED: {failure.text} [failure {number}]", (text, failure.text)
    failures.append(failure)
assert failures[0].number < failures[1].number
for unknown in (0, -1, 10**6):
    try:
        jax_ring.runtime.failure(unknown)
    except ValueError as error:
        assert f"knows no failure {unknown}. It keeps the last 256" in str(error), error
    else:
        raise AssertionError(unknown)
assert jax_ring.runtime.failure_of(f"no number: {failures[0].text}") is None
assert jax_ring.runtime.failure_of("not kept [failure 1000000]") is None
""")


LAYERS = r"""
import re
from jax_ring import ring_pmax

def model(file_name, **layers):
    # Layers with equal calls, each on its own line of a file.
    names = dict(globals())
    layers = {f"f{i}": layers.get(f"f{i}", "ring_psum(x, 'data')") for i in range(60)}
    source = "\n".join(f"def {name}(x): return jnp.tanh({call})" for name, call in layers.items())
    exec(compile(source, file_name, "exec"), names)
    def f(x):
        for name in layers:
            x = names[name](x)
        return x
    return mapped(f)
"""


def test_names_the_line_of_the_call_at_fault_and_what_the_missing_ranks_do_instead():
    run(
        LAYERS
        + r"""
jax.block_until_ready(model("before.py")(x))
text, _ = error_of(model("now.py", f40="lax.cond(jnp.isin(lax.axis_index('data'), jnp.array([3, 5])),"
                                       "lambda x: ring_pmax(x, 'data'), lambda x: x, x)"), x)
of_most = "ring_psum of float32[2,3] over axis 'data', called at now.py:42 (f41)"
of_two = "ring_pmax of float32[2,3] over axis 'data', called at now.py:41 (f40.<locals>.<lambda>)"
assert "before.py" not in text
assert len(re.findall(r"now.py:\d+", text)) == 2
# It is an error of one of the ranks.
if text.startswith(f"DEADLINE_EXCEEDED: {of_most}: 6 of 8 ranks arrived"):
    assert f"Ranks 3, 5 wait in another call: {of_two}." in text
else:
    assert text.startswith(f"DEADLINE_EXCEEDED: {of_two}: 2 of 8 ranks arrived"), text
    assert f"Ranks 0, 1, 2, 4, 6, 7 wait in another call: {of_most}." in text
check_health()
"""
    )


@pytest.mark.full
def test_names_all_missing_ranks():
    run("""
text, _ = error_of(skipped_by([0, 2, 7]), x)
assert "5 of 8 ranks" in text
assert "Missing: ranks 0 (mesh position 0), 2 (mesh position 2), 7 (mesh position 7)" in text
check_health()
""")


@pytest.mark.full
def test_names_the_group_and_the_rank_within_it():
    run("""
text, _ = error_of(skipped_by([6], axis_index_groups=[[0, 1, 2], [7, 6, 5, 4, 3]]), x)
assert "in groups [[0, 1, 2], [7, 6, 5, 4, 3]]" in text
assert "4 of 5 ranks" in text
assert "rank 1 (mesh position 6) of the group of mesh positions [7, 6, 5, 4, 3]" in text
check_health()
""")


@pytest.mark.full
def test_ranks_of_a_failed_call_do_not_wait_again():
    # Rank 3 skips the first call, and waits in the second one for ranks that have failed. It must not wait for a second
    # deadline. The deadline is long compared with the delays of a busy machine.
    run(
        """
skip = skipped_by([3])
def f(x):
    def call(x):
        return ring_psum(x, "data")
    x = lax.cond(lax.axis_index("data") == 3, lambda x: x, call, x)
    for _ in range(20):
        x = ring_psum(x * 0.1, "data")
    return x
text, seconds = error_of(mapped(f).lower(x).compile(), x)
assert "Missing: rank" in text
assert seconds < 2 * 6, seconds
check_health()
""",
        JAX_RING_TIMEOUT_S="6",
    )


@pytest.mark.full
def test_what_is_in_flight_fails_with_the_call_that_it_waits_behind():
    run(
        """
def f(x, absent):
    # A call that all ranks make, and one that some may leave out.
    x = ring_psum(x, "data")
    return lax.cond(lax.axis_index("data") == absent[0], lambda x: x, lambda x: ring_psum(x, "data"), x)
f = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"), check_vma=False))
all_there, without_3 = jnp.array([-1]), jnp.array([3])
expected = np.asarray(f(x, all_there))
for _ in range(2):
    f(x, without_3)  # dropped
    behind = f(x, all_there)
    beside = healthy(x)  # of another program
    text, _ = error_of(lambda _: behind, x)
    assert text.startswith("DEADLINE_EXCEEDED: In flight when an earlier execution of this program failed: "), text
    assert "Missing: rank 3" in text, text
    np.testing.assert_array_equal(f(x, all_there), expected)  # a new attempt
    np.testing.assert_array_equal(beside, np.tile(np.asarray(x).reshape(8, 2, 3).sum(0), (8, 1)))
""",
        JAX_RING_TIMEOUT_S="3",
    )


@pytest.mark.full
def test_other_programs_are_not_disturbed():
    # While one program waits for its deadline, another one on the same devices completes.
    run("""
import threading
errors = []
waiting = threading.Thread(target=lambda: errors.append(error_of(skipped_by([1]), x)))
waiting.start()
elsewhere = Mesh(jax.devices(), ("data",))
for _ in range(50):
    check_health()
waiting.join(60)
assert len(errors) == 1
check_health()
""")


@pytest.mark.full
def test_repeated_failures():
    run(
        """
from jax_ring import _ffi_cpu
f = skipped_by([5])
for _ in range(8):
    _ffi_cpu.set_deadline(0.2)
    text, _ = error_of(f, x)
    assert "5 (mesh position 5)" in text  # on a busy machine others may be late as well
    _ffi_cpu.set_deadline(60)
    check_health()
"""
    )


@pytest.mark.parametrize("kind", full_but(["pure_callback", "io_callback", "in a scan"], ["io_callback"]))
def test_a_callback_that_raises_on_one_rank(kind):
    errors = run(f"""
from jax.experimental import io_callback
kind = {kind!r}

def host(rank, x):
    if rank == 3:
        raise ValueError("bad batch")
    return x

def total(x):
    like, rank = jax.ShapeDtypeStruct(x.shape, x.dtype), lax.axis_index("data")
    callback = io_callback if kind == "io_callback" else jax.pure_callback
    return ring_psum(callback(host, like, rank, x), "data")

def step(x, _):
    return total(x), None

f = mapped(lambda x: lax.scan(step, x, None, length=3)[0]) if kind == "in a scan" else mapped(total)
text, _ = error_of(f, x)
assert "bad batch" in text, text
check_health()
import os
os._exit(0)  # JAX raises the callback's exception once more
""")
    assert "Missing: rank 3 (mesh position 3)" in errors
    assert "if a callback has raised there" in errors


@pytest.mark.full
@pytest.mark.parametrize("threads", [8, 15, 16])
def test_names_the_threads_that_launches_may_hold(threads):
    # Newer JAX keeps no thread for a launch that waits.
    advised = threads < 16 and jax.__version_info__ < (0, 12)
    run(
        f"""
text, _ = error_of(skipped_by([3]), x)
advice = "await one now and then (jax.block_until_ready), or set NPROC=16 in the environment before JAX is imported."
assert (advice in text) == {advised}, text
""",
        NPROC=str(threads),
    )


@pytest.mark.full
@pytest.mark.parametrize("text", ["0", "-1", "soon", "inf", "nan", ""])
def test_a_deadline_must_be_a_positive_number(text):
    result = run_python("import jax_ring", JAX_RING_TIMEOUT_S=text)
    assert result.returncode != 0
    assert f"JAX_RING_TIMEOUT_S must be a positive number of seconds, got {text!r}" in result.stderr


@pytest.mark.full
def test_default_deadline():
    result = run_python("import jax_ring._ffi_cpu as engine; print(engine.deadline())")
    assert result.stdout.strip() == "60.0", result.stderr
