"""Rematerialization under every policy, and dead code elimination of fused calls."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_matches_lax, make_mesh, num_calls, sharded
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import partial_eval as pe
from jax.sharding import PartitionSpec as P
from tiers import full_but

from jax_ring import ring_psum

RANKS = 4
MESH = make_mesh((RANKS,))
X = np.arange(8, dtype=np.float32) - 3

policies = jax.checkpoint_policies
POLICIES = {
    "default": None,
    "everything": policies.everything_saveable,
    "nothing": policies.nothing_saveable,
    "dots": policies.dots_saveable,
    "checkpoint_dots": policies.checkpoint_dots,
    "unbatched_dots": policies.dots_with_no_batch_dims_saveable,
    "checkpoint_unbatched_dots": policies.checkpoint_dots_with_no_batch_dims,
    "only_names": policies.save_only_these_names("total"),
    "any_names_but": policies.save_any_names_but_these("total"),
    "anything_except": policies.save_anything_except_these_names("total"),
    "both": policies.save_from_both_policies(policies.dots_saveable, policies.save_only_these_names("total")),
    "offload": policies.save_and_offload_only_these_names(
        names_which_can_be_saved=["total"], names_which_can_be_offloaded=[],
        offload_src="device", offload_dst="pinned_host",
    ),
    "offload_dots": policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
}  # fmt: skip

every_policy = pytest.mark.parametrize(
    "policy", full_but(POLICIES, ["default", "everything", "dots", "only_names", "offload"])
)


def block(psum, x):
    """A layer with sums before and after a product, and a named result; exact for small integers."""
    total, squares = psum((x, x * x), "i")
    product = jnp.outer(total, x) @ (squares - x)
    total = checkpoint_name(psum(product, "i"), "total")
    return total * x


@every_policy
def test_gradient(policy, check_vma):
    def body(psum, x):
        f = jax.checkpoint(lambda x: block(psum, x), policy=POLICIES[policy])
        return jax.value_and_grad(lambda x: jnp.sum(f(x)))(x)[1], f(x)

    assert_matches_lax(body, X, mesh=MESH, check_vma=check_vma)


@every_policy
def test_as_many_sums_are_recomputed_as_with_lax(policy, check_vma):
    def sums(psum):
        counts = []

        def body(x):
            f = jax.checkpoint(lambda x: psum(psum(x * x, "i") * x, "i") * x, policy=POLICIES[policy])
            jaxpr = str(jax.make_jaxpr(jax.grad(lambda x: jnp.sum(f(x))))(x))
            counts.append(len(re.findall(r"= (?:ring_)?psum(?:_invariant)?\[", jaxpr)))
            return x

        sharded(body, mesh=MESH, check_vma=check_vma)(X)
        return counts

    # With vma tracking, the transposes of JAX's own casts are counted as well; they are the same for both.
    assert sums(ring_psum) == sums(lax.psum)
    assert min(sums(ring_psum)) >= 2


@pytest.mark.parametrize(("policy", "calls"), [("everything", 1), ("nothing", 2)])
def test_number_of_calls(policy, calls):
    def body(x):
        f = jax.checkpoint(lambda x: jnp.sin(ring_psum(jnp.sin(x), "i")), policy=POLICIES[policy])
        value, gradient = jax.value_and_grad(lambda x: jnp.sum(f(x) ** 2))(x)
        return value + gradient

    # The recomputed sum waits for the cotangent, which waits for the first: they are not joined.
    # Counted before compilation: XLA:CPU drops the barriers that keep the two calls from being merged.
    assert len(descriptions(body, True)) == calls


def test_gradient_of_scan_over_checkpointed_blocks(check_vma):
    def body(psum, x):
        f = jax.checkpoint(lambda c, k: (jnp.mod(psum(c * k, "i"), 8) * x, psum(c, "i")))
        return jax.grad(lambda x: jnp.sum(lax.scan(f, x, jnp.arange(3.0))[0]))(x)

    assert_matches_lax(body, X, mesh=MESH, check_vma=check_vma)


def test_checkpoint_of_vmap_and_vmap_of_checkpoint(check_vma):
    def body(psum, x):
        f = lambda v: jnp.sum(psum(v * v, "i") * v)  # noqa: E731
        one = jax.grad(lambda x: jnp.sum(jax.checkpoint(jax.vmap(f))(x)))(x)
        return one, jax.vmap(jax.grad(jax.checkpoint(f)))(x)

    assert_matches_lax(body, X, mesh=MESH, check_vma=check_vma)


def descriptions(body, check_vma) -> list[str]:
    """The `call` attribute of each call in the lowered program."""
    text = sharded(body, mesh=MESH, check_vma=check_vma).lower(X).as_text()
    return re.findall(r'call = "([^"]*)"', text)


def test_unused_results_of_a_tree_are_dropped(check_vma):
    def body(x, names):
        f = jax.checkpoint(lambda x: ring_psum({"a": x, "b": x * x, "c": x + 1}, "i"))
        used = jax.jit(lambda x: [y for name, y in f(x).items() if name in names])(x)
        return sum(used) + x

    for names in ("abc", "ac", "b"):
        (call,) = descriptions(lambda x, names=names: body(x, names), check_vma)
        assert call.count("float32[2]") == len(names)


def test_dead_code_rule(check_vma):
    """Dead results remove their operands, and a dead call its equation."""

    def operands(used):
        left = []

        def body(x):
            jaxpr = jax.make_jaxpr(lambda x: ring_psum((x, jnp.sin(x), jnp.cos(x)), "i"))(x).jaxpr
            smaller, _ = pe.dce_jaxpr(jaxpr, used)
            left.append([len(e.invars) for e in smaller.eqns if e.primitive.name.startswith("ring_psum")])
            left.append(sorted({e.primitive.name for e in smaller.eqns} & {"sin", "cos"}))
            return x

        sharded(body, mesh=MESH, check_vma=check_vma)(X)
        return left

    assert operands([True, True, True]) == [[3], ["cos", "sin"]]
    assert operands([False, True, False]) == [[1], ["sin"]]
    assert operands([True, False, True]) == [[2], ["cos"]]
    assert operands([False, False, False]) == [[], []]


def test_dead_calls_are_not_made(check_vma):
    def body(x):
        ring_psum((x, x * x), "i")
        return x + 0 * ring_psum(x.astype(jnp.int32), "i").astype(x.dtype)

    assert num_calls(sharded(body, mesh=MESH, check_vma=check_vma), X) <= 1
    assert num_calls(sharded(lambda x: (ring_psum(x, "i"), x)[1], mesh=MESH, check_vma=check_vma), X) == 0


def test_unused_sums_do_not_stay_in_a_scan(check_vma):
    def body(x):
        step = lambda c, k: (ring_psum((c * k, x * k), "i")[0] + x, ring_psum(c * c, "i"))  # noqa: E731
        return lax.scan(step, x, jnp.arange(3.0))[0]

    f = sharded(body, mesh=MESH, check_vma=check_vma)
    assert num_calls(f, X) == 1
    expected = X.reshape(RANKS, 2)
    for k in range(3):
        expected = (expected * k).sum(0) + X.reshape(RANKS, 2)
    np.testing.assert_array_equal(f(X), expected.reshape(-1))


def test_out_specs_of_the_checkpointed_sum_are_replicated():
    f = sharded(jax.checkpoint(lambda x: ring_psum(x, "i")), mesh=MESH, out_specs=P())
    np.testing.assert_array_equal(f(X), X.reshape(RANKS, 2).sum(0))
