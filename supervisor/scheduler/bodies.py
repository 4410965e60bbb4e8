"""Reading requests' bodies and writing JSON answers."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from aiohttp import web

from stockade.supervisor.scheduler.errors import RequestError

M = TypeVar("M", bound=msgspec.Struct)


def read_message(body: bytes, message: type[M]) -> M:
    """A message of the wire: missing and null fields mean empty, unknown ones are ignored.

    Raises:
        RequestError: it is not a JSON object, or a field has the wrong type or is out of range.
    """
    try:
        fields = msgspec.json.decode(body, type=dict[str, Any])
        given = {name: value for name, value in fields.items() if value is not None}
        for field in msgspec.structs.fields(message):
            if field.required and field.encode_name not in given:
                given[field.encode_name] = "" if field.type is str else 0
        return msgspec.convert(given, message)
    except msgspec.MsgspecError as error:
        raise RequestError(f"cannot read the body: {error}") from error


def json_response(content: Any, *, status: int = 200) -> web.Response:
    """An answer in JSON."""
    return web.Response(
        body=msgspec.json.encode(content), status=status, content_type="application/json"
    )
