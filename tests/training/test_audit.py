"""value_and_grad(audit=k): a shard is computed again by another rank, and a bit that differs fails the step."""

import functools
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same_bits, make_mesh, run_processes, sharded
from jax import lax
from jax.sharding import PartitionSpec as P
from tiers import vma_fixture

from jax_ring import grad, shard_index, value_and_grad
from jax_ring.collectives.leaves import own_copy
from jax_ring.training.same_bits.audit import Audit, report

check_vma = vma_fixture(without_vma=pytest.mark.one_pair)  # plain JAX on top of the collectives

V, RANKS = 8, 4
RNG = np.random.default_rng(0)
X = RNG.standard_normal((2 * V, 5)).astype(np.float32)
PARAMS = {name: RNG.standard_normal(shape).astype(np.float32) for name, shape in {"v": (7, 3), "w": (5, 7)}.items()}


@jax.custom_vjp
def damaged(x, mask):
    """x, whose gradient has bits flipped in its last element."""
    return x


def _flip(mask, gradient):
    bits = lax.bitcast_convert_type(gradient, jnp.uint32)
    bits = bits.at[(-1,) * bits.ndim].set(bits[(-1,) * bits.ndim] ^ mask)
    return lax.bitcast_convert_type(bits, jnp.float32), np.zeros((), jax.dtypes.float0)


damaged.defvjp(lambda x, mask: (x, mask), _flip)


def loss(params, x, masks):
    """masks: a whole argument of which each rank has its own, and so a rank that computes other bits than others."""
    return (jnp.tanh(x @ params["w"]) @ damaged(params["v"], masks[0]) ** 2).mean()


@functools.cache  # compiled once for all tests that call it
def audited_step(*, ranks=RANKS, check_vma=True, fun=loss, audit=1, **options):
    """(params, x, masks of the ranks, number of the step) -> value and gradients."""

    def step(params, x, masks, number):
        result = value_and_grad(
            fun, "i", num_shards=V, in_axes=(0, None), audit=audit, step=number if audit else None, **options
        )(params, x, masks)
        return jax.tree.map(lambda g: own_copy(g, "i")[None], result)

    return sharded(
        step, mesh=make_mesh((ranks,)), in_specs=(P(), P("i"), P("i"), P()), out_specs=P("i"), check_vma=check_vma
    )


def masks_of(ranks, *bad, bit=0):
    return np.array([1 << bit if rank in bad else 0 for rank in range(ranks)], np.uint32)


@functools.cache
def draws(ranks, every, numbers=4 * V):
    """By step: (whether it audits, its number, the shard, its rank, the rank that audits)."""

    def draw(number):
        return jnp.stack([jnp.int32(x) for x in Audit("f", every, number).draw("i", V)])

    all_numbers = jnp.arange(numbers)
    of_all = sharded(
        lambda: lax.map(draw, all_numbers), mesh=make_mesh((ranks,)), in_specs=(), out_specs=P(), check_vma=False
    )
    return np.asarray(of_all()).tolist()


def drawn(ranks, number, every=1):
    """(shard, owner, auditor) of a step."""
    return tuple(draws(ranks, every)[number][2:])


def error_of(step, *args):
    """The text of the error, or None."""
    try:
        jax.block_until_ready(step(*args))
    except jax.errors.JaxRuntimeError as error:
        return str(error)[str(error).rindex("value_and_grad: in step") :]
    return None


