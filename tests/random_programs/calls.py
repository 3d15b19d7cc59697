"""Steps of random programs that call a collective: operands that fit, random arguments, what results are."""

import math

from local_steps import repeats
from program import Step, Value

# Dtypes that are moved, and not computed with; all hold small integers.
_MOVED = ("int4", "uint4", "float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2fnuz")
_ALGORITHMS = ("auto", "one_shot", "two_shot", "ring")
KINDS = (
    "psum", "pmean", "pmax", "pmin", "psum_scatter", "all_gather", "all_to_all", "pswapaxes", "ppermute", "pshuffle",
    "pbroadcast", "reduce", "broadcast", "ragged_all_to_all", "psum_of_constant", "tree",
)  # fmt: skip


class Call:
    """Random axes, groups and options of a call.

    Attributes:
      axes: of the mesh or vmap.
      size: that of a group.
      arguments: in the source, all but the operand, from the axes on.
    """

    def __init__(self, generator, scope, kind: str) -> None:
        random = generator.random
        mesh = [axis for axis in scope.axes if axis not in scope.batch_axes]
        self.groups = None
        if scope.batch_axes and random.random() < 0.5 and kind != "ragged_all_to_all":
            self.axes = [random.choice(scope.batch_axes)]
            # A reduction is the one over one axis after the other.
            if kind in ("psum", "pmax", "pmin", "tree", "psum_of_constant") and random.random() < 0.3:
                self.axes += generator.subset(mesh)
        else:
            self.axes = random.sample(mesh, random.randint(1, len(mesh))) if mesh else [*scope.batch_axes[:1]]
        self.over_batch = any(axis in scope.batch_axes for axis in self.axes)
        self.size = math.prod(scope.axes[axis] for axis in self.axes)
        if kind in ("ppermute", "pshuffle", "tree") and random.random() < 0.8:
            self.axes.sort(key=list(scope.axes).index)
        named = self.axes[0] if len(self.axes) == 1 and random.random() < 0.7 else tuple(self.axes)
        self.arguments = [repr(named)]
        self.random, self.generator = random, generator

    def choose_groups(self, *, equal: bool = True) -> None:
        """Groups of the ranks, at random. Not over vmap axes, where JAX has none."""
        if self.over_batch or self.size == 1 or self.random.random() < 0.7:
            return
        ranks = self.random.sample(range(self.size), self.size)
        if equal:
            each = self.random.choice([n for n in range(1, self.size + 1) if self.size % n == 0])
            self.groups = [ranks[i : i + each] for i in range(0, self.size, each)]
            self.size = each
        else:
            cut = self.random.randint(1, self.size)
            self.groups = [group for group in (ranks[:cut], ranks[cut:]) if group]
        self.arguments.append(f"axis_index_groups={self.groups}")

    def option(self, text: str) -> None:
        """One more argument."""
        self.arguments.append(text)

    def choose_options(self, *, algorithms: bool) -> None:
        """Options of jax_ring's sums, which do not change the results of exact ones."""
        if self.random.random() < 0.3:
            orders = ("any", "tree") if self.groups is None and not self.over_batch else ("any",)
            if algorithms and self.random.random() < 0.5:
                self.option(f"algorithm={self.random.choice(_ALGORITHMS)!r}")
            else:
                self.option(f"order={self.random.choice((*orders, 'ring'))!r}")


def call(generator, scope, value: Value):
    """A random call, and its results; None if what was chosen does not fit."""
    random = generator.random
    kind = random.choice(KINDS)
    made = Call(generator, scope, kind)
    if kind == "tree":
        return _tree(generator, scope, value, made)
    maker = {
        "psum_scatter": _scatter, "all_gather": _gather, "all_to_all": _all_to_all, "pswapaxes": _all_to_all,
        "ppermute": _permute, "pshuffle": _permute, "pbroadcast": _rooted, "reduce": _rooted, "broadcast": _rooted,
        "ragged_all_to_all": _ragged,
    }.get(kind, _reduction)  # fmt: skip
    operand, result = f"{value.name}", value._replace(name=generator.name())
    described = maker(kind, generator, scope, value, made)
    if described is None:
        return None
    operand, changes = described
    name = "psum" if kind == "psum_of_constant" else kind
    expression = f"ops.{name}({operand}, {', '.join(made.arguments)})"
    if kind == "psum_of_constant":
        expression = f"{value.name} * {expression}"
    elif kind in ("ppermute", "pshuffle", "all_to_all") and value.dtype in ("float32", "int32") and not scope.is_loop:
        expression = _through(generator, value, operand, expression)
    result = result._replace(**changes)
    simpler = (value.name,) if (result.shape, result.dtype) == (value.shape, value.dtype) else ()
    features = (kind, *(f"{kind} in groups" for _ in [0] if made.groups is not None))
    return Step((result.name,), expression, (value.name,), (), simpler, features), [result]


