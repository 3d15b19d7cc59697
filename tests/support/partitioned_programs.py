"""Programs without a collective, whose arrays are divided, and a way to run what XLA makes of them on CPU devices."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src import compiler, xla_bridge
from jax._src.lib import xla_client
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxlib import _jax

from jax_ring.lowering.hlo import proto
from jax_ring.lowering.hlo.proto import Message


def _step(mesh, specs, batch, num_layers=3, width=128):
    """A training step of layers of two matrices and a bias, whose parameters have these specs."""

    def typed(spec, *shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))

    shapes = {"up": (width, 2 * width), "down": (2 * width, width), "bias": (width,)}
    layers = [{name: typed(specs[name], *shape) for name, shape in shapes.items()} for _ in range(num_layers)]

    def loss(layers, x):
        for layer in layers:
            x = jnp.tanh(x @ layer["up"]) @ layer["down"] + layer["bias"]
        return (x * x).mean()

    def step(layers, x):
        value, gradients = jax.value_and_grad(loss)(layers, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, layers, gradients), value

    return jax.jit(step, donate_argnums=0), (layers, typed(batch, 32, width))


def replicated(mesh):
    """Data-parallel: a sum for each gradient."""
    return _step(mesh, {"up": P(), "down": P(), "bias": P()}, P("a"))


def divided(mesh):
    """Parameters divided over an axis along their first dimension: gathers, and sums of which ranks take blocks."""
    return _step(mesh, {"up": P("a"), "down": P("a"), "bias": P("a")}, P(("a", "b")))


def divided_columns(mesh):
    """Parameters divided along their last dimension, whose blocks do not lie one after the other."""
    return _step(mesh, {"up": P(None, "a"), "down": P(None, "a"), "bias": P("a")}, P("a"))


def tensor_parallel(mesh):
    """Hidden units divided over one axis, examples over another."""
    return _step(mesh, {"up": P(None, "b"), "down": P("b"), "bias": P()}, P("a"))


def exchanged(mesh):
    """An array that is divided along another dimension, shifted and sorted."""

    def f(x):
        moved = lax.with_sharding_constraint(x, NamedSharding(mesh, P(None, "a")))
        return moved * 2, jnp.roll(x, 1, 0), jnp.sort(x, 0)

    return jax.jit(f), (jax.ShapeDtypeStruct((64, 128, 4), jnp.float32, sharding=NamedSharding(mesh, P("a"))),)


def scanned(mesh):
    """Layers in a scan, with their parameters divided."""

    def typed(spec, *shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))

    def loss(params, x):
        x, _ = lax.scan(lambda x, p: (jnp.tanh(x @ p["up"]) @ p["down"], None), x, params)
        return (x * x).mean()

    def step(params, x):
        value, gradients = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    params = {"up": typed(P(None, "a"), 4, 128, 256), "down": typed(P(None, None, "a"), 4, 256, 128)}
    return jax.jit(step, donate_argnums=0), (params, typed(P("a"), 32, 128))


PROGRAMS = [replicated, divided, divided_columns, tensor_parallel, exchanged, scanned]

# Fields of HloModuleProto, HloComputationProto, HloInstructionProto and OpSharding, and the type "manual".
_COMPUTATIONS, _ENTRY, _ATTRIBUTES, _INSTRUCTIONS, _COMPUTATION_ID, _SHARDING, _TYPE, _MANUAL = 3, 6, 19, 2, 5, 40, 1, 4


def parameters_of(program: bytes) -> list[Message]:
    """The shapes of the parameters of each partition, as ShapeProto."""
    module = Message.parse(program)
    (entry,) = [
        each for each in module.messages(_COMPUTATIONS) if each.integer(_COMPUTATION_ID) == module.integer(_ENTRY)
    ]
    parameters = [each for each in entry.messages(_INSTRUCTIONS) if each.text(2) == "parameter"]
    return [each.message(3) for each in sorted(parameters, key=lambda each: each.integer(9))]


def run_on_cpu(program: bytes, arguments: list[jax.Array]) -> list[np.ndarray]:
    """The results of a partitioned program on CPU devices, one after the other.

    arguments: divided over these devices, by their first dimension.
    """
    computation = xla_client.XlaComputation(_manual(program))
    module = xla_client._xla.mlir.xla_computation_to_mlir_module(computation)
    devices = list(arguments[0].sharding.mesh.devices.flat)
    options = compiler.get_compile_options(1, len(devices), device_assignment=np.arange(len(devices))[None])
    options.executable_build_options.use_spmd_partitioning = True
    options.executable_build_options.use_shardy_partitioner = False
    executable = xla_bridge.get_backend("cpu").compile_and_load(module, _jax.DeviceList(tuple(devices)), options)
    results = executable.execute_sharded(arguments).disassemble_into_single_device_arrays()
    return [np.stack([np.asarray(part) for part in parts]) for parts in results]


def _manual(program: bytes) -> bytes:
    """The program with all arrays divided already, so that the partitioner leaves it as it is, and so does the hook."""
    manual = proto.data(_SHARDING, Message([proto.integer(_TYPE, _MANUAL)]))

    def each(message: Message, number: int, change) -> Message:
        fields = [
            proto.data(number, change(Message.parse(field[2]))) if field[0] == number else field
            for field in message.fields
        ]
        return Message(fields)

    def divided_already(instruction: Message) -> Message:
        return Message([*(field for field in instruction.fields if field[0] != _SHARDING), manual])

    changed = each(Message.parse(program), _COMPUTATIONS, lambda body: each(body, _INSTRUCTIONS, divided_already))
    return Message(changed.without(_ATTRIBUTES)).to_bytes()
