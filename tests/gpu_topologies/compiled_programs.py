"""Shared by these tests: the collectives to compile, and what is in the compiled programs."""

import re

import jax
import jax.numpy as jnp
from jax.experimental import compute_on as compute_on_module
from jax.sharding import PartitionSpec as P

import jax_ring

# For assume_hosts: eight processes, and sixteen.
ONE_HOST = dict.fromkeys(range(8), 0)
TWO_HOSTS = {process: process // 8 for process in range(16)}

# The kind of custom call of each function, and the function.
FAMILY = {
    "ring_psum": ("all_reduce", jax_ring.ring_psum),
    "ring_pmean": ("all_reduce", jax_ring.ring_pmean),
    "ring_pmax": ("all_reduce", jax_ring.ring_pmax),
    "ring_pmin": ("all_reduce", jax_ring.ring_pmin),
    "ring_psum_scatter": ("reduce_scatter", lambda x, axis: jax_ring.ring_psum_scatter(x, axis, tiled=True)),
    "ring_all_gather": ("all_gather", jax_ring.ring_all_gather),
    "ring_reduce": ("reduce", jax_ring.ring_reduce),
    "ring_broadcast": ("broadcast", jax_ring.ring_broadcast),
}


def compiled_for(mesh, fun, shape=(16 * 48,), dtype=jnp.float32) -> str:
    """The optimized HLO of `fun` under shard_map, for one array that is split over axis "i"."""
    mapped = jax.shard_map(fun, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False)
    x = jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, P("i")))
    return optimized(jax.jit(mapped).lower(x))


def on_stream(fun, stream: str):
    """`fun` on another GPU stream, as this version of JAX spells it."""
    wrap = getattr(compute_on_module, "compute_on2", compute_on_module.compute_on)
    return wrap(fun, compute_type=f"gpu_stream:{stream}", out_memory_spaces=jax.memory.Space.Device)


def optimized(lowered) -> str:
    """The optimized HLO of a lowered program. Without Triton's matrix products it is compiled in half the time."""
    return lowered.compile(compiler_options={"xla_gpu_enable_triton_gemm": False}).as_text()


def calls_in(hlo: str) -> list[str]:
    """The kinds of the custom calls, whatever stream they are on."""
    return re.findall(r'custom_call_target="jax_ring_(\w+?)(?:_async)?"', hlo)


def calls_in_place(hlo: str) -> list[str]:
    """The targets of the custom calls that write into the buffer of an operand."""
    return re.findall(r'custom_call_target="(jax_ring_\w+)"[^\n]* output_to_operand_aliasing=', hlo)


def collectives_of_xla(hlo: str) -> list[tuple[str, list[str]]]:
    """Opcode and types of the results of XLA's collectives. An asynchronous one counts once."""
    opcodes = "all-reduce|reduce-scatter|all-gather|all-to-all|collective-permute|collective-broadcast"
    found = []
    for kind, opcode, start in re.findall(rf" = (\S.*?) ({opcodes})(-start)?\(", hlo):
        types = re.findall(r"\w+\[[\d,]*\]", kind)
        # Operands come first, but those of an all-reduce are listed by newer versions of XLA only.
        has_operands = kind.startswith("((") or (start and opcode != "all-reduce")
        found.append((opcode, types[len(types) // 2 :] if has_operands else types))
    return found


def attribute(name: str, hlo: str) -> list[int]:
    """The elements of an array attribute of the first call."""
    elements, count = re.search(rf"\b{name} = dense<\[?([-\d, ]+)\]?> : tensor<(\d+)x", hlo).groups()
    numbers = [int(n) for n in elements.split(",")]
    return numbers * int(count) if len(numbers) == 1 else numbers