@pytest.mark.one_pair
@pytest.mark.parametrize("ranks", [2, RANKS, V])
def test_kv_steps_audit_every_shard_once_on_any_number_of_ranks(ranks):
    of_steps = draws(ranks, 3, 3 * V * V)
    assert [due for due, *_ in of_steps] == [number % 3 == 0 for number in range(len(of_steps))]
    assert [number for _, number, *_ in of_steps] == [*range(len(of_steps))]
    audits = [(shard, owner, auditor) for due, _, shard, owner, auditor in of_steps if due]
    assert {shard for shard, _, _ in audits[:V]} == {*range(V)}
    assert [shard for shard, _, _ in audits] == [shard for _, _, shard, _, _ in draws(2, 3, 3 * V * V)[::3]]
    assert all(owner == shard // (V // ranks) and 0 <= auditor < ranks for shard, owner, auditor in audits)
    # Of each rank every other one is the auditor at some time, and never itself.
    assert len({(owner, auditor) for _, owner, auditor in audits}) == ranks * (ranks - 1)
    assert all(owner != auditor for _, owner, auditor in audits)


@pytest.mark.parametrize(("ranks", "bit"), [(RANKS, 0), pytest.param(V, 31, marks=pytest.mark.one_pair)])
def test_a_flipped_bit_is_found_in_each_step_that_audits_it_and_in_no_other(ranks, bit, check_vma):
    step = audited_step(ranks=ranks, check_vma=check_vma)
    good, bad = masks_of(ranks), masks_of(ranks, 1, bit=bit)
    found = 0
    for number in range(V + 2):
        shard, owner, auditor = drawn(ranks, number)
        text = error_of(step, PARAMS, X, bad, number)
        assert error_of(step, PARAMS, X, good, number) is None
        assert (text is not None) == (1 in (owner, auditor))
        if text:
            found += 1
            assert text.startswith(
                f"value_and_grad: in step {number} shard {shard} has other bits on rank {owner}, which has it, than on "
                f"rank {auditor}, which computed it again: the gradient of ['v'] differs. Of {ranks + 2} computations "
                f"{ranks} agree, unlike others of rank 1: suspect hardware. The step is not applied."
            )
    assert found >= 2


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, pytest.param(V, marks=pytest.mark.one_pair)])
def test_results_have_the_bits_of_a_step_without_audits(ranks, check_vma):
    args = PARAMS, X, masks_of(ranks), 3
    assert_same_bits(
        audited_step(ranks=ranks, check_vma=check_vma)(*args),
        audited_step(ranks=ranks, check_vma=check_vma, audit=None)(*args),
    )


def trained(ranks, audit):
    """A step of an optimizer that donates its state: (params, state, number) -> the next ones."""
    optimizer = optax.adam(0.1)

    def step(params, state, number, x):
        audits = {"audit": audit, "step": number} if audit else {}
        grads = grad(loss, "i", num_shards=V, in_axes=(0, None), **audits)(params, x, np.zeros(1, np.uint32))
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, number + 1

    mapped = jax.shard_map(
        step, mesh=make_mesh((ranks,)), in_specs=(P(), P(), P(), P("i")), out_specs=P(), check_vma=False
    )
    start = jax.tree.map(jnp.array, PARAMS)
    return jax.jit(mapped, donate_argnums=(0, 1, 2)), (start, optimizer.init(start), jnp.int32(0))


@pytest.mark.full
@pytest.mark.one_pair
@pytest.mark.parametrize("ranks", [2, V])
def test_steps_keep_no_copies(ranks):
    """Of gradients, which digests read before they are added, or of parameters, which the update overwrites."""

    def num_copies(audit):
        step, start = trained(ranks, audit)
        return len(re.findall(r"= f32\[5,7\]\S* copy\(", step.lower(*start, X).compile().as_text()))

    assert num_copies(3) <= num_copies(None)


@pytest.mark.full
@pytest.mark.one_pair
def test_training_has_the_same_bits_with_audits_and_without():
    def after_steps(*args):
        step, carry = trained(*args)
        for _ in range(5):
            carry = step(*carry, X)
        return carry

    expected = after_steps(1, None)
    assert_same_bits(after_steps(2, 1), expected)
    assert_same_bits(after_steps(V, 2), expected)


@pytest.mark.full
@pytest.mark.one_pair
def test_a_constant_behind_the_mean_is_no_reason_for_other_bits(check_vma):
    """XLA joins a division by 12 and a product with 0.1, unless an audit lies between."""
    x = RNG.standard_normal((24, 5)).astype(np.float32)

    def update(params, x, **options):
        grads = grad(lambda w, x: (jnp.tanh(x @ w) ** 2).mean(), "i", num_shards=12, **options)(params, x)
        return -0.1 * grads, grads

    def on(ranks, **options):
        mapped = sharded(
            lambda params, x: update(params, x, **options), mesh=make_mesh((ranks,)), in_specs=(P(), P("i")),
            out_specs=P(), check_vma=check_vma,
        )  # fmt: skip
        return mapped(PARAMS["w"], x)

    updates, grads = on(1)
    assert_same_bits(updates, np.float32(-0.1) * np.asarray(grads))
    for options in ({}, {"audit": 1, "step": 0}, {"check_replicas": True}):
        assert_same_bits(on(2, **options), (updates, grads))


def test_only_each_kth_step_is_audited():
    step = audited_step(audit=3)
    bad = masks_of(RANKS, 0, 1)  # both equally wrong, so that audits of rank 0 by rank 1 find nothing
    outcomes = [error_of(step, PARAMS, X, bad, number) is not None for number in range(9)]
    expected = []
    for number in range(9):
        _, owner, auditor = drawn(RANKS, number, every=3)
        expected.append(number % 3 == 0 and (owner in (0, 1)) != (auditor in (0, 1)))
    assert outcomes == expected
    assert any(expected)


