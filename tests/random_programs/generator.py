"""Makes random programs, in which all arithmetic is exact so that every order of additions gives the same bits.

Values are small integers, or multiples of a power of two. For each value the generator knows a bound of its magnitude
and one of its derivatives (`Value.gain`: each operation's factor, multiplied along paths and summed over them). It only
chooses operations that keep both below what the dtype represents exactly. Integers may wrap around.

One program of eight has real numbers, which are rounded. It is compared with the same program in a wider dtype. Let a
value of the program be at most B, and let it come of R roundings, each relative and at most eps. Each operation is
Lipschitz, with the factor by which it multiplies the bound (a product: with the bounds of both). So what a rounding
adds to a result is at most eps times the result's bound, and all together eps * R * B. The same holds for derivatives,
with the gain in the place of the bound, and twice as many roundings.
"""

import math
import random
from dataclasses import dataclass, field, replace

import calls
import local_steps
from program import Body, Operand, Program, Step, Value

MAX_DEVICES = 8
# The largest integer up to which all integers are exact.
EXACT = {"float32": 2**24, "float64": 2**53, "bfloat16": 2**8, "float16": 2**11, "complex64": 2**24}
# For real numbers: what must not overflow.
LARGEST_REAL = {"float32": 2.0**100, "bfloat16": 2.0**100, "float16": 2.0**14}
WITHOUT_DERIVATIVE = ("forward", "vmap", "vmap_outside")
TRANSFORMATIONS = ("forward",) * 4 + (
    "grad", "grad", "grad_outside", "jvp", "linearize", "hessian", "vmap", "vmap_outside", "vmap_of_grad",
)  # fmt: skip
FLOATS = ("float32",) * 6 + ("bfloat16", "float16", "complex64", "float64")
OTHERS = ("int32", "int8", "uint8", "int16", "uint16", "uint32", "bool", "int64", "uint64")
MESHES = (
    (2,), (3,), (4,), (5,), (6,), (7,), (8,), (1, 3), (2, 2), (2, 3), (3, 2), (2, 4), (4, 2), (4, 1), (2, 2, 2),
    (2, 1, 3), (1, 2, 2), (2, 3, 1),
)  # fmt: skip
LARGEST = 1500  # elements of a value
WRAPPERS = (
    "scan", "fori", "while_loop", "cond", "cond_by_rank", "switch", "remat", "jit", "custom_vjp", "custom_jvp",
    "batch", "named_batch", "unbatched",
)  # fmt: skip


@dataclass
class Scope:
    """Where a step is: in the program, or in a function within it.

    axes: sizes of the axes that collectives may use, by name.
    batch_axes: those of them that are of vmap.
    is_loop: whether what follows may run several times, so that units must not grow.
    """

    axes: dict[str, int]
    batch_axes: tuple[str, ...] = ()
    is_loop: bool = False
    values: list[Value] = field(default_factory=list)


