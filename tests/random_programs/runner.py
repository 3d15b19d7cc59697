"""Runs a random program in every dialect, under its transformation, and compares what comes of it."""

import contextlib
import textwrap
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import dialects
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from wrappers import mesh_axes, vary

import jax_ring


class Fault(AssertionError):
    """The dialects disagree."""


@dataclass
class Outcome:
    """What came of a program in one dialect: results and the types of all collectives' results, or an error."""

    results: list[np.ndarray]
    types: list[str]
    error: Exception | None = None


def check(source: str) -> str:
    """Runs a program in all dialects, and returns how they compare.

    Raises:
      Fault: if they disagree.
    """
    namespace: dict = {"SOURCE": source}
    exec(compile(source, "<random program>", "exec"), namespace)
    expected = run(namespace, dialects.reference(), is_wide=namespace["TOLERANCE"] is not None)
    found = run(namespace, dialects.ring())
    if expected.error is not None and found.error is None and _has_untracked_axes(namespace):
        return "no reference: JAX does not trace lax over vmap axes with vma tracking"
    ending = _compare("jax_ring", namespace, found, expected)
    if "ops.ragged_all_to_all" in source and namespace["TRANSFORMATION"] in REVERSE:
        # The transpose of lax.ragged_all_to_all is wrong where slices are empty, because two begin in the same place,
        # and in groups, because it exchanges the offsets in none.
        return f"{ending}, without override_lax()"
    overridden = run(namespace, dialects.plain_lax(), override=True)
    try:
        _compare("override_lax()", namespace, overridden, expected, types=False)
    except Fault:
        # The override begins at lowering. Where lax is not what the reference is, they need not be equal.
        plain = run(namespace, dialects.plain_lax() if overridden.error else dialects.lax_on_cpus())
        _compare("override_lax()", namespace, overridden, plain, types=False)
        ending += ", lax is not"
    return ending


def _has_untracked_axes(namespace: dict) -> bool:
    """Whether there are vmap axes in a program with vma tracking: the reference is traced without it over them."""
    return namespace["CHECK_VMA"] and any(f"'m{depth}'" in namespace["SOURCE"] for depth in range(3))


def run(namespace: dict, dialect: dialects.Dialect, *, override: bool = False, is_wide: bool = False) -> Outcome:
    """The program's outcome in one dialect. is_wide: with operands of a dtype that rounds less."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.enable_x64(namespace["X64"] or is_wide))
        mesh = _mesh(namespace)
        operands = [_operand(namespace, mesh, i, is_wide) for i in range(len(namespace["OPERANDS"]))]
        if override:
            stack.callback(jax_ring.override_lax().close)
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", r"ring_pmean over .* is already the same", UserWarning)
        try:
            function = TRANSFORMATIONS[namespace["TRANSFORMATION"]](namespace, mesh, dialect)
            results = [np.asarray(x) for x in jax.tree.leaves(jax.block_until_ready(jax.jit(function)(*operands)))]
        except Exception as error:
            return Outcome([], dialect.types, error)
    return Outcome(results, dialect.types)


def _mesh(namespace: dict) -> Mesh:
    names, sizes = tuple(namespace["MESH"]), tuple(namespace["MESH"].values())
    devices = np.array([jax.devices("cpu")[i] for i in namespace["DEVICES"]])
    return Mesh(devices.reshape(sizes), names, axis_types=(AxisType.Auto,) * len(names))


def _operand(namespace: dict, mesh: Mesh, number: int, is_wide: bool) -> jax.Array:
    """Random integers, or real numbers if the program has a tolerance, with a first dimension for the ranks."""
    shape, dtype, axes, bound = namespace["OPERANDS"][number]
    ranks = int(np.prod([mesh.shape[axis] for axis in axes], dtype=int))
    random = np.random.default_rng(number)
    if namespace["TOLERANCE"] is not None:
        array = random.uniform(-bound, bound, (ranks, *shape)).astype(jnp.dtype(dtype))
        array = array.astype(np.float64 if dtype == "float32" else np.float32) if is_wide else array
        return jax.device_put(array, NamedSharding(mesh, P(axes or None)))
    values = random.integers(0 if dtype.startswith("u") else -bound, bound + 1, (ranks, *shape))
    array = values % 2 == 1 if dtype == "bool" else values.astype(jnp.dtype(dtype))
    if dtype.startswith("complex"):
        array = array + array.dtype.type(1j) * random.integers(-bound, bound + 1, array.shape)
    return jax.device_put(array, NamedSharding(mesh, P(axes or None)))


# ---- Transformations: from a program to a function of the operands of all ranks -------------------------------------


def _sharded(namespace: dict, mesh: Mesh, local: Callable) -> Callable:
    """`local` under shard_map: its operands and results have a first dimension for the ranks."""
    specs = tuple(P(axes or None) for _, _, axes, _ in namespace["OPERANDS"])

    def on_rank(*operands):
        results = local(*(x[0] for x in operands))
        return jax.tree.map(lambda x: vary(x)[None], results)

    return jax.shard_map(
        on_rank, mesh=mesh, in_specs=specs, out_specs=P(tuple(namespace["MESH"])), check_vma=namespace["CHECK_VMA"]
    )


def _is_inexact(x) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _loss(namespace: dict, dialect) -> Callable:
    """The sum of the program's float results, with small integers as weights, which differ between ranks."""

    def loss(*operands):
        total = 0.0
        for result in namespace["program"](dialect, *operands):
            if _is_inexact(result):
                rank = jax.lax.axis_index(tuple(namespace["MESH"]))
                weights = (jnp.arange(result.size).reshape(result.shape) + rank) % 3 - 1
                weighted = vary(result) * weights.astype(result.dtype) * namespace["SCALE"]
                weighted = weighted.real + weighted.imag
                total = total + jnp.sum(weighted.astype(jnp.promote_types(weighted.dtype, jnp.float32)))
        return total

    return loss