@pytest.mark.full
@pytest.mark.one_pair
@pytest.mark.parametrize(
    "options",
    [{"reduce_gradients": False}, {"check_replicas": True}, {"reduce_gradients": False, "check_replicas": True}],
    ids=str,
)
def test_with_other_options(options, check_vma):
    step, plain = (audited_step(check_vma=check_vma, audit=audit, **options) for audit in (1, None))
    assert_same_bits(step(PARAMS, X, masks_of(RANKS), 0), plain(PARAMS, X, masks_of(RANKS), 0))
    _, owner, _ = drawn(RANKS, 0)
    assert "the gradient of ['v'] differs" in error_of(step, PARAMS, X, masks_of(RANKS, owner), 0)


@pytest.mark.one_pair
def test_a_wire_and_every_kind_of_data(check_vma):
    """Keys and integers among the data, bfloat16 and integers among the parameters, auxiliary results."""

    def of_keys(params, data, masks):
        noise = jax.vmap(jax.random.normal)(data["key"])
        value = (params["b"] * (data["n"] + noise) * params["int"]).mean() + (damaged(params["c"], masks[0]) ** 2).sum()
        return value.astype(jnp.float32), data["key"]

    def step(params, data, masks, number):
        (value, _), grads = value_and_grad(
            of_keys, "i", num_shards=RANKS, in_axes=(0, None), audit=1, step=number, allow_int=True, has_aux=True,
            wire=jnp.bfloat16,
        )(params, data, masks)  # fmt: skip
        return value, grads["c"]

    params = {"b": jnp.bfloat16(1.5), "int": jnp.int32(2), "c": jnp.ones(3)}
    data = {"key": jax.random.split(jax.random.key(0), V), "n": np.arange(V)}
    step = sharded(
        step, mesh=make_mesh((RANKS,)), in_specs=(P(), P("i"), P("i"), P()), out_specs=P(), check_vma=check_vma
    )
    for number in range(RANKS):
        assert error_of(step, params, data, masks_of(RANKS), number) is None
    assert "shard 0 has other bits on rank 0" in error_of(step, params, data, masks_of(RANKS, 0), 0)


@pytest.mark.one_pair
def test_a_loss_of_several_axes(check_vma):
    """Ranks of another axis compute a shard together, and all of them fail if the part of one differs."""

    def of_columns(params, x, masks):
        return lax.psum((x @ damaged(params, masks[0, 0])).sum(), "j") ** 2

    def step(params, x, masks, number):
        axes = ("a", "b")
        return value_and_grad(of_columns, axes, num_shards=V, in_axes=(0, None), audit=1, step=number)(params, x, masks)

    step = sharded(
        step, mesh=make_mesh((2, 2, 2), ("a", "b", "j")),
        in_specs=(P("j"), P(("a", "b"), "j"), P(("a", "b"), "j"), P()), out_specs=(P(), P("j")), check_vma=check_vma,
    )  # fmt: skip
    params, x = PARAMS["v"][:6, 0], np.concatenate([X, X[:, :1]], axis=1)
    masks = np.zeros((RANKS, 2), np.uint32)
    for number in range(V):
        assert error_of(step, params, x, masks, number) is None
    masks[2, 1] = 1
    for number in range(V):
        shard, owner, auditor = drawn(RANKS, number)
        text = error_of(step, params, x, masks, number)
        assert (text is not None) == (2 in (owner, auditor))
        if text:
            assert f"shard {shard} has other bits on rank {owner}" in text
            assert "Of 6 computations 4 agree, unlike others of rank 2: suspect" in text


@pytest.mark.full
@pytest.mark.one_pair
def test_ten_thousand_steps_without_a_false_alarm():
    """In one loop, of donated state that counts the steps."""

    def noisy(params, x, key):
        kept = jax.random.bernoulli(jax.random.fold_in(key, shard_index()), 0.9, x.shape)
        return ((jnp.tanh(jnp.where(kept, x, 0) @ params["w"]) @ params["v"] - 1) ** 2).mean()

    def train(params, number, x):
        def step(carry, _):
            params, number = carry
            key = jax.random.fold_in(jax.random.key(0), number)
            grads = grad(noisy, "i", num_shards=V, in_axes=(0, None), audit=1, step=number)(params, x, key)
            return (jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), number + 1), None

        return lax.scan(step, (params, number), length=10_000)[0]

    mesh = make_mesh((2,))
    step = jax.shard_map(train, mesh=mesh, in_specs=(P(), P(), P("i")), out_specs=P())
    params = jax.tree.map(jnp.array, PARAMS)
    params, number = jax.jit(step, donate_argnums=(0, 1))(params, jnp.int32(0), X)
    assert number == 10_000
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))


