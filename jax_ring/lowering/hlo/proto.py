"""XLA's serialized messages: protobuf's wire format, and the numbers of their fields.

Python has no schema of an HloModuleProto, and XLA adds fields to it. So a message here is a list of fields, each a
number, a wire type and a value, as https://protobuf.dev/programming-guides/encoding describes: what is not replaced is
written back as it came. On the wire each field is a varint `number << 3 | wire type`, then its value:

- a varint: an integer, 7 bits in a byte, lowest first, the eighth bit set in all bytes but the last;
- 8 or 4 bytes;
- a length, a varint, and as many bytes: a text, a message, or a packed list of varints.

Readers of a field take the number, as `message.integer(proto.ID)`; functions with the names of types make a field, as
`proto.integer(proto.ID, 7)`. A field that is missing has its type's default.
"""

from collections.abc import Iterable, Mapping
from typing import Self

# Fields of HloModuleProto, of its computations, and of their instructions.
COMPUTATIONS = 3
INSTRUCTIONS, COMPUTATION_ID, ROOT = 2, 5, 6
NAME, OPCODE, SHAPE, METADATA, TUPLE_INDEX, DIMENSIONS, CHANNEL, TARGET = 1, 2, 3, 7, 13, 14, 26, 28
ID, OPERANDS, PREDECESSORS, CALLED, SHARDING, CONFIG = 35, 36, 37, 38, 40, 43
FEATURE_GROUPS, PAIRS, CONSTRAIN_LAYOUT, OPERAND_SHAPES, BATCH_GROUPS = 50, 52, 56, 57, 58
FRONTEND, USE_GLOBAL_IDS, ALIASES, API_VERSION, STATISTICS, RESULT_ACCURACY = 68, 71, 74, 77, 82, 91
# Fields of an alias.
ALIAS_RESULT, ALIAS_OPERAND = 1, 2

_VARINT, _FIXED_64, _BYTES, _FIXED_32 = 0, 1, 2, 5  # wire types
_SIZES = {_FIXED_64: 8, _FIXED_32: 4}
_MASK = (1 << 64) - 1
_KEY, _VALUE = 1, 2  # of a map's entry

Value = int | bytes
Field = tuple[int, int, Value]  # number, wire type, value


class Unsupported(Exception):
    """Why the engine does not serve a collective of XLA's partitioner, which then stays XLA's."""


class Message:
    """A message: its fields, in order. Of several with one number the last counts, unless they are a list's."""

    def __init__(self, fields: Iterable[Field] = ()) -> None:
        self.fields = list(fields)

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Reads a message.

        Raises:
          ValueError: for bytes that are no message.
        """
        fields: list[Field] = []
        at = 0
        try:
            while at < len(data):
                tag, at = _read_varint(data, at)
                number, wire_type = tag >> 3, tag & 7
                value: Value
                if wire_type == _VARINT:
                    value, at = _read_varint(data, at)
                else:
                    if wire_type == _BYTES:
                        size, at = _read_varint(data, at)
                    else:
                        size = _SIZES[wire_type]
                    value, at = data[at : at + size], at + size
                fields.append((number, wire_type, value))
        except (IndexError, KeyError):
            at = len(data) + 1
        if at != len(data):
            raise ValueError("not a message in protobuf's wire format")
        return cls(fields)

    def to_bytes(self) -> bytes:
        """The message on the wire."""
        out = bytearray()
        for number, wire_type, value in self.fields:
            _write_varint(out, number << 3 | wire_type)
            if isinstance(value, int):
                _write_varint(out, value)
            else:
                if wire_type == _BYTES:
                    _write_varint(out, len(value))
                out += value
        return bytes(out)

    def check_fields(self, known: set[int], what: str) -> None:
        """Refuses fields of later versions of XLA.

        Raises:
          Unsupported: for fields that are not known.
        """
        if unknown := self.field_numbers() - known:
            raise Unsupported(f"{what} has the unknown fields {sorted(unknown)}")

    def field_numbers(self) -> set[int]:
        return {number for number, _, _ in self.fields}

    def only(self, *numbers: int) -> list[Field]:
        """The fields with these numbers."""
        return [field for field in self.fields if field[0] in numbers]

    def without(self, *numbers: int) -> list[Field]:
        """The fields with other numbers."""
        return [field for field in self.fields if field[0] not in numbers]

    def _last(self, number: int) -> Value | None:
        for field_number, _, value in reversed(self.fields):
            if field_number == number:
                return value
        return None

    def integer(self, number: int, default: int = 0) -> int:
        """The integer in a field."""
        value = self._last(number)
        return default if value is None else _signed(value)

    def raw(self, number: int) -> bytes:
        """The bytes in a field, maybe none."""
        value = self._last(number)
        return b"" if value is None else _checked(value)

    def text(self, number: int) -> str:
        """The text in a field, maybe empty."""
        return self.raw(number).decode()

    def message(self, number: int) -> "Message":
        """The message in a field, maybe empty."""
        return Message.parse(self.raw(number))

    def each(self, number: int) -> list[bytes]:
        """The elements of a list of texts or messages."""
        return [_checked(value) for field_number, _, value in self.fields if field_number == number]

    def messages(self, number: int) -> "list[Message]":
        """The elements of a list of messages."""
        return [Message.parse(data) for data in self.each(number)]

    def mapping(self, number: int) -> dict[str, str]:
        """A map of texts."""
        return {entry.text(_KEY): entry.text(_VALUE) for entry in self.messages(number)}

    def integers(self, number: int) -> list[int]:
        """A list of integers, packed or not."""
        found: list[int] = []
        for field_number, _, value in self.fields:
            if field_number != number:
                continue
            if isinstance(value, int):
                found.append(_signed(value))
                continue
            at = 0
            while at < len(value):
                element, at = _read_varint(value, at)
                found.append(_signed(element))
        return found


def integer(number: int, value: int) -> Field:
    """A field of an integer."""
    return number, _VARINT, value


def data(number: int, value: bytes | str | Message) -> Field:
    """A field of bytes, a text or a message."""
    if isinstance(value, Message):
        value = value.to_bytes()
    return number, _BYTES, value.encode() if isinstance(value, str) else value


def packed(number: int, values: Iterable[int]) -> Field:
    """A field of a list of integers."""
    out = bytearray()
    for value in values:
        _write_varint(out, value)
    return number, _BYTES, bytes(out)


def mapping(number: int, texts: Mapping[str, str]) -> list[Field]:
    """The fields of a map of texts, an entry in each."""
    return [data(number, Message([data(_KEY, key), data(_VALUE, value)])) for key, value in texts.items()]


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The integer that begins there, and where the next field begins."""
    result = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return result & _MASK, at
    raise ValueError("not a message in protobuf's wire format: an integer of more than 10 bytes")


def _write_varint(out: bytearray, value: int) -> None:
    value &= _MASK  # negative ones are written as 64 bits
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def _signed(value: Value) -> int:
    if not isinstance(value, int):
        raise ValueError("a field holds bytes where an integer belongs")
    return value - (1 << 64) if value >> 63 else value


def _checked(value: Value) -> bytes:
    if isinstance(value, int):
        raise ValueError("a field holds an integer where bytes belong")
    return value
