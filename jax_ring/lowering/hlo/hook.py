"""Replaces collectives of partitioned programs while XLA compiles them under `override_lax()`.

XLA hands programs over after its partitioner and most passes, on any thread. So the override is an attribute, written
when a program is lowered. Every cache's key has it.
"""

import hashlib
import logging
import reprlib
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import jax
from jax.extend import core
from jax.extend.mlir import ir

from jax_ring import _compat, runtime
from jax_ring.distributed import discovery
from jax_ring.lowering.custom_call.operation import entries
from jax_ring.lowering.hlo import across_hosts, collectives, proto, rewrite
from jax_ring.lowering.hlo.program import Program
from jax_ring.lowering.hlo.proto import Message, Unsupported
from jax_ring.lowering.hlo.shapes import Shape
from jax_ring.lowering.override_state import Settings
from jax_ring.lowering.passes import program_id
from jax_ring.options import ORDERS, Order

logger = logging.getLogger("jax_ring")

# Marks a program whose collectives are replaced. Its value: one of the two signs below, the order of its sums, and the
# program's name between processes, or the devices that it is only compiled for.
_MARK = "jax_ring.partitioner"
# What else decides on a program's collectives. For the caches' keys alone.
_VERSION = "jax_ring.version"
_ALSO_IF_DONATING, _NOT_IF_DONATING = "+", "-"

# Fields of HloModuleProto, and of the messages in it.
_TYPE, _SCHEDULE, _ALIASES, _DEVICE_ASSIGNMENT, _ATTRIBUTES = 4, 7, 8, 15, 19
_RESULT = 2  # of the program's type
_REPLICAS, _PARTITIONS, _DEVICE_IDS = 1, 3, 1


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
    hosts = discovery.assumed.value
    processes = sorted((id_, device.process_index) for id_, device in devices.items())
    name = hashlib.sha256(repr((processes, hosts)).encode()).hexdigest()[:16]
    _elsewhere[name] = _Devices(devices, hosts)
    return name


def mark(module: ir.Module, jaxpr: core.ClosedJaxpr, platform: str, meshes: Sequence, settings: Settings) -> None:
    """Marks a program just lowered, if XLA divides it.

    meshes: of arguments and results.
    """
    attributes = module.operation.attributes
    is_divided = ir.IntegerAttr(attributes["mhlo.num_partitions"]).value > 1
    if platform not in _compat.PLATFORMS_WITH_HOOK or not is_divided or not _is_registered(platform):
        return
    name = _note_devices(meshes)
    if platform == "cpu" and jax.process_count() > 1:
        name = program_id.name_of_program(module, jaxpr)
    is_safe = settings.partitioner is True or not _compat.CHANGED_HLO_LOSES_ALIASES
    value = f"{_ALSO_IF_DONATING if is_safe else _NOT_IF_DONATING}{settings.order} {name}"
    before = attributes["mhlo.frontend_attributes"] if "mhlo.frontend_attributes" in attributes else ir.DictAttr.get({})
    attributes["mhlo.frontend_attributes"] = ir.DictAttr.get(
        {
            **dict(entries(ir.DictAttr(before))),
            _MARK: ir.StringAttr.get(value),
            _VERSION: ir.StringAttr.get(f"{runtime.__version__} {runtime.FINGERPRINT}{' strict' * runtime.STRICT}"),
        }
    )


def transform(platform: str, program: bytes) -> bytes | None:
    """The program with calls to the engine for collectives; None if unchanged."""
    if _MARK.encode() not in program:
        return None
    name = "a program"
    try:
        module = Message.parse(program)
        value = _mark_of(module)
        if value is None:
            return None
        name = _shown(module.text(proto.NAME))
        return _replace(module, name, value, platform)
    except Exception as error:
        # Forbidden, or a process does not publish its host. The others would wait for this process.
        is_meant = isinstance(error, RuntimeError) and not isinstance(error, RecursionError)
        if is_meant or runtime.STRICT:
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