@pytest.mark.full
@pytest.mark.one_pair
@pytest.mark.parametrize("persistent", [False, True])
def test_who_of_two_ranks_was_wrong(persistent):
    """Known if the error does not come again."""
    calls = []

    def mask(rank):
        if rank == 1:
            calls.append(rank)
        return np.uint32(rank == 1 and (persistent or len(calls) == V // 2))

    def sometimes(params, x, masks):
        of_rank = jax.pure_callback(mask, jax.ShapeDtypeStruct((), jnp.uint32), masks[0])
        return loss(params, x, of_rank[None])

    # The last of the rank's shards, and the step that audits it.
    number = next(i for i in range(V) if drawn(2, i)[0] == V - 1)
    text = error_of(audited_step(ranks=2, fun=sometimes), PARAMS, X, np.arange(2, dtype=np.uint32), number)
    assert f"in step {number} shard {V - 1} has other bits on rank 1, which has it, than on rank 0" in text
    if persistent:
        assert "cannot be told: of 4 computations no more than 2 agree." in text
    else:
        assert "Of 4 computations 3 agree, unlike others of rank 1: suspect hardware." in text


@pytest.mark.one_pair
def test_a_report_of_several_wrong_ranks():
    by_rank = np.zeros((5, 3, 4, 2), np.uint32)
    by_rank[1, 0, 2:] = 7
    by_rank[3, 2, 0] = 8
    text = report("f", tuple("abcd"), by_rank, 9, 3, 1, 2)
    assert "f: in step 9 shard 3 has other bits on rank 1, which has it, than on rank 2" in text
    assert "computed it again: c differs and 1 more arrays. Of 7 computations 5 agree, unlike others of " in text
    assert "ranks 1, 3: suspect" in text


@pytest.mark.one_pair
def test_refused_arguments():
    def refused(error, match, ranks=RANKS, **options):
        options = {"num_shards": V, "audit": 1, "step": 0} | options
        step = sharded(
            lambda p, x: value_and_grad(lambda p, x: (x @ p["w"]).sum(), "i", **options)(p, x),
            mesh=make_mesh((ranks,)), in_specs=(P(), P("i")), out_specs=P(), check_vma=False,
        )  # fmt: skip
        with pytest.raises(error, match=match):
            step(PARAMS, X)

    refused(ValueError, "value_and_grad: audit=1 has a shard computed again by another rank, and 'i' has only one", 1)
    refused(ValueError, "audit=1 has a shard computed again; pass num_shards as well", num_shards=None)
    refused(ValueError, "step=0 is for audits; pass audit as well", audit=None)
    refused(ValueError, "audit must be a positive number of steps, got 0", audit=0)
    refused(TypeError, "audit must be an integer, got 1.5", audit=1.5)
    refused(TypeError, "with audit=1 step must be the number of the step, an integer scalar .* got None", step=None)
    refused(TypeError, "step must be the number of the step, .* got 1.5", step=1.5)
    refused(TypeError, "step must be the number of the step, .* got True", step=True)
    refused(
        ValueError, "audit=1 compares the gradients of a shard, which reduced_in_backward=True has already added", V,
        reduced_in_backward=True,
    )  # fmt: skip


PROCESS = """
import functools, sys
sys.path[:0] = {path!r}
import numpy as np
from jax.sharding import PartitionSpec as P
jax.distributed.initialize("{address}", {processes}, {process})
from test_audit import PARAMS, V, X, audited_step, drawn, error_of, masks_of
step = audited_step(check_vma=False)
for bad in ((), (3,)):
    for number in range(V):
        print(error_of(step, PARAMS, X, masks_of(4, *bad), number))
jax.distributed.shutdown()
"""


def test_all_ranks_of_all_processes_fail_together():
    for text in run_processes(PROCESS, [{"path": [path for path in sys.path if "tests" in path]}] * 2, devices=2):
        lines = re.findall(r"None|value_and_grad: in step .*", text)
        assert lines[:V] == ["None"] * V
        for number, line in enumerate(lines[V:]):
            shard, owner, auditor = drawn(RANKS, number)
            if 3 in (owner, auditor):
                assert f"in step {number} shard {shard} has other bits on rank {owner}" in line
                assert "unlike others of rank 3: suspect" in line
            else:
                assert line == "None"
