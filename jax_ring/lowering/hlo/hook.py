"""Replaces collectives of partitioned programs while XLA compiles them under `override_lax()`.

XLA hands programs over after its partitioner and most passes, on any thread. So the override is an attribute, written
when a program is lowered. Every cache's key has it.
"""

import hashlib
import itertools
import logging
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn, cast

import jax
import numpy as np
from jax.extend.mlir import ir
from jax.interpreters import mlir

from jax_ring import _compat, runtime
from jax_ring.distributed import assumed_hosts
from jax_ring.lowering import dispatch, trees
from jax_ring.lowering.call_spec import CallSpec
from jax_ring.lowering.custom_call import attributes, operation, streams
from jax_ring.lowering.custom_call.attributes import named
from jax_ring.lowering.custom_call.operation import Description
from jax_ring.lowering.hlo import across_hosts, collectives, proto, rewrite, wire
from jax_ring.lowering.hlo.collectives import Collective
from jax_ring.lowering.hlo.replica_groups import Unsupported
from jax_ring.lowering.hlo.shapes import Shape
from jax_ring.lowering.hlo.wire import Message
from jax_ring.lowering.override_state import Settings
from jax_ring.lowering.passes import program_id
from jax_ring.options import Order

logger = logging.getLogger("jax_ring")

# Marks a program whose collectives are replaced. Its value: one of the two signs below, the order of its sums, and the
# program's name between processes, or the devices that it is only compiled for.
_MARK = "jax_ring.partitioner"
# What else decides on a program's collectives. For the caches' keys alone.
_VERSION = "jax_ring.version"
_ALSO_IF_DONATING, _NOT_IF_DONATING = "+", "-"

# Fields of HloModuleProto, and of the messages in it.
_NAME, _TYPE, _SCHEDULE, _ALIASES, _DEVICE_ASSIGNMENT, _STACK_FRAMES, _ATTRIBUTES = 1, 4, 7, 8, 15, 17, 19
_RESULT = 2  # of the program's type
_REPLICAS, _PARTITIONS, _DEVICE_IDS = 1, 3, 1
_FILES, _FUNCTIONS, _LOCATIONS, _FRAMES = 1, 2, 3, 4
_LOCATION_FILE, _LOCATION_FUNCTION, _LOCATION_LINE = 1, 2, 3
_KEY, _VALUE = 1, 2
_OP_NAME, _STACK_FRAME = 2, 15  # of OpMetadata


class _Devices(NamedTuple):
    """Where a program's devices are looked up; JAX does not find absent ones by id.

    Attributes:
      hosts: assumed, by process.
    """

    by_id: dict[int, jax.Device]
    hosts: tuple | None


# By the name in the mark of their programs.
_elsewhere: dict[str, _Devices] = {}


def _note_devices(meshes: Sequence) -> str:
    """Notes a program's absent devices; returns their name."""
    absent = filter(_compat.is_compile_only, meshes)
    devices = {device.id: device for mesh in absent for device in _compat.mesh_devices(mesh) or ()}
    if not devices:
        return ""
    hosts = assumed_hosts.assumed()
    processes = sorted((id_, device.process_index) for id_, device in devices.items())
    name = hashlib.sha256(repr((processes, hosts)).encode()).hexdigest()[:16]
    _elsewhere[name] = _Devices(devices, hosts)
    return name