def _shown(text: str) -> str:
    """A name of a program, which may come from elsewhere, without what a terminal obeys."""
    return repr(text)[1:-1]


def _mark_of(module: Message) -> str | None:
    return module.message(_ATTRIBUTES).mapping(1).get(_MARK)


def _replace(module: Message, name: str, value: str, platform: str) -> bytes | None:
    bodies = module.each(proto.COMPUTATIONS)
    if not any(map(collectives.may_hold_any, bodies)):
        return None

    def refuse(instruction: Message | None, why: Unsupported) -> None:
        what = "each collective"
        if instruction:
            what = f"{instruction.text(proto.OPCODE)} '{_shown(instruction.text(proto.NAME))}'"
        if runtime.STRICT and not isinstance(why, across_hosts.AcrossHosts):
            raise _Forbidden(
                f"{what} of {name} would be left to XLA: {why}. {runtime.STRICT_VARIABLE}=1 forbids it; unset the "
                "variable to allow it."
            )
        logger.info("%s of %s is left to XLA: %s", what, name, why)

    order, _, named = value[1:].partition(" ")  # written by `mark`
    if order not in ORDERS:
        raise ValueError(f"its mark {value!r} names no order of sums")
    known = _elsewhere.get(named) or _Devices({device.id: device for device in _compat.devices(platform)}, None)
    try:
        devices = _devices_of(module, known.by_id)
        _check_results(module, may_forget_aliases=value[0] == _ALSO_IF_DONATING)
    except Unsupported as why:
        refuse(None, why)
        return None
    program = Program(module, named, platform, devices, cast(Order, order))
    with discovery.assumed(known.hosts):
        changed = [_replaced(id_, program, refuse) for id_ in program.bodies]
    if changed == bodies:
        return None
    computations = [proto.data(proto.COMPUTATIONS, each) for each in (*program.added, *changed)]
    return Message([*module.without(proto.COMPUTATIONS), *computations]).to_bytes()


def _replaced(id_: int, program: Program, refuse: Callable) -> Message | bytes:
    """A computation with calls for collectives, or as it is."""
    body = program.bodies[id_]
    if not collectives.may_hold_any(body):
        return body
    return rewrite.Computation(program.computations[id_], program).replace(refuse) or body


def _devices_of(module: Message, by_id: dict[int, jax.Device]) -> list[jax.Device]:
    """The partitions' devices.

    Raises:
      Unsupported: if the engine cannot serve them.
    """
    assignment = module.message(_DEVICE_ASSIGNMENT)
    ids = [partition.integers(_DEVICE_IDS) for partition in assignment.messages(_PARTITIONS)]
    if module.raw(_SCHEDULE):
        raise Unsupported("it is scheduled already")
    if not ids or assignment.integer(_REPLICAS, 1) != 1 or any(len(of_partition) != 1 for of_partition in ids):
        raise Unsupported("it has replicas, or no known devices")
    if unknown := [id_ for (id_,) in ids if id_ not in by_id]:
        raise Unsupported(f"its devices {reprlib.repr(unknown)} are not there")
    if len({id_ for (id_,) in ids}) < len(ids):
        raise Unsupported("two of its partitions have one device")
    return [by_id[id_] for (id_,) in ids]


def _check_results(module: Message, may_forget_aliases: bool) -> None:
    """Refuses a program of which JAX would forget something if it is changed."""
    if module.raw(_ALIASES) and not may_forget_aliases:
        raise Unsupported(
            "it donates buffers, which this version of JAX forgets if the program is changed. "
            "override_lax(partitioner=True) replaces them all the same"
        )
    if any(x.memory_space for x in Shape(module.message(_TYPE).message(_RESULT)).arrays):
        raise Unsupported("a result is not in the device's own memory, which JAX forgets if the program is changed")


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
