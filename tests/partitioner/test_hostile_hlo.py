"""HLO that XLA would not write: it takes no memory, no time and no exception, and the program is left to XLA."""

import contextlib
import tracemalloc
import warnings
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_mesh, run_python
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tiers import full_but

from jax_ring import override_lax
from jax_ring.lowering.hlo import collectives, for_gpus, hook, proto
from jax_ring.lowering.hlo.collectives import DEVICE_LIST, IOTA, LISTS, MESH_AXES, groups_of
from jax_ring.lowering.hlo.program import EngineCall, Program
from jax_ring.lowering.hlo.proto import Message, Unsupported, data, integer, packed
from jax_ring.lowering.hlo.shapes import Shape

TUPLE = Message([integer(2, 13)])


@contextlib.contextmanager
def little_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


# ---- Groups ----------------------------------------------------------------------------------------------------------


def by_iota(shape, permutation=(), groups=(1, 4)) -> Message:
    sizes = [integer(1, groups[0]), integer(2, groups[1])]
    return Message([*sizes, packed(3, shape), *([packed(4, permutation)] if permutation else [])])


def by_axes(sizes, references=((0,),), iota=None, ids=()) -> Message:
    """By mesh axes: (axis), or (axis, size before, size) of a part."""
    axes = [data(1, Message([integer(2, size)])) for size in sizes]
    devices = [data(3, Message([packed(1, iota)]))] if iota else [packed(2, ids)] if ids else []
    named = [
        Message([integer(1, axis), *([data(2, Message([integer(1, part[0]), integer(2, part[1])]))] if part else [])])
        for axis, *part in references
    ]
    return Message([data(1, Message([*axes, *devices])), *(data(2, each) for each in named)])


GROUPS = {
    "iota that is large": (IOTA, by_iota([1 << 22])),
    "iota that is huge": (IOTA, by_iota([1 << 62, 1 << 62])),
    "iota of many dimensions": (IOTA, by_iota([1 << 62] * 5_000)),
    "iota of size 0": (IOTA, by_iota([0, 4])),
    "iota of negative sizes": (IOTA, by_iota([-2, -2])),
    "iota in an unknown number of groups": (IOTA, by_iota([4], groups=(-1, 4))),
    "iota in no groups": (IOTA, by_iota([4], groups=(0, 4))),
    "iota in other groups": (IOTA, by_iota([4], groups=(2, 4))),
    "iota transposed by a negative dimension": (IOTA, by_iota([2, 2], [-1, 0])),
    "iota transposed by a dimension twice": (IOTA, by_iota([2, 2], [0, 0])),
    "iota within a list": (DEVICE_LIST, Message([data(2, by_iota([1 << 22]))])),
    "axis that is large": (MESH_AXES, by_axes([1 << 22])),
    "axis that is huge": (MESH_AXES, by_axes([1 << 62, 1 << 62])),
    "axis of size 0": (MESH_AXES, by_axes([0, 4])),
    "axes in large number": (MESH_AXES, by_axes([1 << 62] * 5_000)),
    "axis that is not there": (MESH_AXES, by_axes([2, 2], [(2,)])),
    "axis of negative number": (MESH_AXES, by_axes([2, 2], [(-1,)])),
    "axis twice": (MESH_AXES, by_axes([2, 2], [(0,), (0,)])),
    "axis very often": (MESH_AXES, by_axes([2, 2], [(0,)] * 5_000)),
    "part of size 0": (MESH_AXES, by_axes([4], [(0, 0, 2)])),
    "part of negative size": (MESH_AXES, by_axes([4], [(0, -2, -2)])),
    "part beyond the axis": (MESH_AXES, by_axes([4], [(0, 4, 1 << 20)])),
    "mesh of a large iota": (MESH_AXES, by_axes([4], iota=[1 << 22])),
    "mesh of other devices": (MESH_AXES, by_axes([4], ids=[0, 1, 2])),
    "mesh of far devices": (MESH_AXES, by_axes([4], ids=[0, 1, 2, -(1 << 63)])),
    "list that is long": (LISTS, Message([packed(1, [0] * 20_000)])),
}


@pytest.mark.parametrize("name", GROUPS)
def test_groups_are_compared_with_the_partitions_first(name):
    encoding, message = GROUPS[name]
    instruction = Message([data(encoding, message)])
    with little_memory(), pytest.raises(Unsupported) as raised:
        groups_of(instruction, 4)
    assert len(str(raised.value)) < 400


# ---- Messages and shapes ---------------------------------------------------------------------------------------------


def test_integers_end():
    assert Message.parse(b"\x08" + b"\xff" * 9 + b"\x01").integer(1) == -1
    for number in (10, 400_000):
        with pytest.raises(ValueError, match="more than 10 bytes"):
            Message.parse(b"\x08" + b"\x80" * number + b"\x01")