def _float_positions(operands) -> tuple[int, ...]:
    return tuple(i for i, x in enumerate(operands) if _is_inexact(x))


def _tangents(operands) -> tuple:
    def tangent(x):
        if not _is_inexact(x):
            return np.zeros(x.shape, jax.dtypes.float0)
        values = (jnp.arange(x.size).reshape(x.shape) % 3 - 1).astype(x.dtype)
        varying = tuple(axis for axis in mesh_axes() if axis in jax_ring._compat.varying_axes(x))
        return vary(values * (jax.lax.axis_index(varying) % 2 + 1).astype(x.dtype) if varying else values, varying)

    return tuple(map(tangent, operands))


def _forward(namespace, mesh, dialect):
    return _sharded(namespace, mesh, lambda *operands: namespace["program"](dialect, *operands))


def _grad(namespace, mesh, dialect):
    def local(*operands):
        return jax.value_and_grad(_loss(namespace, dialect), _float_positions(operands))(*operands)

    return _sharded(namespace, mesh, local)


def _grad_outside(namespace, mesh, dialect):
    losses = _sharded(namespace, mesh, _loss(namespace, dialect))

    def function(*operands):
        return jax.grad(lambda *operands: jnp.sum(losses(*operands)), _float_positions(operands))(*operands)

    return function


def _jvp(namespace, mesh, dialect):
    def local(*operands):
        program = lambda *operands: namespace["program"](dialect, *operands)  # noqa: E731
        results, tangents = jax.jvp(program, operands, _tangents(operands))
        return results, [t for t in tangents if t.dtype != jax.dtypes.float0]

    return _sharded(namespace, mesh, local)


def _of_floats(function: Callable, operands) -> tuple[Callable, list]:
    """The function of its float operands alone, and these."""
    positions = _float_positions(operands)

    def of_floats(*floats):
        replaced = list(operands)
        for i, value in zip(positions, floats, strict=True):
            replaced[i] = value
        return function(*replaced)

    return of_floats, [operands[i] for i in positions]


def _linearize(namespace, mesh, dialect):
    """The linear map and its transpose."""

    def local(*operands):
        program = lambda *operands: [x for x in namespace["program"](dialect, *operands) if _is_inexact(x)]  # noqa: E731
        of_floats, floats = _of_floats(program, operands)
        results, linear = jax.linearize(of_floats, *floats)
        tangents = linear(*_tangents(floats))
        # Not constants: XLA crashes while it compiles some sums of complex constants.
        cotangents = [(x * 0 + 1) * namespace["SCALE"] for x in results]
        return results, tangents, jax.linear_transpose(linear, *floats)(cotangents)

    return _sharded(namespace, mesh, local)


