"""A partitioned program: what serves its collectives, and the computations that are added for them."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.extend.mlir import ir
from jax.interpreters import mlir

from jax_ring import _compat
from jax_ring.lowering.call import CallSpec
from jax_ring.lowering.custom_call import engine, operation, streams
from jax_ring.lowering.custom_call.operation import Description
from jax_ring.lowering.hlo import across_hosts, collectives, proto
from jax_ring.lowering.hlo.collectives import Collective
from jax_ring.lowering.hlo.proto import Message
from jax_ring.lowering.plan import who_serves
from jax_ring.options import Order

# Fields of HloModuleProto, and of the messages in it.
_STACK_FRAMES = 17
_FILES, _FUNCTIONS, _LOCATIONS, _FRAMES = 1, 2, 3, 4
_LOCATION_FILE, _LOCATION_FUNCTION, _LOCATION_LINE = 1, 2, 3
_OP_NAME, _STACK_FRAME = 2, 15  # of OpMetadata


class Platform(NamedTuple):
    """What differs between platforms.

    Attributes:
      takes_position: whether calls take the mesh position first.
      has_layouts: whether XLA's passes are over: it has assigned layouts, inserted copies and joined sums.
    """

    takes_position: bool
    has_layouts: bool


PLATFORMS = {"cpu": Platform(True, True), "cuda": Platform(False, False)}


class EngineCall(NamedTuple):
    """How the engine serves a collective.

    Attributes:
      config: its attributes, as text.
      blocks_apart: whether an all-to-all has an operand and a result for each rank.
    """

    config: str
    blocks_apart: bool


class Program:
    """A partitioned program, an HloModuleProto.

    Args:
      name: between processes.
      platform: "cpu" or "cuda".
      devices: by partition.
      order: of sums.

    Attributes:
      computations: by id.
      bodies: the computations by id, serialized.
      on_streams: ids of those that calls run on a stream of the user.
      added: computations with steps across hosts, or a call on another stream.
    """

    def __init__(self, module: Message, name: str, platform: str, devices: Sequence, order: Order) -> None:
        self._name, self._platform_name, self._order = name, platform, order
        self._mesh = jax.sharding.Mesh(np.array(devices), "partition")
        frames = module.message(_STACK_FRAMES)
        self._stack_frames = {field: frames.each(field) for field in (_FILES, _FUNCTIONS, _LOCATIONS, _FRAMES)}
        self.computations = {each.integer(proto.COMPUTATION_ID): each for each in module.messages(proto.COMPUTATIONS)}
        self._ids = itertools.count(1 + max(self.computations))
        self._channels = itertools.count(1 + max(map(_last_channel, self.computations.values())))
        self.platform, self.num_partitions = PLATFORMS[platform], len(devices)
        self.bodies = dict(zip(self.computations, module.each(proto.COMPUTATIONS), strict=True))
        self.on_streams = {
            called
            for id_, body in self.bodies.items()
            if streams.ANNOTATION.encode() in body
            for each in self.computations[id_].messages(proto.INSTRUCTIONS)
            if streams.ANNOTATION.encode() in each.raw(proto.FRONTEND)
            for called in each.integers(proto.CALLED)
        }
        self.added: list[Message] = []

    @functools.cached_property
    def _context(self) -> ir.Context:
        """For the attributes of all calls: to make it takes milliseconds."""
        return mlir.make_ir_context()

    def reduction_of(self, id_: int) -> str:
        """The opcode by which a computation combines two values; empty if it does anything else."""
        return collectives.reduction_of(self.computations[id_])

    def add(self, make: Callable[[int], Message]) -> int:
        """Adds a computation, a function of its id; returns the id."""
        id_ = next(self._ids)
        self.added.append(make(id_))
        return id_

    def serve(self, call: Collective, is_beside: bool) -> EngineCall | int:
        """The engine's call, or the id of a computation across hosts.

        is_beside: whether the call runs beside products.

        Raises:
          Unsupported: if XLA has to serve it.
        """
        context = _compat.SPMDAxisContext(self._mesh, frozenset(self._mesh.axis_names))
        spec = CallSpec(call.opcode, call.kind, call.op, groups=call.groups, perm=call.perm, axis_size=call.size)
        if spec.is_sum:
            spec = spec._replace(options=spec.options.of_sum(self._order))
        service = who_serves((self._platform_name,), context, spec.groups, spec.kind, spec.options, spec.perm)
        if service.levels is None:
            raise across_hosts.AcrossHosts(service.why_not)
        shapes, channel = list(map(str, call.operands)), call.instruction.integer(proto.CHANNEL)
        described = Description(call.opcode, shapes, len(shapes), f"channel {channel} of XLA's partitioner")
        spec = spec._replace(service=service, description=described)
        site = self._site_of(call.instruction)
        if service.levels.inter:
            return self._add_steps(spec, call, site)
        is_on_cpu = self._platform_name == "cpu"
        if call.in_tuple and is_on_cpu and service.levels.num_processes == 1:
            spec = spec._replace(blocks_apart=True)  # blocks of one array would be copied twice more
        with self._context, ir.Location.unknown():
            name = self._name if is_on_cpu else ""  # GPUs meet by the order of calls in their lane
            shared = engine.attributes(spec, name, streams.LANES[is_beside])
            own = {"call": ir.StringAttr.get(described), "site": ir.StringAttr.get(site)}
            config = ir.DictAttr.get({**dict(operation.entries(shared)), **own})
            return EngineCall(str(config), spec.blocks_apart)

    def _add_steps(self, spec: CallSpec, call: Collective, site: str) -> int:
        """Adds a call's computations across hosts; returns the callee's id."""
        shapes = across_hosts.shapes_of(call)
        steps = across_hosts.lowered(spec, shapes, self._mesh, self._name, site, self._platform_name)
        replaced = across_hosts.ReplacedCollective(
            call.instruction, spec.levels.num_hosts, self._channels, self._ids, self.platform.has_layouts
        )
        self.added += across_hosts.computations_of(steps, replaced)
        return self.added[-1].integer(proto.COMPUTATION_ID)

    def _site_of(self, instruction: Message) -> str:
        """The user's line of an instruction, or its name."""
        metadata = instruction.message(proto.METADATA)
        frame = metadata.integer(_STACK_FRAME)
        if not frame:
            return metadata.text(_OP_NAME)
        index = self._stack_frames
        location = Message.parse(index[_LOCATIONS][Message.parse(index[_FRAMES][frame - 1]).integer(1) - 1])
        file = index[_FILES][location.integer(_LOCATION_FILE) - 1].decode()
        function = index[_FUNCTIONS][location.integer(_LOCATION_FUNCTION) - 1].decode()
        return f"{file}:{location.integer(_LOCATION_LINE)} ({function})"


def _last_channel(computation: Message) -> int:
    return max(each.integer(proto.CHANNEL) for each in computation.messages(proto.INSTRUCTIONS))
