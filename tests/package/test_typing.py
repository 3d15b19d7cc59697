"""What a type checker finds in a user's program, and the errors at run time for the same mistakes."""

import inspect
import os
import pathlib
import re
import subprocess
import sys
import sysconfig

import jax.numpy as jnp
import pytest
from gradient_functions import CALLS, loss

import jax_ring
from jax_ring import zero

pytestmark = pytest.mark.one_pair  # does not depend on JAX's version

PROGRAM = pathlib.Path(__file__).with_name("typing_of_calls.py")


@pytest.mark.full
@pytest.mark.timeout(600)  # without its cache mypy reads all of JAX
def test_mypy_finds_the_mistakes_and_nothing_else(tmp_path):
    options = tmp_path / "mypy.ini"
    options.write_text("[mypy]\nignore_missing_imports = True\nfollow_imports = silent\n")
    # mypy does not follow the import hook of an editable installation, and finds a wheel by itself.
    parent = str(pathlib.Path(jax_ring.__file__).parent.parent)
    environment = os.environ | ({} if parent == sysconfig.get_path("platlib") else {"MYPYPATH": parent})
    result = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-color-output", "--config-file", options, "--cache-dir", tmp_path, PROGRAM],
        env=environment,
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    found = set(re.findall(rf"{PROGRAM.name}:(\d+): error: .*\[([\w-]+)\]", result.stdout))
    expected = {
        (str(number), code)
        for number, line in enumerate(PROGRAM.read_text().splitlines(), 1)
        if "# refused: " in line
        for code in line.partition("# refused: ")[2].split(", ")
    }
    assert len(expected) > 10
    assert found == expected, result.stdout + result.stderr


@pytest.mark.parametrize("function", CALLS)
def test_a_wrong_option_is_reported_by_the_public_function(function):
    # reduce_in_backward looks at its axis first, as it must be called where that is bound.
    call = CALLS[function]
    if function == "reduce_in_backward":
        import jax

        call = lambda **options: jax.vmap(  # noqa: E731
            lambda x: jax_ring.reduce_in_backward(x, "i", **options), axis_name="i"
        )(jnp.ones(2))
    with pytest.raises(TypeError, match=rf"^{function}\(\) got an unexpected keyword argument 'bucket_byte'"):
        call(bucket_byte=1)
    with pytest.raises(
        ValueError, match=rf"^{function}: order must be one of 'rank', 'ring', 'any', 'tree'; got 'nccl'"
    ):
        call(order="nccl")
    with pytest.raises(TypeError, match=rf"^{function}: wire must be a floating-point dtype or 'int8', got 'int16'"):
        call(wire="int16")
    with pytest.raises(TypeError, match=rf"^{function}: bucket_bytes must be a whole number of bytes, got '3'"):
        call(bucket_bytes="3")
    with pytest.raises(ValueError, match=rf"^{function}: first_bucket_bytes must be positive, got 0"):
        call(first_bucket_bytes=0)


def test_a_similar_option_is_suggested():
    with pytest.raises(TypeError, match="Did you mean 'bucket_bytes'"):
        jax_ring.value_and_grad(loss, "i", bucket_byte=1)
    with pytest.raises(TypeError, match="The options are bucket_bytes, first_bucket_bytes, wire, key, overlap, order"):
        jax_ring.value_and_grad(loss, "i", lr=1)


def test_every_public_function_is_annotated():
    for name in jax_ring.__all__:
        value = getattr(jax_ring, name)
        functions = [value] if inspect.isfunction(value) else []
        if value is zero:
            functions = [zero.sharded_optimizer, zero.clip_by_global_norm]
        for function in functions:
            signature = inspect.signature(function)
            missing = [p.name for p in signature.parameters.values() if p.annotation is inspect.Parameter.empty]
            assert not missing, f"{name}: {missing}"
            assert signature.return_annotation is not inspect.Signature.empty, name