def _hessian(namespace, mesh, dialect):
    def local(*operands):
        of_floats, floats = _of_floats(_loss(namespace, dialect), operands)
        return jax.jacfwd(jax.jacrev(of_floats, argnums=0), argnums=0)(*floats)

    return _sharded(namespace, mesh, local)


def _two_of(x, axis: int):
    return jnp.stack([x, x[::-1] if x.ndim else x], axis)


def _vmap(namespace, mesh, dialect):
    def local(*operands):
        return jax.vmap(lambda *operands: namespace["program"](dialect, *operands), out_axes=0)(
            *(_two_of(x, 0) for x in operands)
        )

    return _sharded(namespace, mesh, local)


def _vmap_outside(namespace, mesh, dialect):
    function = _forward(namespace, mesh, dialect)
    return lambda *operands: jax.vmap(function, in_axes=1)(*(_two_of(x, 1) for x in operands))


def _vmap_of_grad(namespace, mesh, dialect):
    def local(*operands):
        in_axes = [min(1, x.ndim) for x in operands]
        batches = [_two_of(x, axis) for x, axis in zip(operands, in_axes, strict=True)]
        gradient = jax.grad(_loss(namespace, dialect), _float_positions(operands))
        return jax.vmap(gradient, in_axes=tuple(in_axes))(*batches)

    return _sharded(namespace, mesh, local)


TRANSFORMATIONS = {
    "forward": _forward,
    "grad": _grad,
    "grad_outside": _grad_outside,
    "jvp": _jvp,
    "linearize": _linearize,
    "hessian": _hessian,
    "vmap": _vmap,
    "vmap_outside": _vmap_outside,
    "vmap_of_grad": _vmap_of_grad,
}

REVERSE = ("grad", "grad_outside", "linearize", "hessian", "vmap_of_grad")


# ---- Comparison -----------------------------------------------------------------------------------------------------


def _compare(who: str, namespace: dict, found: Outcome, expected: Outcome, *, types: bool = True) -> str:
    if expected.error is not None or found.error is not None:
        if type(found.error) is not type(expected.error):
            _raise(who, found, expected)
        return f"refused by all: {type(found.error).__name__}"
    if namespace["TOLERANCE"] is not None:
        return _compare_rounded(who, namespace, found, expected)
    types = types and not _has_untracked_axes(namespace)
    if types and found.types != expected.types:
        different = [f"{a} instead of {b}" for a, b in zip(found.types, expected.types, strict=False) if a != b]
        raise Fault(f"{who} has other types: {'; '.join(different) or 'more or fewer calls'}")
    if [(x.shape, x.dtype) for x in found.results] != [(x.shape, x.dtype) for x in expected.results]:
        raise Fault(
            f"{who} has results of other types: {[(x.shape, x.dtype) for x in found.results]} instead of "
            f"{[(x.shape, x.dtype) for x in expected.results]}"
        )
    for number, (a, b) in enumerate(zip(found.results, expected.results, strict=True)):
        wrong = ~((a == b) | ((a != a) & (b != b)))
        if wrong.any():
            where = tuple(int(i[0]) for i in np.nonzero(wrong))
            raise Fault(
                f"{who}: {int(wrong.sum())} of {a.size} elements of result {number} are wrong, the first at {where}: "
                f"{a[where]} instead of {b[where]}"
            )
    return "equal"


def _compare_rounded(who: str, namespace: dict, found: Outcome, expected: Outcome) -> str:
    roundings, most = namespace["TOLERANCE"]
    tolerance = float(jnp.finfo(namespace["OPERANDS"][0][1]).eps) * 2 * roundings * most
    for number, (a, b) in enumerate(zip(found.results, expected.results, strict=True)):
        wrong = ~(np.abs(a.astype(np.float64) - b.astype(np.float64)) <= tolerance)
        if a.shape != b.shape or wrong.any():
            raise Fault(f"{who}: result {number} is not within {tolerance}: {a.tolist()} instead of {b.tolist()}")
    return "equal up to rounding"


def _raise(who: str, found: Outcome, expected: Outcome) -> None:
    def text(outcome):
        if outcome.error is None:
            return "results"
        return f"{type(outcome.error).__name__}: {textwrap.shorten(str(outcome.error), 600)}"

    raise Fault(f"{who} gives {text(found)}, and the reference {text(expected)}") from (found.error or expected.error)
