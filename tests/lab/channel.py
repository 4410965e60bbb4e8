"""The wire between the lab and the agent in its guest: frames on a byte stream.

    frame = kind (1 byte), length (4 bytes, big endian), payload

    lab to guest    RUN       JSON: argv, directory, environment, files (paths to bring back)
                    POWEROFF  nothing; the guest syncs and switches itself off
    guest to lab    HELLO     JSON: kernel, and seconds that each stage took; ready for RUN
                    FAILED    text: the guest cannot be made ready
                    OUTPUT    bytes that the command printed, stdout and stderr in order
                    FILE      path, NUL, content; one for each wanted file that exists
                    EXIT      JSON: status, as subprocess has it (negative: a signal)

The stream is a virtio port in the guest and a Unix socket on the lab's side. A guest that dies in
the middle of a frame leaves a torn one, which is an end like any other.
"""

from __future__ import annotations

import enum
import json
import struct
from collections.abc import Callable
from typing import Any, Final

_HEADER: Final = struct.Struct(">cI")
# Only to recognise noise: a junit file of thousands of tests has a few megabytes.
MAX_PAYLOAD_BYTES: Final = 256 * 1024 * 1024


class Kind(enum.Enum):
    """What a frame means; see the module's text."""

    RUN = b"R"
    POWEROFF = b"P"
    HELLO = b"H"
    FAILED = b"X"
    OUTPUT = b"O"
    FILE = b"F"
    EXIT = b"E"


def frame(kind: Kind, payload: bytes = b"") -> bytes:
    """One frame."""
    return _HEADER.pack(kind.value, len(payload)) + payload


def json_frame(kind: Kind, fields: dict[str, Any]) -> bytes:
    """One frame that carries ``fields``."""
    return frame(kind, json.dumps(fields).encode())


class Decoder:
    """Takes a stream apart that arrives in pieces of any size."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[tuple[Kind, bytes]]:
        """The frames that are whole with ``data``.

        Raises:
            ValueError: this is no such stream.
        """
        self._buffer += data
        frames = []
        while len(self._buffer) >= _HEADER.size:
            kind, length = _HEADER.unpack_from(self._buffer)
            if length > MAX_PAYLOAD_BYTES:
                raise ValueError(f"a frame of {length} bytes: the stream is damaged")
            end = _HEADER.size + length
            if len(self._buffer) < end:
                break
            frames.append((Kind(kind), bytes(self._buffer[_HEADER.size : end])))
            del self._buffer[:end]
        return frames


def read_frame(read: Callable[[int], bytes]) -> tuple[Kind, bytes] | None:
    """The next frame by blocking ``read(size)``; None at the end of the stream."""
    header = _read_exactly(read, _HEADER.size)
    if header is None:
        return None
    kind, length = _HEADER.unpack(header)
    payload = _read_exactly(read, length)
    return None if payload is None else (Kind(kind), payload)


def _read_exactly(read: Callable[[int], bytes], size: int) -> bytes | None:
    data = b""
    while len(data) < size:
        part = read(size - len(data))
        if not part:
            return None
        data += part
    return data
