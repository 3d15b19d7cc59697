"""Protobuf's wire format, for XLA's serialized messages, whose schema Python lacks:

https://protobuf.dev/programming-guides/encoding
"""

from collections.abc import Iterable, Mapping
from typing import Self

_VARINT, _FIXED_64, _BYTES, _FIXED_32 = 0, 1, 2, 5  # wire types
_SIZES = {_FIXED_64: 8, _FIXED_32: 4}
_MASK = (1 << 64) - 1
_KEY, _VALUE = 1, 2  # of a map's entry

Value = int | bytes
Field = tuple[int, int, Value]  # number, wire type, value


class Message:
    """A message as its fields, in order; later ones of a number count, and lists may be in several."""

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

    def field_numbers(self) -> set[int]:
        return {number for number, _, _ in self.fields}

    def only(self, *numbers: int) -> list[Field]:
        return [field for field in self.fields if field[0] in numbers]

    def without(self, *numbers: int) -> list[Field]:
        return [field for field in self.fields if field[0] not in numbers]

    def _last(self, number: int) -> Value | None:
        for field_number, _, value in reversed(self.fields):
            if field_number == number:
                return value
        return None

    def integer(self, number: int, default: int = 0) -> int:
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
    return number, _VARINT, value


def data(number: int, value: "bytes | str | Message") -> Field:
    if isinstance(value, Message):
        value = value.to_bytes()
    return number, _BYTES, value.encode() if isinstance(value, str) else value


def packed(number: int, values: Iterable[int]) -> Field:
    out = bytearray()
    for value in values:
        _write_varint(out, value)
    return number, _BYTES, bytes(out)


def mapping(number: int, texts: Mapping[str, str]) -> list[Field]:
    return [data(number, Message([data(_KEY, key), data(_VALUE, value)])) for key, value in texts.items()]


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    result = shift = 0
    while True:
        byte = data[at]
        at += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return result, at
        shift += 7


def _write_varint(out: bytearray, value: int) -> None:
    value &= _MASK
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