def mark(module: ir.Module, jaxpr, platform: str, meshes: Sequence, settings: Settings) -> None:
    """Marks a program just lowered, if XLA divides it.

    meshes: of arguments and results.
    """
    attributes = module.operation.attributes
    if platform not in _compat.PLATFORMS_WITH_HOOK or ir.IntegerAttr(attributes["mhlo.num_partitions"]).value == 1:
        return
    if not _is_registered(platform):
        return
    name = _note_devices(meshes)
    if platform == "cpu" and jax.process_count() > 1:
        name = program_id.name_of_program(module, jaxpr)
    is_safe = settings.partitioner is True or not _compat.CHANGED_HLO_LOSES_ALIASES
    value = f"{_ALSO_IF_DONATING if is_safe else _NOT_IF_DONATING}{settings.order} {name}"
    before = attributes["mhlo.frontend_attributes"] if "mhlo.frontend_attributes" in attributes else ir.DictAttr.get({})
    attributes["mhlo.frontend_attributes"] = ir.DictAttr.get(
        {
            **dict(named(ir.DictAttr(before))),
            _MARK: ir.StringAttr.get(value),
            _VERSION: ir.StringAttr.get(f"{runtime.__version__} {runtime.FINGERPRINT}{' strict' * runtime.STRICT}"),
        }
    )


def transform(platform: str, program: bytes) -> bytes | None:
    """The program with calls to the engine for collectives; None if unchanged."""
    if _MARK.encode() not in program:
        return None
    module = Message.parse(program)
    value = _mark_of(module)
    if value is None:
        return None
    name = module.text(_NAME)
    try:
        return _replace(module, name, value, platform)
    except RuntimeError:
        # Forbidden, or a process does not publish its host. The others would wait for this process.
        raise
    except Exception as error:
        if runtime.STRICT:
            raise
        warnings.warn(
            f"jax_ring leaves the collectives of {name} to XLA, because it could not read the program: "
            f"{type(error).__name__}: {error}. override_lax(partitioner=False) avoids this.",
            RuntimeWarning,
            stacklevel=1,
        )
        return None


class _Forbidden(NotImplementedError):
    """A collective would stay XLA's against `JAX_RING_STRICT`."""


def _mark_of(module: Message) -> str | None:
    for entry in module.message(_ATTRIBUTES).messages(1):
        if entry.text(_KEY) == _MARK:
            return entry.text(_VALUE)
    return None


class _Program(NamedTuple):
    """What a program's calls share.

    Attributes:
      name: between processes.
      platform: "cpu" or "cuda".
      order: of sums.
      mesh: of its devices, as partitions.
      stack_frames: the lists of the StackFrameIndexProto, by field, read once.
      added: with steps across hosts, or a call on another stream.
      channels: unused ones.
    """

    name: str
    platform: str
    order: Order
    mesh: jax.sharding.Mesh
    stack_frames: dict[int, list[bytes]]
    computations: list[Message]
    added: list[Message]
    channels: "itertools.count[int]"

    def serve(self, call: Collective, instruction: Message, is_beside: bool) -> rewrite.EngineCall | int:
        """The engine's call, or the computation of a call across hosts."""
        context = _compat.SPMDAxisContext(self.mesh, frozenset(self.mesh.axis_names))
        spec = CallSpec(call.opcode, call.kind, call.op, groups=call.groups, perm=call.perm, axis_size=call.size)
        if spec.is_sum:
            spec = spec._replace(options=spec.options.of_sum(self.order))
        service = dispatch.who_serves((self.platform,), context, spec.groups, spec.kind, spec.options, spec.perm)
        if service.levels is None:
            raise across_hosts.AcrossHosts(service.why_not)
        shapes, channel = list(map(str, call.operands)), instruction.integer(proto.CHANNEL)
        described = Description(call.opcode, shapes, len(shapes), f"channel {channel} of XLA's partitioner")
        spec = spec._replace(service=service, description=described)
        if service.levels.inter:
            return self._steps(spec, call, instruction)
        if call.in_tuple and self.platform == "cpu" and service.levels.num_processes == 1:
            spec = spec._replace(blocks_apart=True)  # blocks of one array would be copied twice more
        if spec.adds_along_tree:
            spec = spec._replace(group_trees=tuple(trees.trees_of(spec.groups, spec.options)))
        with mlir.make_ir_context(), ir.Location.unknown():
            name = self.name if self.platform == "cpu" else ""  # GPUs meet by the order of calls in their lane
            shared = attributes.attributes_of(spec, self.mesh, name, streams.LANES[is_beside])
            site = self._site_of(instruction)
            config = operation.config(attributes.named(shared), site, call=ir.StringAttr.get(described))
            return rewrite.EngineCall(str(config), spec.blocks_apart)

    def _steps(self, spec: CallSpec, call: Collective, instruction: Message) -> int:
        """Adds a call's computations across hosts; returns the callee's id."""
        shapes, _ = across_hosts.shapes_of(call)
        steps = across_hosts.lowered(spec, shapes, self.mesh, self.name, self._site_of(instruction), self.platform)
        stead = across_hosts.Stead(
            instruction, spec.levels.num_hosts, self.channels, rewrite.PLATFORMS[self.platform].has_layouts
        )
        self.added.extend(across_hosts.computations_of(steps, stead, self._next_id()))
        return self.added[-1].integer(proto.COMPUTATION_ID)

    def _next_id(self) -> int:
        return 1 + max(each.integer(proto.COMPUTATION_ID) for each in (*self.computations, *self.added))

    def add(self, make: Callable[[int], Message]) -> int:
        id_ = self._next_id()
        self.added.append(make(id_))
        return id_

    def _site_of(self, instruction: Message) -> str:
        """The user's line of an instruction, or its name."""
        metadata = instruction.message(proto.METADATA)
        frame = metadata.integer(_STACK_FRAME)
        if not frame:
            return metadata.text(_OP_NAME)
        index = self.stack_frames
        location = Message.parse(index[_LOCATIONS][Message.parse(index[_FRAMES][frame - 1]).integer(1) - 1])
        file = index[_FILES][location.integer(_LOCATION_FILE) - 1].decode()
        function = index[_FUNCTIONS][location.integer(_LOCATION_FUNCTION) - 1].decode()
        return f"{file}:{location.integer(_LOCATION_LINE)} ({function})"


