"""Images that stand for a workload's media: mosaics of random colours, equal for equal ids."""

import base64
import functools
import hashlib
import re
import struct
import zlib
from typing import NamedTuple

TILE = 16
"""Width and height of a tile in pixels: an image of 1,024 x 1,024 takes about 35 kB."""
MOST_PIXELS = 1 << 13
SIZE = re.compile(r"([1-9]\d{0,3})x([1-9]\d{0,3})")


class ImageSize(NamedTuple):
    """Width and height in pixels."""

    width: int
    height: int

    @classmethod
    def parse(cls, text: str) -> "ImageSize":
        """Read WIDTHxHEIGHT.

        Raises:
            ValueError: it is something else, or too large.
        """
        found = SIZE.fullmatch(text)
        if found is None or max(size := cls(int(found[1]), int(found[2]))) > MOST_PIXELS:
            raise ValueError(
                f"image_size is {text!r}; expected WIDTHxHEIGHT in pixels, such as 512x512, up to {MOST_PIXELS}"
            )
        return size


@functools.lru_cache(256)
def data_url(name: str, size: ImageSize) -> str:
    """Return the image of a name as a data URL."""
    return f"data:image/png;base64,{base64.b64encode(mosaic(name, size)).decode()}"


def mosaic(name: str, size: ImageSize) -> bytes:
    """Return the image of a name as PNG, with three bytes a pixel."""
    across, down = -(-size.width // TILE), -(-size.height // TILE)
    colours = hashlib.shake_128(name.encode()).digest(3 * across * down)
    rows = bytearray()
    for row in range(down):
        tiles = range(3 * across * row, 3 * across * (row + 1), 3)
        line = b"".join(colours[place : place + 3] * TILE for place in tiles)[: 3 * size.width]
        rows += (b"\0" + line) * min(TILE, size.height - row * TILE)  # 0: no filter
    head = struct.pack(">IIBBBBB", size.width, size.height, 8, 2, 0, 0, 0)  # 8 bits of each of red, green and blue
    return b"\x89PNG\r\n\x1a\n" + _part(b"IHDR", head) + _part(b"IDAT", zlib.compress(rows, 6)) + _part(b"IEND", b"")


def _part(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
