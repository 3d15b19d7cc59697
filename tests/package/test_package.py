"""The installed package: the handler runs, the type stubs match, and unsupported versions of JAX raise ImportError."""

import ast
import importlib
import importlib.metadata
import importlib.resources
import inspect
import platform
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import TARGET, compiled_text, make_mesh, run_python, sharded
from jax import lax
from jax.sharding import PartitionSpec as P
from nanobind.stubgen import StubGen

import jax_ring
from jax_ring import ring_psum, runtime


def test_the_handler_runs():
    # XLA checks the API version and the types of a handler only when a program first uses it.
    f = sharded(lambda x: ring_psum(x, "i"), out_specs=P())
    x = jnp.arange(16.0)
    text = compiled_text(f, x)
    assert f'custom_call_target="{TARGET}"' in text
    assert "all-reduce" not in text
    np.testing.assert_array_equal(f(x), np.arange(16.0).reshape(8, 2).sum(0))


def test_public_names():
    assert jax_ring.__version__ == importlib.metadata.version("jax-ring")
    ours, theirs = (list(inspect.signature(f).parameters.values()) for f in (ring_psum, lax.psum))
    own = ours[len(theirs) :]
    assert [(p.name, p.kind, p.default) for p in ours[: len(theirs)]] == [(p.name, p.kind, p.default) for p in theirs]
    assert [(p.name, p.kind, p.default) for p in own] == [
        ("algorithm", inspect.Parameter.KEYWORD_ONLY, "auto"),
        ("order", inspect.Parameter.KEYWORD_ONLY, "rank"),
        ("num_shards", inspect.Parameter.KEYWORD_ONLY, None),
    ]


@pytest.mark.parametrize("package", ["jax_ring", "pytest_jax_ring"])
def test_typing_files_are_installed(package):
    assert importlib.resources.files(package).joinpath("py.typed").is_file()


def signatures(stub):
    """The functions of a stub file, by name. How it imports the types depends on the version of Python."""
    functions = [node for node in ast.parse(stub).body if isinstance(node, ast.FunctionDef)]
    return {node.name: ast.unparse(node).replace("types.CapsuleType", "CapsuleType") for node in functions}


@pytest.mark.parametrize("name", ["_ffi_cpu", "_ffi_cuda", "_cuda_kernels"])
def test_stubs_are_those_of_the_modules(name):
    if name == "_cuda_kernels" and runtime.cuda_kernels is None:
        pytest.skip(runtime.why_no_cuda)
    stubs = StubGen(importlib.import_module(f"jax_ring.{name}"), include_docstrings=False)
    stubs.put(stubs.module)
    stub = importlib.resources.files("jax_ring").joinpath(f"{name}.pyi").read_text()
    assert signatures(stub) == signatures(stubs.get())
    assert signatures(stub)


def test_import_does_not_start_a_backend():
    # Otherwise the number of devices could not be set after the import.
    result = run_python(
        "import jax_ring\nimport jax\njax.config.update('jax_num_cpu_devices', 3)\nprint(len(jax.devices()))"
    )
    assert result.stdout.strip() == "3", result.stderr


def test_import_loads_what_communication_needs():
    result = run_python(
        "import sys, jax_ring\n"
        "later = ('elastic', 'inspect', 'schedule', 'zero', 'training.zero.sharded_optimizer')\n"
        "print([name for name in later if f'jax_ring.{name}' in sys.modules])\n"
        "print(jax_ring.explain.__name__, jax_ring.zero.__name__, jax_ring.elastic.run.__name__)\n"
        "jax_ring.ring_sum"
    )
    assert result.stdout.splitlines() == ["[]", "explain jax_ring.zero run"], result.stderr
    assert "AttributeError: module 'jax_ring' has no attribute 'ring_sum'" in result.stderr


def test_an_old_jax_is_refused():
    result = run_python("jax.__version_info__ = (0, 9, 1); jax.__version__ = '0.9.1'\nimport jax_ring")
    assert "ImportError: jax_ring needs JAX 0.10.2 or newer, found 0.9.1" in result.stderr
    assert "pip install --upgrade jax" in result.stderr