def _through(generator, value: Value, operand: str, expression: str) -> str:
    """The call, with its operand cast to a dtype that is only moved."""
    if (
        generator.is_derived
        or generator.is_real
        or value.bound > 7
        or value.unit > 1
        or generator.random.random() < 0.6
    ):
        return expression
    dtype = generator.random.choice(_MOVED)
    cast = f"({operand}).astype(jnp.{dtype})"
    return f"{expression.replace(operand, cast, 1)}.astype({value.name}.dtype)"


def _resized(value: Value, shape: tuple) -> tuple[str, float]:
    """The operand of this shape, and the factor of the gain."""
    if shape == value.shape:
        return value.name, value.gain
    return f"resize({value.name}, {shape})", value.gain * repeats(value.shape, shape)


def _reduction(kind: str, generator, scope, value: Value, made: Call):
    is_float, is_complex = value.dtype in ("float32", "float64", "bfloat16", "float16"), "complex" in value.dtype
    operand, changes = value.name, {}
    if kind == "psum_of_constant":
        if value.dtype == "bool":
            return None
        return "1", {"bound": value.bound * made.size, "gain": value.gain * made.size}
    # lax.pmean divides by the size of the first group. A sum over a vmap axis takes no groups.
    if not generator.check_vma:
        made.choose_groups(equal=kind == "pmean")
    if kind in ("pmax", "pmin"):
        if is_complex:
            return None
        if generator.is_derived:
            operand = f"lax.stop_gradient({operand})"
        if generator.random.random() < 0.3 and made.groups is None:
            made.option(f"algorithm={generator.random.choice(_ALGORITHMS)!r}")
        return operand, {}
    changes = {"bound": value.bound * made.size, "gain": value.gain * made.size}
    if kind == "pmean":
        if not (is_float or is_complex):
            return None
        odd = made.size
        while odd % 2 == 0:
            odd //= 2
        # Exact, because what is divided is a multiple of the odd part.
        generator.lcm = math.lcm(generator.lcm, odd)
        is_whole = scope.is_loop or generator.random.random() < 0.5
        factor = made.size if is_whole else odd
        operand = f"{operand} * {factor}" if factor > 1 else operand
        changes["bound"] *= factor
        changes["gain"] *= made.size
        if not is_whole:
            changes["unit"] = value.unit * (made.size // odd)
    elif value.dtype == "bool":
        changes["dtype"] = "int32"
    made.choose_options(algorithms=True)
    return operand, changes


def _scatter(kind: str, generator, scope, value: Value, made: Call):
    if value.dtype == "bool":
        return None
    made.choose_groups()
    random, p = generator.random, made.size
    shape = list(value.shape) or [p]
    dim = random.randrange(len(shape))
    tiled = random.random() < 0.5
    shape[dim] = p * random.choice((0, 1, 1, 2, 3)) if tiled else p
    operand, gain = _resized(value, tuple(shape))
    made.option(f"scatter_dimension={dim}")  # lax takes no negative ones
    if tiled:
        made.option("tiled=True")
        shape[dim] //= p
    else:
        del shape[dim]
    made.choose_options(algorithms=False)
    return operand, {"shape": tuple(shape), "bound": value.bound * p, "gain": gain * p}


def _gather(kind: str, generator, scope, value: Value, made: Call):
    random = generator.random
    made.choose_groups()
    tiled = bool(value.shape) and random.random() < 0.5
    dim = random.randrange(len(value.shape) + (not tiled))
    shape = list(value.shape)
    if tiled:
        shape[dim] *= made.size
        made.option("tiled=True")
    else:
        shape.insert(dim, made.size)
    made.option(f"axis={dim - (len(shape) if random.random() < 0.2 else 0)}")
    if generator.check_vma and made.groups is None and not scope.batch_axes and random.random() < 0.3:
        made.option("to='invarying'")
    return value.name, {"shape": tuple(shape), "gain": value.gain * made.size}


def _all_to_all(kind: str, generator, scope, value: Value, made: Call):
    random = generator.random
    made.choose_groups()
    p = made.size
    shape = list(value.shape) or [p]
    split = random.randrange(len(shape))
    concat = split if kind == "pswapaxes" or random.random() < 0.4 else random.randrange(len(shape))
    tiled = kind == "all_to_all" and random.random() < 0.5
    shape[split] = p * random.choice((0, 1, 1, 2, 3)) if tiled else p
    operand, gain = _resized(value, tuple(shape))
    if kind == "pswapaxes":
        made.arguments.insert(1, f"{split}")
    else:
        made.arguments[1:1] = [f"{split}", f"{concat}"]
    if tiled:
        made.option("tiled=True")
        shape[split] //= p
        shape[concat] *= p
    else:
        del shape[split]
        shape.insert(concat, p)
    return operand, {"shape": tuple(shape), "gain": gain}


def _permute(kind: str, generator, scope, value: Value, made: Call):
    random, p = generator.random, made.size
    receivers = random.sample(range(p), p)
    if kind == "pshuffle":
        made.arguments.insert(1, f"{receivers}")
    else:
        pairs = [(i, j) for i, j in enumerate(receivers) if random.random() < 0.8]
        made.arguments.insert(1, f"{random.sample(pairs, len(pairs))}")
    return value.name, {}


def _rooted(kind: str, generator, scope, value: Value, made: Call):
    root = generator.random.randrange(made.size)
    changes: dict = {"gain": value.gain * made.size}
    if kind == "pbroadcast":
        made.arguments.insert(1, f"{root}")
    else:
        made.option(f"root={root}")
    if kind == "reduce":
        changes["bound"] = value.bound * made.size
        if value.dtype == "bool":
            changes["dtype"] = "int32"
        made.choose_options(algorithms=True)
    return value.name, changes


def _ragged(kind: str, generator, scope, value: Value, made: Call):
    random = generator.random
    if made.over_batch:
        return None
    made.choose_groups()
    rows, received = random.choice((0, 3, 5, 8)), random.choice((1, 4, 7, 12))
    row = value.shape[1:]
    made.option(f"seed={random.randrange(1000)}")
    made.option(f"slices={random.choice((1, 1, 2))}")
    operand, _ = _resized(value, (rows, *row))
    output, _ = _resized(value, (received, *row))
    gain = value.gain * (repeats(value.shape, (rows, *row)) + repeats(value.shape, (received, *row)))
    return f"({operand}, {output})", {"shape": (received, *row), "gain": gain}


def _tree(generator, scope, value: Value, made: Call):
    """One call for several values."""
    random = generator.random
    kind = random.choice(("psum", "ppermute", "pmax", "all_gather"))
    if made.over_batch and len(made.axes) > 1 and kind in ("ppermute", "all_gather"):
        return None
    others = [random.choice(scope.values) for _ in range(random.randint(1, 2))]
    values = [value, *others]
    if kind == "pmax" and any(x.dtype.startswith("complex") for x in values):
        return None
    names = [generator.name() for _ in values]
    operands = [f"lax.stop_gradient({x.name})" if kind == "pmax" and generator.is_derived else x.name for x in values]
    tree = f'{{"p": {operands[0]}, "q": [{", ".join(operands[1:])}]}}'
    if kind == "ppermute":
        _permute(kind, generator, scope, value, made)
    results = []
    for name, x in zip(names, values, strict=True):
        result = x._replace(name=name)
        if kind == "psum":
            dtype = "int32" if x.dtype == "bool" else x.dtype
            result = result._replace(dtype=dtype, bound=x.bound * made.size, gain=x.gain * made.size)
        elif kind == "all_gather":
            result = result._replace(shape=(made.size, *x.shape), gain=x.gain * made.size)
        results.append(result)
    expression = f"jax.tree.leaves(ops.{kind}({tree}, {', '.join(made.arguments)}))"
    return Step(tuple(names), expression, tuple(x.name for x in values), (), (), ("tree", kind)), results
