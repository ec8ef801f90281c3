"""The fields of a request: those that are read, those whose value asks for nothing, and no others."""

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

import msgspec

from serving.frontend.api.errors import ApiError

FEW = 64
"""Up to this many fields, their names are searched for in the body one by one."""

Neutral = Mapping[str, tuple[Any, ...]]
"""Fields that cannot be honoured, with the values that ask for nothing besides null."""

NOTHING: tuple[Any, ...] = ([], {}, "")
"""Values of unknown fields that ask for nothing, besides null and false."""

Struct = TypeVar("Struct", bound=msgspec.Struct)


def names_of(type: type[msgspec.Struct]) -> frozenset[str]:
    """Return the names of a type's fields as JSON has them."""
    return frozenset(field.encode_name for field in msgspec.structs.fields(type))


def check_body(
    body: bytes | bytearray, known: Collection[str], neutral: Neutral, *, is_strict: bool = False
) -> dict[str, msgspec.Raw]:
    """Return the fields of a body, unless there are some that would have to be ignored.

    Args:
        body: the request as it came.
        known: the fields that are read.
        neutral: fields that are not read, with the values that ask for nothing.
        is_strict: whether unknown fields are rejected even if their value asks for nothing.

    Raises:
        ApiError: there is such a field, or a field occurs twice.
    """
    fields = _decode_fields(body)
    _check_once(body, fields)
    for name, value in fields.items():
        if name not in known:
            _check_neutral(name, msgspec.json.decode(value), neutral, is_strict=is_strict)
    return fields


def read(value: Any, type: type[Struct], *, where: str, neutral: Neutral) -> Struct:
    """Turn an object within a request into a value of a type.

    Args:
        value: the object, as decoded.
        type: the type of the result; its fields are those that are read.
        where: the object's place in the request, for messages: `tools[0]`.
        neutral: fields that are not read, with the values that ask for nothing.

    Raises:
        ApiError: it is not such an object, or has other fields.
    """
    if not isinstance(value, dict):
        raise ApiError(400, f"{where}: expected an object", param=where)
    known = names_of(type)
    for name, entry in value.items():
        if name not in known:
            _check_neutral(name, entry, neutral, f"{where}.")
    try:
        return msgspec.convert(value, type)
    except msgspec.ValidationError as error:
        raise ApiError(400, f"{where} is not valid: {error}", param=where) from error


def _check_neutral(name: str, value: Any, neutral: Neutral, prefix: str = "", *, is_strict: bool = False) -> None:
    """Reject a field that is not read, unless its value asks for nothing."""
    param = prefix + name[:100]
    if name in neutral:
        if value is not None and value not in neutral[name]:
            raise ApiError(400, f"{param} is not supported", code="unsupported_parameter", param=param)
    elif is_strict or not (value is None or value is False or value in NOTHING):
        raise ApiError(400, f"unknown parameter: {param!r}", code="unknown_parameter", param=param)


def _check_once(body: bytes | bytearray, names: Collection[str]) -> None:
    """Reject a body with a duplicate name. A full walk takes longer than all other checks, so only odd bodies get one."""
    if len(names) <= FEW and b"\\u" not in body and all(body.count(b'"%b"' % name.encode()) == 1 for name in names):
        return
    seen: set[str] = set()
    for key in _decode_keys(body):
        if key.name in seen:
            raise ApiError(400, f"the request has {key.name[:100]!r} twice", param=key.name[:100])
        seen.add(key.name)


class _Key:
    """A key of an object; two keys with the same name are different keys."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_keys = msgspec.json.Decoder(dict[_Key, msgspec.Raw], dec_hook=lambda _, name: _Key(name)).decode