def _replace(module: Message, name: str, value: str, platform: str) -> bytes | None:
    bodies = dict(
        zip(
            [i for i, field in enumerate(module.fields) if field[0] == proto.COMPUTATIONS],
            module.each(proto.COMPUTATIONS),
            strict=True,
        )
    )
    if not any(map(collectives.may_hold_any, bodies.values())):
        return None

    def refuse(instruction: Message | None, why: Unsupported) -> None:
        what = "each collective"
        if instruction:
            what = f"{instruction.text(proto.OPCODE)} '{instruction.text(proto.NAME)}'"
        if runtime.STRICT and not isinstance(why, across_hosts.AcrossHosts):
            raise _Forbidden(
                f"{what} of {name} would be left to XLA: {why}. {runtime.STRICT_VARIABLE}=1 forbids it; unset the "
                "variable to allow it."
            )
        logger.info("%s of %s is left to XLA: %s", what, name, why)

    order, _, named = value[1:].partition(" ")  # written by `mark`
    found = _elsewhere.get(named) or _Devices({device.id: device for device in _compat.devices(platform)}, None)
    devices, why_not = _devices_of(module, found.by_id)
    if not why_not and module.raw(_ALIASES) and value[0] == _NOT_IF_DONATING:
        why_not = (
            "it donates buffers, which this version of JAX forgets if the program is changed. "
            "override_lax(partitioner=True) replaces them all the same"
        )
    if not why_not and any(x.memory_space for x in Shape(module.message(_TYPE).message(_RESULT)).arrays):
        why_not = "a result is not in the device's own memory, which JAX forgets if the program is changed"
    if why_not:
        refuse(None, Unsupported(why_not))
        return None
    computations = {i: Message.parse(data) for i, data in bodies.items()}
    numbers = {computation.integer(proto.COMPUTATION_ID): i for i, computation in computations.items()}
    index = module.message(_STACK_FRAMES)
    program = _Program(
        named, platform, cast(Order, order), jax.sharding.Mesh(np.array(devices), "partition"),
        {field: index.each(field) for field in (_FILES, _FUNCTIONS, _LOCATIONS, _FRAMES)}, list(computations.values()),
        [], itertools.count(1 + max(map(_last_channel, computations.values()))),
    )  # fmt: skip
    environment = rewrite.Environment(
        rewrite.PLATFORMS[platform], len(devices), program.serve, lambda id_: _reduction_of(computations[numbers[id_]]),
        lambda id_: bodies[numbers[id_]], program.add,
    )  # fmt: skip
    on_streams = {
        called
        for i, data in bodies.items()
        if streams.ANNOTATION.encode() in data
        for each in computations[i].messages(proto.INSTRUCTIONS)
        if streams.ANNOTATION.encode() in each.raw(proto.FRONTEND)
        for called in each.integers(proto.CALLED)
    }
    fields, is_changed = list(module.fields), False
    with assumed_hosts.assuming(found.hosts):
        for i, data in bodies.items():
            if not collectives.may_hold_any(data):
                continue
            of_computation = environment
            if computations[i].integer(proto.COMPUTATION_ID) in on_streams:
                of_computation = environment._replace(serve=_refuse_stream)
            if (replaced := rewrite.Computation(computations[i], of_computation).replace(refuse)) is not None:
                fields[i], is_changed = wire.data(proto.COMPUTATIONS, replaced), True
    fields[min(bodies) : min(bodies)] = [wire.data(proto.COMPUTATIONS, each) for each in program.added]
    return Message(fields).to_bytes() if is_changed else None