def nested(depth: int) -> Message:
    message = Message([integer(2, 11)])
    for _ in range(depth):
        message = Message([*TUPLE.fields, data(4, message)])
    return message


def test_shapes_are_read_one_level_at_a_time():
    with pytest.raises(Unsupported, match="unknown fields"):
        Shape(nested(3000)).arrays[0].check()
    with pytest.raises(Unsupported, match="10000 dimensions"):
        Shape(Message([integer(2, 11), packed(3, [1 << 62] * 10_000)]))


def constant(id_: int, value: int) -> Message:
    literal = Message([data(1, Message([integer(2, 4)])), packed(4, [value])])
    return Message([data(2, "constant"), integer(35, id_), data(3, Message([integer(2, 4)])), data(8, literal)])


@pytest.mark.parametrize(
    ("length", "base", "expected"), [(4, 2, [65536]), (5, 2, None), (5, 1, [1]), (10_000, 1, None)]
)
def test_expressions_that_are_evaluated_end(length, base, expected):
    """Squares of squares have more digits than memory holds."""
    by_id = {0: constant(0, base)}
    for id_ in range(1, length + 1):
        operands = packed(proto.OPERANDS, [id_ - 1, id_ - 1])
        by_id[id_] = Message([data(2, "multiply"), integer(35, id_), data(3, Message([integer(2, 4)])), operands])
    with little_memory():
        assert for_gpus._evaluator(by_id, partition=0)(length) == expected


# ---- Programs --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def program() -> bytes:
    """A program of collectives and what surrounds them, as XLA hands it over."""
    handed: list[bytes] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hook, "transform", lambda platform, program: handed.append(program))
        mesh = make_mesh((2, 4), ("i", "j"))
        rows, whole = NamedSharding(mesh, P("i", "j")), NamedSharding(mesh, P())
        with override_lax(partitioner=True):
            f = jax.jit(lambda x: ((x * 2).sum(0), x @ x), in_shardings=rows, out_shardings=whole)
            f.lower(jnp.ones((8, 8))).compile()
    (program,) = [each for each in handed if hook._MARK.encode() in each]
    return program


def changed(message: Message, number: int, change) -> Message:
    """A message in which all messages of a field are changed."""
    return Message([data(number, change(Message.parse(x))) if n == number else (n, t, x) for n, t, x in message.fields])


def with_instructions(program: bytes, change) -> bytes:
    """The program, of whose computations with collectives each instruction is changed."""

    def of_computation(body: Message) -> Message:
        has_any = collectives.may_hold_any(body.to_bytes())
        return changed(body, proto.INSTRUCTIONS, change) if has_any else body

    return changed(Message.parse(program), proto.COMPUTATIONS, of_computation).to_bytes()


def is_left(program: bytes, platform="cpu") -> bool:
    """Whether the program is left to XLA, with or without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return hook.transform(platform, program) is None


def operand_of_itself(instruction: Message) -> Message:
    own = [proto.data(2, "bitcast"), packed(proto.OPERANDS, [instruction.integer(proto.ID)])]
    is_collective = collectives.is_collective(instruction.text(proto.OPCODE))
    return instruction if is_collective else Message([*instruction.without(2, proto.OPERANDS), *own])


PROGRAMS = {
    "operand of itself": lambda program: with_instructions(program.to_bytes(), operand_of_itself),
    "many partitions on one device": lambda program: Message(
        [*program.without(15), data(15, Message([integer(1, 1), *[data(3, Message([packed(1, [0])]))] * 10_000]))]
    ).to_bytes(),
    "name that is no text": lambda program: Message([*program.fields, data(1, b"\xff\x1b")]).to_bytes(),
    "order that there is none of": lambda program: program.to_bytes().replace(b"+rank ", b"+rink "),
    "half": lambda program: program.to_bytes()[: len(program.to_bytes()) // 2],
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_are_left_to_xla(program, name):
    assert not is_left(program)
    changed = PROGRAMS[name](Message.parse(program))
    assert changed != program
    assert hook._MARK.encode() in changed or name == "half"
    with little_memory():
        assert is_left(changed)


def test_a_result_of_many_levels(program):
    """It is none of the collectives'."""
    nested_result = data(4, Message([data(2, nested(3000))]))
    assert not is_left(Message([*Message.parse(program).fields, nested_result]).to_bytes())