def test_an_unknown_jax_is_refused():
    result = run_python("import jax._src.lax.parallel as p\ndel p._maybe_skip_one_sized_axes\nimport jax_ring")
    assert "ImportError: jax_ring does not support JAX" in result.stderr
    assert "_maybe_skip_one_sized_axes" in result.stderr


def test_a_python_without_jax_is_reported():
    code = "import sys; sys.modules['jax'] = None; import jax_ring"
    result = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert f"ImportError: jax_ring needs JAX, which this Python ({sys.executable}) does not have" in result.stderr


@pytest.mark.one_pair
def test_an_unknown_instruction_set_is_refused():
    result = run_python("import jax_ring", JAX_RING_ISA="neon")
    assert "JAX_RING_ISA must be baseline, avx2 or avx512, got 'neon'" in result.stderr


@pytest.mark.full
@pytest.mark.one_pair
@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors have one set of kernels")
def test_the_widest_instruction_set_of_the_processor_is_used():
    """Whatever has compiled the module: some compilers' own check finds none."""
    with open("/proc/cpuinfo") as file:
        flags = set(next(line for line in file if line.startswith("flags")).split())
    wanted = "baseline"
    if flags >= {"avx2", "f16c"}:
        wanted = "avx2"
        if flags >= {"avx512f", "avx512bw", "avx512vl", "avx512dq"}:
            wanted = "avx512"
    program = "from jax_ring import _ffi_cpu; print(_ffi_cpu.instruction_set())"
    assert run_python(program, JAX_RING_ISA="").stdout.split() == [wanted]


@pytest.mark.full
@pytest.mark.one_pair
def test_every_instruction_set_gives_the_same_bits():
    program = """
import hashlib
import jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, PartitionSpec as P
from jax_ring import ring_psum, _ffi_cpu
mesh = Mesh(jax.devices(), ("i",))
f = jax.jit(jax.shard_map(lambda x: ring_psum(x, "i"), mesh=mesh, in_specs=P("i"), out_specs=P()))
digest = hashlib.sha256()
for dtype in (jnp.float32, jnp.bfloat16, jnp.float16, jnp.float8_e5m2, jnp.int32):
    values = np.random.default_rng(0).standard_normal((8 * 5003,)) * 100
    digest.update(np.asarray(f(jnp.asarray(values).astype(dtype))).tobytes())
print(_ffi_cpu.instruction_set(), digest.hexdigest())
"""
    results = [run_python(program, JAX_RING_ISA=isa) for isa in ("baseline", "avx2", "")]
    assert all(result.returncode == 0 for result in results), results[0].stderr
    names, digests = zip(*(result.stdout.split() for result in results), strict=True)
    assert names[0] == "baseline"
    assert len(set(digests)) == 1


def test_mesh_helper_leaves_devices_out():
    # The meshes of the tests leave out devices on purpose.
    assert make_mesh().size < len(jax.devices())


def test_ring_functions_under_the_names_of_lax(monkeypatch):
    # The ring_ functions call those of lax for constants, and must not call themselves when lax is patched.
    for name in ("psum", "pmean", "pmax", "pmin", "psum_scatter", "all_gather", "all_to_all", "ppermute"):
        monkeypatch.setattr(lax, name, getattr(jax_ring, f"ring_{name}"))

    def body(x):
        x = lax.all_to_all(lax.ppermute(x, "i", [(k, k) for k in range(8)]), (), 0, 0, tiled=True)
        gathered = lax.all_gather(lax.psum_scatter(jnp.tile(x, 4), "i", tiled=True), "i").sum(0)
        return lax.psum((x, 1), "i")[0] + lax.psum(1, "i") + lax.pmean(2.0, "i") + lax.pmax(3, "i") + gathered

    x = jnp.arange(16.0)
    total = np.arange(16.0).reshape(8, 2).sum(0)
    np.testing.assert_array_equal(sharded(body, check_vma=False)(x)[:2], total + 8 + 2 + 3 + 4 * total.sum())
