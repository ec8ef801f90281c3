"""The fields of a request: those that are read, those whose value asks for nothing, and no others."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from serving.frontend.api.errors import ApiError

FEW = 64
"""Up to this many fields, their names are searched for in the body one by one."""

Neutral = Mapping[str, tuple[Any, ...]]
"""Fields that cannot be honoured, with the values that ask for nothing besides null."""

NOTHING: tuple[Any, ...] = ([], {}, "")
"""Values of unknown fields that ask for nothing, besides null and false."""

Struct = TypeVar("Struct", bound=msgspec.Struct)

# Objects are read many calls below the one that knows the setting, in functions that have no other use for it.
_is_strict: ContextVar[bool] = ContextVar("is_strict", default=False)


@contextmanager
def strictly(is_strict: bool) -> Iterator[None]:
    """Within this context, `read` rejects unknown fields even if their value asks for nothing, at any depth."""
    token = _is_strict.set(is_strict)
    try:
        yield
    finally:
        _is_strict.reset(token)


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


def check_within(fields: Mapping[str, msgspec.Raw], type: type[msgspec.Struct]) -> None:
    """Reject every unknown field of the objects within a request, whatever its value.

    Args:
        fields: those of the request.
        type: its type. Objects of no type (a tool, a schema) may have any fields.
    """
    for name, info in _with_objects(type).items():
        if name in fields:
            _check_known(msgspec.json.decode(fields[name]), info, name)


def read_object(value: Any, type: type[Struct], *, where: str, neutral: Neutral) -> Struct:
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
            _check_neutral(name, entry, neutral, f"{where}.", is_strict=_is_strict.get())
        elif _is_strict.get() and name in _with_objects(type):
            _check_known(entry, _with_objects(type)[name], f"{where}.{name}")
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
        raise _unknown(param)


def _check_known(value: Any, info: inspect.Type, where: str) -> None:
    """Reject fields that a type does not have, at any depth."""
    match info:
        case inspect.Metadata(type=inner):
            _check_known(value, inner, where)
        case inspect.UnionType(types=types):
            for each in types:
                _check_known(value, each, where)
        case inspect.ListType(item_type=inner) if isinstance(value, list):
            for index, entry in enumerate(value):
                _check_known(entry, inner, f"{where}[{index}]")
        case inspect.StructType() if isinstance(value, dict):
            known = {field.encode_name: field.type for field in info.fields}
            for name, entry in value.items():
                if name in known:
                    _check_known(entry, known[name], f"{where}.{name}")
                elif name != info.tag_field:
                    raise _unknown(f"{where}.{name[:100]}")


@cache
def _with_objects(type: type[msgspec.Struct]) -> dict[str, inspect.Type]:
    """Return those fields of a type that may hold objects of a type."""
    info = inspect.type_info(type)
    assert isinstance(info, inspect.StructType)
    return {field.encode_name: field.type for field in info.fields if _has_objects(field.type)}


def _has_objects(info: inspect.Type) -> bool:
    match info:
        case inspect.Metadata(type=inner) | inspect.ListType(item_type=inner):
            return _has_objects(inner)
        case inspect.UnionType(types=types):
            return any(map(_has_objects, types))
    return isinstance(info, inspect.StructType)


def _unknown(param: str) -> ApiError:
    return ApiError(400, f"unknown parameter: {param!r}", code="unknown_parameter", param=param)


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