def _refuse_stream(*_) -> NoReturn:
    # It would share a lane with calls that may run at the same time.
    raise Unsupported("it is on a GPU stream of compute_on, where calls in a shard_map alone have a lane")


def _last_channel(computation: Message) -> int:
    return max(each.integer(proto.CHANNEL) for each in computation.messages(proto.INSTRUCTIONS))


def _devices_of(module: Message, by_id: dict[int, jax.Device]) -> tuple[list, str]:
    """The partitions' devices, or why they cannot be served."""
    assignment = module.message(_DEVICE_ASSIGNMENT)
    ids = [partition.integers(_DEVICE_IDS) for partition in assignment.messages(_PARTITIONS)]
    if module.raw(_SCHEDULE):
        return [], "it is scheduled already"
    if not ids or assignment.integer(_REPLICAS, 1) != 1 or any(len(of_partition) != 1 for of_partition in ids):
        return [], "it has replicas, or no known devices"
    if unknown := [of_partition[0] for of_partition in ids if of_partition[0] not in by_id]:
        return [], f"its devices {unknown} are not there"
    return [by_id[of_partition[0]] for of_partition in ids], ""


def _reduction_of(computation: Message) -> str:
    """The opcode that combines a computation's arguments; else empty."""
    instructions = {each.integer(proto.ID): each for each in computation.messages(proto.INSTRUCTIONS)}
    root = instructions[computation.integer(proto.ROOT)]
    operands = root.integers(proto.OPERANDS)
    parameters = {id_ for id_, each in instructions.items() if each.text(proto.OPCODE) == "parameter"}
    if len(instructions) != 3 or len(operands) != 2 or parameters != set(operands) or root.integers(proto.CALLED):
        return ""
    types = {each.raw(proto.SHAPE) for each in instructions.values()}
    return root.text(proto.OPCODE) if len(types) == 1 else ""


_lock = threading.Lock()
_registered: set[str] = set()  # platforms


def register() -> None:
    """Makes XLA hand over programs from now on: one may be compiled after the end of the override that it has."""
    _is_registered("cpu")  # do not load the plugin of another platform early


def _is_registered(platform: str) -> bool:
    """Whether XLA hands over a platform's programs, from now on if it can."""
    with _lock:
        if platform not in _registered:
            if not _compat.register_hlo_transformation(
                "jax_ring", lambda program: transform(platform, program), platform
            ):
                return False
            _registered.add(platform)
        return True
