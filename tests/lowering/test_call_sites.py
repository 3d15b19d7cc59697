"""Each custom call names the source lines that it serves; equal calls merge, whatever their lines."""

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import TARGET, as_printed, make_mesh, sharded
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_ring import override_lax, ring_psum
from jax_ring.lowering.passes import combiner

MESH = make_mesh((4,))
X = np.arange(8, dtype=np.float32)


def lowered(f, *args, **options):
    return sharded(f, mesh=MESH, in_specs=P("i"), out_specs=P("i"), check_vma=False, **options).lower(*args)


def sites_in(text: str) -> list[str]:
    """The attribute of each call, without the name of this file."""
    return [site.replace(f"{as_printed(__file__)}:", "") for site in re.findall(r'\bsite = "([^"]*)"', text)]


def num_compiled(program) -> int:
    """The number of calls that are left. The name alone may also be that of a folder in the table of files."""
    return program.compile().as_text().count(f'custom_call_target="{TARGET}"')


def sites(f, *args) -> list[str]:
    return sites_in(lowered(f, *(args or (X,))).as_text())


def first(x):
    return ring_psum(x, "i")


def second(x):
    return ring_psum(x, "i")


def line(function) -> str:
    """The site of a call in the line after the function's first."""
    return f"{function.__code__.co_firstlineno + 1} ({function.__qualname__})"


EITHER = f"one of 2 places: {line(first)} or {line(second)}"


@pytest.fixture
def apart(monkeypatch):
    """No calls are joined."""
    monkeypatch.setattr(combiner, "COMBINE_THRESHOLD_COUNT", 1)


@pytest.mark.usefixtures("apart")
def test_calls_on_different_operands_name_their_own_line():
    assert sites(lambda x: second(jnp.sin(first(x)))) == [line(first), line(second)]


@pytest.mark.usefixtures("apart")
def test_options_tell_calls_apart():
    def on_others(x):
        return ring_psum(x, "i", axis_index_groups=[[0, 1], [2, 3]])

    assert sites(lambda x: first(x) + on_others(x)) == [line(first), line(on_others)]


@pytest.mark.usefixtures("apart")
def test_constants_tell_calls_apart():
    assert sites(lambda x: first(x * 2) + second(x * 3)) == [line(first), line(second)]


@pytest.mark.usefixtures("apart")
def test_complex_constants_tell_calls_apart():
    assert sites(lambda x: (first(x * 2j) + second(x * 3j)).real) == [line(first), line(second)]
    assert sites(lambda x: (first(x * 2j) + second(x * 2j)).real) == [EITHER, EITHER]


@pytest.mark.usefixtures("apart")
def test_arguments_tell_calls_apart():
    f = jax.shard_map(
        lambda x, y: first(x) + second(y), mesh=MESH, in_specs=(P("i"), P("i")), out_specs=P("i"), check_vma=False
    )
    assert sites_in(jax.jit(f).lower(X, X).as_text()) == [line(first), line(second)]


@pytest.mark.usefixtures("apart")
def test_operands_of_functions_tell_calls_apart():
    def f(x):
        return jax.jit(lambda x: first(x))(x) + jax.jit(lambda x: second(x))(jnp.sin(x))

    assert sites(f) == [line(first), line(second)]


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize(
    "through",
    [
        lambda f, x: jax.jit(lambda x: f(x))(x),
        lambda f, x: lax.fori_loop(0, 3, lambda i, x: f(x), x),
        lambda f, x: lax.cond(x[0] > 0, f, jnp.tan, x),
    ],
    ids=["function", "loop", "branches"],
)
def test_operations_in_functions_loops_and_branches_tell_calls_apart(through):
    assert sites(lambda x: first(through(jnp.sin, x)) + second(through(jnp.cos, x))) == [line(first), line(second)]
    assert sites(lambda x: first(through(jnp.sin, x)) + second(through(jnp.sin, x))) == [EITHER, EITHER]


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize(
    "f",
    [
        lambda x: first(x) + second(x),
        lambda x: first(jnp.sin(x) * 2) + second(jnp.sin(x) * 2),
        lambda x: jax.jit(lambda x: first(x))(x) + jax.jit(lambda x: second(x))(x),
        lambda x: first(jax.jit(jnp.sin)(x)) + second(jax.jit(lambda x: jax.jit(jnp.sin)(x))(x)),
        lambda x: jax.vmap(first)(x) + jax.vmap(second)(x),
    ],
    ids=["operand", "expressions", "functions", "operands_from_functions", "vmap"],
)  # fmt: skip
def test_equal_calls_merge_and_name_all_their_lines(f):
    program = lowered(f, X)
    assert sites_in(program.as_text()) == [EITHER, EITHER]
    assert num_compiled(program) == 1


@pytest.mark.usefixtures("apart")
def test_calls_on_the_results_of_equal_calls_merge():
    def f(x):
        return second(jnp.cos(first(x))) + first(jnp.cos(second(x)))

    program = lowered(f, X)
    assert sites_in(program.as_text()) == [EITHER, f"one of 2 places: {line(second)} or {line(first)}"] * 2
    assert num_compiled(program) == 2


