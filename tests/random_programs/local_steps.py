"""Steps of random programs that each rank makes for itself: arithmetic, shapes and dtypes."""

import math

from program import Step, Value

_INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32")


def repeats(old: tuple, new: tuple) -> int:
    """How often `resize` repeats an element."""
    return max(1, math.ceil(math.prod(new) / max(math.prod(old), 1)))


def local_step(generator, scope, value: Value):
    """A random step, and its result; None if what was chosen does not fit."""
    random, name = generator.random, generator.name()
    ndim = len(value.shape)
    kind = random.choice(("affine", "rank", "shape", "transpose", "sum", "rem", "product", "add", "cast", "flip"))
    v, result = value.name, value._replace(name=name)
    uses: tuple[str, ...] = (v,)
    is_bool, is_complex = value.dtype == "bool", value.dtype.startswith("complex")
    if is_bool and kind in ("affine", "rank", "rem", "sum", "product", "add"):
        expression = f"~{v}"
    elif kind == "affine":
        factor, added = random.choice((1, 2, 3)), random.choice((0, 1, 2))
        expression = f"{v} * {factor} + {added}"
        result = result._replace(bound=value.bound * factor + added, gain=value.gain * factor)
    elif kind == "rank":
        axis = random.choice(list(scope.axes))
        expression = f"{v} + lax.axis_index({axis!r}).astype({v}.dtype)"
        result = result._replace(bound=value.bound + scope.axes[axis])
    elif kind == "shape":
        shape = tuple(random.choice((1, 2, 3, 4, 6)) for _ in range(random.randint(0, 3)))
        expression = f"resize({v}, {shape})"
        result = result._replace(shape=shape, gain=value.gain * repeats(value.shape, shape))
    elif kind in ("transpose", "flip"):
        expression = f"{v}.T" if kind == "transpose" else f"jnp.flip({v})"
        result = result._replace(shape=value.shape[::-1] if kind == "transpose" else value.shape)
    elif kind == "sum":
        if ndim == 0:
            return None
        axis = random.randrange(ndim)
        expression = f"jnp.sum({v}, {axis}, dtype={v}.dtype)"
        shape = (*value.shape[:axis], *value.shape[axis + 1 :])
        result = result._replace(shape=shape, bound=value.bound * max(value.shape[axis], 1))
    elif kind == "rem":
        if is_complex or generator.is_real:
            return None
        expression = f"lax.rem({v}, jnp.asarray(8, {v}.dtype))"
        result = result._replace(bound=8)
    elif kind in ("product", "add"):
        others = [x for x in scope.values if x.dtype == value.dtype]
        other = random.choice(others)
        second = other.name if other.shape == value.shape else f"resize({other.name}, {value.shape})"
        other = other._replace(gain=other.gain * repeats(other.shape, value.shape))
        uses = (v, other.name)
        if kind == "add":
            expression = f"{v} + {second}"
            result = result._replace(
                bound=value.bound + other.bound, unit=max(value.unit, other.unit), gain=value.gain + other.gain
            )
        else:
            expression = f"{v} * {second}"
            factor = 2 if is_complex else 1
            result = result._replace(
                bound=factor * value.bound * other.bound, unit=value.unit * other.unit,
                gain=factor * (value.gain * other.bound + other.gain * value.bound),
            )  # fmt: skip
    else:
        return _cast(generator, scope, value, name)
    return Step((name,), expression, uses, (), (v,) if result.shape == value.shape else (), (kind,)), [result]


def _cast(generator, scope, value: Value, name: str):
    if generator.is_derived or generator.is_real or scope.is_loop or value.dtype.startswith("complex"):
        return None
    dtype = generator.random.choice((*_INTEGERS, "bool", "float32"))
    v = value.name
    if value.dtype == "bool" or dtype == "bool":
        expression, bound = (f"{v}.astype(jnp.{dtype})" if dtype != "bool" else f"{v} != 0"), 1
    else:
        # The remainder of an integer fits into every dtype.
        expression, bound = f"(lax.round({v}) if jnp.issubdtype({v}.dtype, jnp.floating) else {v})", 8
        expression = f"jnp.abs(lax.rem({expression}, jnp.asarray(8, {v}.dtype))).astype(jnp.{dtype})"
    return Step((name,), expression, (v,), (), (), ("cast",)), [
        value._replace(name=name, dtype=dtype, bound=bound, unit=1)
    ]
