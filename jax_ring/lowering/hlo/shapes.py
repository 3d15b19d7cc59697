"""Shapes of HLO: dimensions, element types and layouts, read from XLA's messages and written to them."""

import functools
import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from jax_ring.lowering.hlo import proto
from jax_ring.lowering.hlo.proto import Message, Unsupported

# Fields of ShapeProto and LayoutProto.
_ELEMENT_TYPE, _DIMENSIONS, _TUPLE, _LAYOUT, _IS_DYNAMIC = 2, 3, 4, 5, 6
_MINOR_TO_MAJOR, _MEMORY_SPACE, _TAIL_ALIGNMENT = 1, 8, 16
_TUPLE_TYPE = 13
_MAX_DIMENSIONS = 64  # more than JAX has
# The field of HloInstructionProto with the ranges of a slice, and the fields of its messages.
_SLICES = 17
_SLICE_START, _SLICE_LIMIT, _SLICE_STRIDE = 1, 2, 3

# PrimitiveType values that both XLA's CPU backend and the engine support.
_DTYPES = {
    1: np.bool_, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 6: np.uint8, 7: np.uint16, 8: np.uint32,
    9: np.uint64, 10: np.float16, 11: np.float32, 12: np.float64, 15: np.complex64, 16: jnp.bfloat16, 18: np.complex128,
    19: jnp.float8_e5m2, 20: jnp.float8_e4m3fn, 23: jnp.float8_e4m3b11fnuz, 24: jnp.float8_e5m2fnuz,
    25: jnp.float8_e4m3fnuz, 28: jnp.float8_e4m3, 29: jnp.float8_e3m4,
}  # fmt: skip
UINT32 = 8


class Shape:
    """A shape of an array or a tuple of arrays.

    Attributes:
      message: the ShapeProto.
      element_type: of an array, XLA's number.
      dimensions: of an array.
      minor_to_major: its layout, fastest first.
      memory_space: 0 for the device's own memory.
    """

    def __init__(self, message: Message) -> None:
        self.message = message
        self.element_type = message.integer(_ELEMENT_TYPE)
        self.dimensions = message.integers(_DIMENSIONS)
        if len(self.dimensions) > _MAX_DIMENSIONS:
            raise Unsupported(f"an array has {len(self.dimensions)} dimensions")
        self.minor_to_major = message.message(_LAYOUT).integers(_MINOR_TO_MAJOR)
        self.memory_space = message.message(_LAYOUT).integer(_MEMORY_SPACE)

    @functools.cached_property
    def elements(self) -> "list[Shape]":
        """The elements of a tuple. Read when they are asked for: tuples may be nested, to any depth."""
        return [Shape(element) for element in self.message.messages(_TUPLE)]

    @property
    def is_tuple(self) -> bool:
        return self.element_type == _TUPLE_TYPE

    @property
    def arrays(self) -> "list[Shape]":
        """The tuple's arrays, or this one."""
        return self.elements if self.is_tuple else [self]

    @property
    def dtype(self) -> np.dtype:
        """The dtype of a checked array."""
        return np.dtype(_DTYPES[self.element_type])

    @property
    def num_bytes(self) -> int:
        return math.prod(self.dimensions) * np.dtype(_DTYPES.get(self.element_type, np.void)).itemsize

    def check(self) -> None:
        """Refuses arrays that the engine does not have.

        Raises:
          Unsupported: for other types or layouts.
        """
        self.message.check_fields({_ELEMENT_TYPE, _DIMENSIONS, _LAYOUT, _IS_DYNAMIC}, "a shape")
        layout = self.message.message(_LAYOUT)
        layout.check_fields({_MINOR_TO_MAJOR, _TAIL_ALIGNMENT}, "a layout")
        if self.element_type not in _DTYPES:
            raise Unsupported(f"the engine has no element type {self.element_type} of XLA")
        if any(self.message.integers(_IS_DYNAMIC)) or min(self.dimensions, default=1) < 1:
            raise Unsupported(f"the shape {self.dimensions} is dynamic or empty")
        if layout.integer(_TAIL_ALIGNMENT, 1) != 1 or sorted(self.minor_to_major) != list(range(len(self.dimensions))):
            raise Unsupported("an array is padded, or has no layout")

    def like(self, dimensions: Sequence[int], minor_to_major: Sequence[int]) -> "Shape":
        """An array of this element type, with other dimensions."""
        return array_shape(self.element_type, dimensions, minor_to_major)

    def with_default_layout(self) -> "Shape":
        """This shape with each array's last dimension fastest."""
        if self.is_tuple:
            return tuple_shape([element.with_default_layout() for element in self.elements])
        return self.like(self.dimensions, range(len(self.dimensions))[::-1])

    def __str__(self) -> str:
        return f"{self.dtype.name}[{','.join(map(str, self.dimensions))}]"


def array_shape(element_type: int, dimensions: Sequence[int] = (), minor_to_major: Sequence[int] = ()) -> Shape:
    """The shape of an array of XLA's element type."""
    layout = Message([proto.packed(_MINOR_TO_MAJOR, minor_to_major), proto.integer(_TAIL_ALIGNMENT, 1)])
    fields = [
        proto.integer(_ELEMENT_TYPE, element_type),
        proto.packed(_DIMENSIONS, dimensions),
        proto.data(_LAYOUT, layout),
        proto.packed(_IS_DYNAMIC, [0] * len(dimensions)),
    ]
    return Shape(Message(fields))


def tuple_shape(elements: Sequence[Shape]) -> Shape:
    fields = [proto.data(_TUPLE, element.message) for element in elements]
    return Shape(Message([proto.integer(_ELEMENT_TYPE, _TUPLE_TYPE), *fields]))


def slices(limits: Sequence[tuple[int, int]]) -> list[proto.Field]:
    """The fields of a slice, from the first to behind the last index of each dimension."""
    bounds = [{_SLICE_START: start, _SLICE_LIMIT: limit, _SLICE_STRIDE: 1} for start, limit in limits]
    return [proto.data(_SLICES, Message([proto.integer(*item) for item in each.items()])) for each in bounds]