@pytest.mark.usefixtures("apart")
def test_branches_and_loops_tell_calls_apart():
    def f(x):
        x = lax.cond(x[0] > 0, first, second, x)
        x = lax.while_loop(lambda x: x[0] > 0, first, x)
        return lax.while_loop(lambda x: x[0] > 1, second, x)

    # JAX lowers the branch for False first.
    assert sites(f) == [line(second), line(first), line(first), line(second)]


@pytest.mark.usefixtures("apart")
def test_a_line_is_named_once():
    assert sites(lambda x: [x := first(jnp.sin(x)) for _ in range(3)][-1]) == [line(first)] * 3
    assert sites(lambda x: first(x) + first(x)) == [line(first)] * 2


def functions_on_lines(number: int) -> list:
    """Functions that call ring_psum, each on its own line: f0 on line 1, f1 on line 2, ..."""
    names: dict = {"ring_psum": ring_psum}
    source = "\n".join(f"def f{i}(x): return ring_psum(x, 'i')" for i in range(number))
    exec(compile(source, "layers.py", "exec"), names)
    return [names[f"f{i}"] for i in range(number)]


@pytest.mark.usefixtures("apart")
def test_each_layer_of_a_deep_model_names_its_own_line():
    layers = functions_on_lines(60)

    def model(x):
        for layer in layers:
            x = jnp.tanh(layer(x))
        return x

    assert sites(model) == [f"layers.py:{i + 1} (f{i})" for i in range(60)]


@pytest.mark.usefixtures("apart")
def test_many_equal_calls_name_some_lines_and_merge():
    layers = functions_on_lines(20)
    program = lowered(lambda x: sum(layer(x) for layer in layers), X)
    found = set(sites_in(program.as_text()))
    assert found == {"one of more than 16 places, such as " + ", ".join(f"layers.py:{i + 1} (f{i})" for i in range(16))}
    assert num_compiled(program) == 1


# Calls that are joined.


def lax_first(x):
    return lax.psum(x, "i")


def lax_second(x):
    return lax.psum(x, "i")


BOTH = f"{line(lax_first)} and {line(lax_second)}"


@pytest.mark.parametrize(
    ("f", "expected"),
    [
        (lambda x: lax_second(jnp.sin(lax_first(x))), [line(lax_first), line(lax_second)]),
        (lambda x: lax_first({"a": x, "b": x * 2, "c": x * 3})["b"], [line(lax_first)]),
        (lambda x: lax_first(x) + lax_second(x * 2), [BOTH]),
        (lambda x: lax_first(x * 2) + (lax_second(x * 3) + lax_first(x)), [BOTH]),
        (lambda x: (lax_first(x.astype(jnp.int4)) + lax_second(x.astype(jnp.int4) * 2)).astype(x.dtype), [BOTH]),
    ],
    ids=["alone", "tree", "two", "three", "converted"],
)
def test_a_combined_call_names_all_its_lines(f, expected):
    with override_lax():
        assert sites(f) == expected


def test_joined_calls_of_the_functions_name_all_their_lines():
    assert sites(lambda x: first(x) + second(x * 2)) == [f"{line(first)} and {line(second)}"]
    assert sites(lambda x: first(x) + second(x)) == [f"{line(first)} and {line(second)}"]
    assert sites(lambda x: first(x) + first(x * 2)) == [line(first)]


def test_a_joined_call_of_many_lines_names_some():
    layers = functions_on_lines(6)
    (site,) = sites(lambda x: sum(layer(x * k) for k, layer in enumerate(layers)))
    assert site == ", ".join(f"layers.py:{i + 1} (f{i})" for i in range(4)) + " and 2 more places"


def test_combined_calls_are_told_apart():
    def f(x):
        y = jnp.sin(lax_first(x) + lax_second(x * 2))
        return lax_second(y) + lax_first(y * 2)

    with override_lax():
        assert sites(f) == [BOTH, f"{line(lax_second)} and {line(lax_first)}"]


# Keys of caches.


def program(source: str, file_name: str = "program.py") -> str:
    """A program without its locations, as in the key of the persistent compilation cache."""
    names: dict = {"ring_psum": ring_psum}
    exec(compile(source, file_name, "exec"), names)
    return lowered(names["f"], X).as_text()


def test_columns_are_no_part_of_the_program():
    here = program("def f(x): return ring_psum(x, 'i')")
    assert program("def f(x):      return (ring_psum(x, 'i'))") == here
    assert program("\ndef f(x): return ring_psum(x, 'i')") != here


def test_file_names_can_be_shortened():
    source = "def f(x): return ring_psum(x, 'i')"
    with source_file_pattern("/home/.*/"):
        assert program(source, "/home/one/program.py") == program(source, "/home/two/program.py")
    assert 'site = "/home/one/program.py:1 (f)"' in program(source, "/home/one/program.py")


@contextlib.contextmanager
def source_file_pattern(pattern: str):
    jax.config.update("jax_hlo_source_file_canonicalization_regex", pattern)
    try:
        yield
    finally:
        jax.config.update("jax_hlo_source_file_canonicalization_regex", None)