class Generator:
    """Makes the program of a seed. Shorter programs of a seed are prefixes of longer ones."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.names = 0
        self.lcm = 1  # of the odd parts of the sizes of groups in which there is a mean
        self.is_real = False
        self.roundings = 0.0
        self.paths = 0.0  # the sum of the gains of all values

    def program(self) -> Program:
        """The program of the seed."""
        pick = self.random.choice
        sizes = pick(MESHES)
        mesh = dict(zip("abc", sizes, strict=False))
        devices = self.random.sample(range(MAX_DEVICES), math.prod(sizes))
        self.check_vma, self.x64 = self.random.random() < 0.5, self.random.random() < 0.15
        self.transformation = pick(TRANSFORMATIONS)
        self.is_real = self.random.random() < 0.125
        if self.is_real:
            self.x64, self.transformation = False, pick(("forward", "grad", "grad_outside", "jvp", "vmap"))
        self.is_derived = self.transformation not in WITHOUT_DERIVATIVE
        with_floats = self.is_derived or self.random.random() < 0.5
        dtypes = [name for name in (FLOATS if with_floats else OTHERS) if self.x64 or "64" not in name[-2:]]
        dtypes += ["complex64"] * with_floats
        if self.transformation == "hessian":
            dtypes = [name for name in dtypes if name in ("float32", "float64")]
        self.dtype = pick(list(LARGEST_REAL) if self.is_real else dtypes)
        operands = self._operands(mesh)
        scope = Scope(dict(mesh))
        scope.values = [Value(f"x{i}", x.shape, x.dtype, x.bound) for i, x in enumerate(operands)]
        self.paths = len(operands)
        steps: list[Step] = []
        for _ in range(self.random.randint(2, 6)):
            if step := self.step(scope, depth=0):
                steps.append(step)
        return Program(
            self.seed, mesh, tuple(devices), self.check_vma, self.x64, self.transformation, self.lcm,
            tuple(operands), tuple(steps), self._tolerance(scope),
        )  # fmt: skip

    def _tolerance(self, scope: Scope) -> tuple[float, float] | None:
        """How many roundings there are, and the largest magnitude of a result."""
        if not self.is_real:
            return None
        elements = sum(math.prod(x.shape) for x in scope.values)
        most = max(max(x.bound for x in scope.values) * max(elements, 1), 2 * self.lcm * self.paths)
        return 2 * (self.roundings + elements), most

    def _operands(self, mesh: dict[str, int]) -> list[Operand]:
        operands = []
        for i in range(self.random.randint(1, 2)):
            small = self.transformation == "hessian"
            rank = self.random.choice((0, 1, 1) if small else (0, 1, 1, 2, 2, 3))
            dims = (1, 2, 3) if small else (1, 2, 3, 4, 5, 7, 8, 12, 2, 3, 6, 4, 5, 0)
            shape = tuple(self.random.choice(dims) for _ in range(rank))
            axes = tuple(mesh) if i == 0 or self.random.random() < 0.5 else tuple(self.subset(list(mesh)))
            dtype = (
                self.dtype if i == 0 or self.is_derived or self.is_real else self.random.choice((self.dtype, "int32"))
            )
            bound = 2 if self.dtype in ("bfloat16", "float16") else 3
            operands.append(Operand(shape, dtype, axes, bound))
        return operands

    # ---- Choices --------------------------------------------------------------------------------------------------

    def subset(self, items: list) -> list:
        """A random subset, which may be empty, in its order."""
        return [item for item in items if self.random.random() < 0.5]

    def name(self) -> str:
        """A name that no other value has."""
        self.names += 1
        return f"v{self.names}"

    def has_room(self, dtype: str, bound: float, unit: int, gain: float) -> bool:
        """Whether a value is exact, and its derivatives are."""
        if dtype not in EXACT:
            return True
        if self.is_real:
            return max(bound, 2 * self.lcm * (self.paths + gain)) <= LARGEST_REAL[self.dtype]
        if bound * unit > EXACT[dtype]:
            return False
        if not self.is_derived:
            return True
        # Weights and tangents are at most 2 * lcm. A second derivative multiplies two first ones.
        most = 2 * self.lcm * (self.paths + gain) * unit
        return most**2 <= EXACT[dtype] if self.transformation == "hessian" else most <= EXACT[self.dtype]

    # ---- Steps ----------------------------------------------------------------------------------------------------

    def step(self, scope: Scope, depth: int) -> Step | None:
        """A random step with a value of the scope, or None if all that was tried does not fit."""
        for _ in range(12):
            value = scope.values[-1] if self.random.random() < 0.5 else self.random.choice(scope.values[-4:])
            kind = self.random.random()
            before = self.lcm
            if kind < 0.55:
                made = calls.call(self, scope, value)
            elif kind < 0.75 or depth == 2:
                made = local_steps.local_step(self, scope, value)
            else:
                made = self.wrapped(scope, value, depth)
            if made is None:
                self.lcm = before
                continue
            step, results = made
            if all(math.prod(x.shape) <= LARGEST and self.has_room(*x[2:]) for x in results):
                scope.values += results
                self.paths += sum(x.gain for x in results)
                repeats = max(x.gain for x in results) / value.gain
                self.roundings += 2 + math.prod(scope.axes.values()) + max(value.shape, default=0) + repeats
                return step
            self.lcm = before
        return None

    def body(self, scope: Scope, value: Value, depth: int, *, keeps_type: bool, **more) -> tuple[Body, Value] | None:
        """A function of a value, and its result for this value."""
        argument, name = self.name(), f"f{self.names}"
        inner = replace(scope, values=[value._replace(name=argument)], **more)
        steps: list[Step] = []
        if inner.is_loop and value.dtype in EXACT and not value.dtype.startswith("complex"):
            # So that the bound is the same in all iterations.
            start = value._replace(name=self.name(), bound=8)
            steps.append(Step((start.name,), f"lax.rem({argument}, jnp.asarray(8, {argument}.dtype))", (argument,)))
            inner.values = [start]
        for _ in range(self.random.randint(1, 3)):
            if step := self.step(inner, depth + 1):
                steps.append(step)
        last = inner.values[-1]
        result = last.name
        if keeps_type:
            # A change of the dtype would not be exact in both directions.
            if last.dtype != value.dtype:
                return None
            if last.shape != value.shape:
                result = f"resize({result}, {value.shape})"
                last = last._replace(shape=value.shape, gain=last.gain * local_steps.repeats(last.shape, value.shape))
        return Body(name, argument, tuple(steps), result), last

    def wrapped(self, scope: Scope, value: Value, depth: int):
        """Steps in control flow, or under a transformation."""
        kind = self.random.choice(WRAPPERS)
        if kind == "while_loop" and self.is_derived:
            return None
        if kind == "custom_vjp" and self.transformation in ("jvp", "linearize"):
            return None  # it has no derivative in forward mode
        if kind in ("scan", "fori", "while_loop"):
            return self._loop(kind, scope, value, depth)
        if kind in ("cond", "cond_by_rank", "switch"):
            return self._branches(kind, scope, value, depth)
        if kind in ("batch", "named_batch", "unbatched"):
            return self._batch(kind, scope, value, depth)
        made = self.body(scope, value, depth, keeps_type=False)
        if made is None:
            return None
        body, last = made
        options = ""
        if kind == "remat":
            options = self.random.choice(("", ", 'everything_saveable'", ", 'nothing_saveable'", ", 'dots_saveable'"))
        name = self.name()
        # The derivative is evaluated in this dtype.
        result = last._replace(name=name, gain=2 * last.gain)
        plain = f"{body.name}({value.name})"
        return Step(
            (name,), f"{kind}({body.name}, {value.name}{options})", (value.name,), (body,), (plain,), (kind,)
        ), [result]

    def _loop(self, kind: str, scope: Scope, value: Value, depth: int):
        if value.dtype.startswith("complex") or value.unit > 1 or self.is_real:
            return None
        made = self.body(scope, value, depth, keeps_type=True, is_loop=True)
        if made is None:
            return None
        body, last = made
        length = self.random.randint(1, 3)
        ratio = max(last.gain / value.gain, 1)
        gain, bound = 2 * value.gain * ratio**length, 2 * last.bound
        if not self.has_room(last.dtype, bound, last.unit, gain):
            return None
        name = self.name()
        plain = (f"{body.name}({value.name})", f"{kind}({body.name}, {value.name}, 1)")
        return Step((name,), f"{kind}({body.name}, {value.name}, {length})", (value.name,), (body,), plain, (kind,)), [
            last._replace(name=name, bound=bound, gain=gain)
        ]

    def _branches(self, kind: str, scope: Scope, value: Value, depth: int):
        names = list(scope.axes)
        options: dict = {}
        index = f"hidden({self.random.randint(0, 1)})"
        if kind == "cond_by_rank":
            # Ranks along one axis may differ if the collectives are over the others.
            mesh_names = [name for name in names if name not in scope.batch_axes and scope.axes[name] > 1]
            if len(mesh_names) < 2:
                return None
            axis = self.random.choice(mesh_names)
            options["axes"] = {name: size for name, size in scope.axes.items() if name != axis}
            index = f"lax.axis_index({axis!r}) % 2"
        bodies, results = [], []
        for _ in range(2 if kind == "switch" else 1):
            made = self.body(scope, value, depth, keeps_type=True, **options)
            if made is None:
                return None
            bodies.append(made[0])
            results.append(made[1])
        name = self.name()
        result = Value(
            name, value.shape, value.dtype, max(x.bound for x in (value, *results)),
            max(x.unit for x in (value, *results)), sum(x.gain for x in (value, *results)),
        )  # fmt: skip
        plain = f"{bodies[0].name}({value.name})"
        if kind == "switch":
            expression = f"switch([{', '.join(body.name for body in bodies)}], {value.name}, {index})"
        else:
            expression = f"cond({bodies[0].name}, {value.name}, {index} == 1)"
        return Step((name,), expression, (value.name,), tuple(bodies), (plain,), (kind,)), [result]

    def _batch(self, kind: str, scope: Scope, value: Value, depth: int):
        count = self.random.randint(2, 3)
        axis = f"m{depth}"
        options: dict = {}
        if kind != "batch" and self.check_vma and self.is_derived:
            return None  # lax has no collectives over vmap axes there, of which the derivative could be a reference
        if kind != "batch":
            options = {"axes": {**scope.axes, axis: count}, "batch_axes": (*scope.batch_axes, axis)}
        made = self.body(scope, value, depth, keeps_type=False, **options)
        if made is None:
            return None
        body, last = made
        name = self.name()
        if kind == "unbatched":
            expression, at = f"unbatched({body.name}, {value.name}, {count}, {axis!r})", 0
        else:
            in_axis, at = self.random.randint(0, len(value.shape)), self.random.randint(0, len(last.shape))
            named = f", {axis!r}" if kind == "named_batch" else ""
            expression = f"batch({body.name}, {value.name}, {count}, {in_axis}, {at}{named})"
        shape = (*last.shape[:at], count, *last.shape[at:])
        result = last._replace(name=name, shape=shape, gain=last.gain * count)
        return Step((name,), expression, (value.name,), (body,), (), (kind,)), [result]


def make(seed: int) -> Program:
    """The program of a seed."""
    return Generator(seed).program()
