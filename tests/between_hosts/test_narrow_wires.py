"""Sums that are rounded to 16 bits on the wire, in parts: their bits are those of one piece, on two and three hosts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits, rank_fold
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from test_two_level import SMALL_PART, TWO_HOSTS, by_host, cut_small_parts, local_shards, on_mesh

from jax_ring import explain, ring_psum, sync_gradients, sync_with_feedback
from jax_ring.lowering.hierarchical import all_reduce

pytestmark = pytest.mark.full  # jobs of several processes

RNG = np.random.default_rng(0)  # the same numbers in all processes
LARGE = 2 * SMALL_PART // 4  # float32 of so many elements cross in parts


def in_one_piece(fun):
    """A function of which no sum is cut."""

    def whole(*args):
        part_bytes, all_reduce.PART_BYTES = all_reduce.PART_BYTES, 1 << 40
        try:
            return fun(*args)
        finally:
            all_reduce.PART_BYTES = part_bytes

    return whole


def gradients(ranks: int, size: int) -> np.ndarray:
    """Ties, what overflows float16 or is too small for it, zeros of both signs, and what is not finite."""
    values = RNG.standard_normal((ranks, size)).astype(np.float32)
    values[:, ::1009] *= 1e5
    values[:, 1::1009] *= 1e-7
    values[:, 3::1009] = (1 + 2.0**-8) * (1 + 2.0**-11)
    values[:, 4::1009] = 1 + 2.0**-8
    values[:, 5::1009] = 1 + 3 * 2.0**-11
    values[:, 6::1009] = -0.0
    values[0, 5000], values[1, 5001] = np.nan, np.inf
    values[0, size - 1], values[1, size - 1] = np.inf, -np.inf
    return values


def check_wire(mesh, hosts: int, size: int, wire, mean: bool) -> None:
    """The sum of a narrow wire has the bits of one piece, and no conversion of a whole message is left."""
    ranks = mesh.size
    values = gradients(ranks, size)
    fun, arrays = on_mesh(lambda x: sync_gradients(x[0], "i", wire=wire, mean=mean), mesh, values, out_specs=P())
    found = explain(fun, arrays)
    names = [i.name for i in found.instructions]
    assert names.count("all-to-all") == names.count("jax_ring_all_gather") > 1
    assert found.predicted_bytes == found.counted_bytes
    text = fun.lower(arrays).compile().as_text()
    small = {"bfloat16": "bf16", "float16": "f16"}[jnp.dtype(wire).name]
    assert not [line for line in text.splitlines() if f"= {small}[{size}]" in line or f"= {small}[1,{size}]" in line]

    result = local_shards(fun(arrays))
    if not mean:
        with np.errstate(over="ignore", invalid="ignore"):
            sent = values.astype(wire).astype(np.float32).reshape(hosts, -1, size)
            expected = rank_fold(np.stack([rank_fold(of_host) for of_host in sent])).astype(wire).astype(np.float32)
        for part in result:
            assert_same_bits(part, expected)
    pieces, arrays = on_mesh(lambda x: sync_gradients(x[0], "i", wire=wire, mean=mean), mesh, values, out_specs=P())
    lowered = in_one_piece(pieces.lower)(arrays)
    assert lowered.as_text().count("stablehlo.all_reduce") == 1
    assert_same_bits(local_shards(lowered.compile()(arrays)), result)


def bits_of_one_piece():
    mesh = Mesh(by_host().reshape(8), ("i",))
    for wire, size, mean in (
        (jnp.bfloat16, LARGE + 1001, False), (np.float16, LARGE, False), (jnp.bfloat16, LARGE, True),
        (np.float16, LARGE + 3, True),
    ):  # fmt: skip
        check_wire(mesh, 2, size, wire, mean)


def what_the_program_needs_otherwise():
    """The sum rounded, and its operand rounded, too; with error feedback; in a loop; of an operand that is reshaped."""
    mesh = Mesh(by_host().reshape(8), ("i",))
    values = gradients(8, LARGE).reshape(8, -1, 256)

    def sums(x):
        rounded = x[0].astype(jnp.bfloat16)
        total = ring_psum(rounded, "i")
        again = lax.fori_loop(
            0, 2, lambda _, y: ring_psum(y.astype(jnp.bfloat16).reshape(-1), "i").astype(y.dtype).reshape(y.shape) / 8,
            x[0],
        )  # fmt: skip
        return rounded[None], total[None], total.astype(np.float32)[None], (total * 2)[None], again[None]

    def with_feedback(x):
        return sync_with_feedback(x, jnp.ones_like(x), "i", mean=False)

    for body in (sums, with_feedback):
        fun, arrays = on_mesh(body, mesh, values, check_vma=False)
        assert fun.lower(arrays).as_text().count("all_to_all") > 1
        whole = in_one_piece(fun.lower)(arrays).compile()
        assert_same_bits(*(jax.tree.map(local_shards, program(arrays)) for program in (fun, whole)))


@pytest.mark.jax_processes(2, devices=4, environment=TWO_HOSTS)
def test_two_hosts():
    cut_small_parts()
    for part in (bits_of_one_piece, what_the_program_needs_otherwise):
        part()
        print(f"{part.__name__} passed")
