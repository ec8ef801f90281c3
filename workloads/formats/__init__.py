"""The formats of workload files, each in its own file: how it is detected, read and written."""

from workloads.formats.format import Format
from workloads.formats.registry import (
    BUNDLED,
    DEFAULT,
    FORMATS,
    check_name,
    detect,
    like,
    lost,
    read,
    read_frame,
    write,
    writer,
)

__all__ = [
    "BUNDLED",
    "DEFAULT",
    "FORMATS",
    "Format",
    "check_name",
    "detect",
    "like",
    "lost",
    "read",
    "read_frame",
    "write",
    "writer",
]