@pytest.mark.parametrize("error", [RecursionError, MemoryError, UnicodeError, AssertionError])
def test_errors_leave_the_program_to_xla(program, monkeypatch, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(hook, "_devices_of", fail)
    with pytest.warns(RuntimeWarning, match=f"could not read the program: {error.__name__}"):
        assert hook.transform("cpu", program) is None


def test_names_are_escaped(program, monkeypatch):
    monkeypatch.setattr(hook, "_devices_of", lambda *_: [][0])
    renamed = Message([*Message.parse(program).fields, data(1, "jit_\x1b[2J")]).to_bytes()
    with pytest.warns(RuntimeWarning, match=r"collectives of jit_\\x1b\[2J to XLA"):
        hook.transform("cpu", renamed)


# ---- Mutations -------------------------------------------------------------------------------------------------------

# Numbers at the limits of types and of the encoding.
EXTREMES = [0, 1, 2, 127, 128, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1]


def mutated(data_: bytes, random: np.random.Generator) -> bytes:
    """Bytes with one change of some kind, maybe in the middle of a field."""
    at, length = int(random.integers(len(data_))), int(random.integers(1, 9))
    other = int(random.integers(len(data_)))
    kind = random.integers(5)
    if kind == 0:
        return data_[:at] + bytes([data_[at] ^ 1 << int(random.integers(8))]) + data_[at + 1 :]
    if kind == 1:
        return data_[:at] + data_[at + length :]
    if kind == 2:
        return data_[:at] + random.bytes(length) + data_[at:]
    if kind == 3:
        return data_[:at] + data_[other : other + length] + data_[at + length :]
    return data_[:at]


def mutated_field(message: Message, random: np.random.Generator, depth: int = 0) -> Message:
    """A message with one field changed, at any depth, and all lengths around it right."""
    fields = list(message.fields)
    if not fields:
        return Message([integer(int(random.integers(1, 100)), EXTREMES[random.integers(len(EXTREMES))])])
    at = int(random.integers(len(fields)))
    number, kind, value = fields[at]
    if isinstance(value, bytes) and value and depth < 6 and random.random() < 0.85:
        with contextlib.suppress(ValueError):
            fields[at] = number, kind, mutated_field(Message.parse(value), random, depth + 1).to_bytes()
            return Message(fields)
    choice = random.integers(4)
    if choice == 0:
        del fields[at]
    elif choice == 1:
        fields.insert(at, fields[random.integers(len(fields))])
    elif isinstance(value, int):
        fields[at] = integer(number, EXTREMES[random.integers(len(EXTREMES))])
    elif choice == 2:
        fields[at] = packed(number, [EXTREMES[i] for i in random.integers(len(EXTREMES), size=3)])
    else:
        fields[at] = number, kind, mutated(value, random) if value else b"\0"
    return Message(fields)


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize("seed", full_but(range(14), [0]))
def test_mutations(program, seed, platform, monkeypatch):
    """Whatever is changed in a program, it is read or left to XLA."""
    if seed or platform == "cuda":  # without the attributes of calls, which take most of the time, or a GPU
        monkeypatch.setattr(Program, "serve", lambda *_: EngineCall("", False))
        monkeypatch.setitem(hook._elsewhere, "", hook._Devices({each.id: each for each in jax.devices()}, None))
    assert not is_left(program, platform)
    random = np.random.default_rng(seed)
    message = Message.parse(program)
    left = 0
    for number in range(1000 if seed else 150):
        changed = mutated_field(message, random).to_bytes() if number % 4 else mutated(program, random)
        left += is_left(changed, platform)
    assert left


# ---- Calls that the partitioner divides ------------------------------------------------------------------------------

EXPORTED = """
import dataclasses, io
import jax.numpy as jnp
from jax._src.interpreters import mlir
from jax.export import DisabledSafetyCheck, export
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jaxlib.mlir import ir
from jax_ring import ring_psum

mesh = jax.make_mesh((2, 2), ("i", "j"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
f = jax.shard_map(lambda x: ring_psum(x, "i"), mesh=mesh, in_specs=P("i"), out_specs=P(), axis_names={"i"})
x = jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, P("i", "j")))
whole = export(jax.jit(f), disabled_checks=[DisabledSafetyCheck.custom_call("jax_ring.partitioned")])(x)
own = "num_own = dense<0> : tensor<2xi64>"
assert own in whole.mlir_module()
for numbers in ("0, 1", "1, 0", "3, 3", "-1, -1", "9223372036854775807, 0", "0, 0"):
    text = whole.mlir_module().replace(own, f"num_own = dense<[{numbers}]> : tensor<2xi64>")
    with mlir.make_ir_context():
        ir.Module.parse(text).operation.write_bytecode(file := io.BytesIO())
    edited = dataclasses.replace(whole, mlir_module_serialized=file.getvalue())
    try:
        print(numbers, jax.jit(edited.call)(x)[0, 0])
    except jax.errors.JaxRuntimeError as error:
        assert "behind their own dimensions they have the same" in str(error), error
        print(numbers, "refused")
"""


def test_dimensions_that_do_not_fit_are_refused():
    """XLA would divide by zero, and end the process."""
    result = run_python(EXPORTED)
    assert result.returncode == 0, result.stderr
    refused = ["0, 1", "1, 0", "3, 3", "-1, -1", "9223372036854775807, 0"]
    assert result.stdout.splitlines() == [*(f"{each} refused" for each in refused), "0, 0 2.0"]
