"""Write a workload file whole or not at all."""

import gzip
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO, cast

from workloads import Request, WorkloadError, mooncake


def write_workload(requests: Iterable[Request], out: Path) -> int:
    """Write requests to a new file, compressed if its name ends in .gz; return how many.

    Raises:
        WorkloadError: the file exists or cannot be written.
    """
    if out.exists():
        raise WorkloadError(f"{out} exists; name another file, or remove it")
    rows = list(requests)
    work = None
    try:
        handle, name = tempfile.mkstemp(prefix=f".{out.name}.", dir=out.absolute().parent)
        work = Path(name)
        with os.fdopen(handle, "wb") as raw:
            if out.suffix == ".gz":
                with gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as packed:
                    mooncake.write(rows, cast(IO[bytes], packed))
            else:
                mooncake.write(rows, raw)
        work.chmod(0o644)
        work.rename(out)
    except OSError as error:
        raise WorkloadError(f"{out}: cannot be written ({error.strerror})") from error
    finally:
        if work is not None:
            work.unlink(missing_ok=True)
    return len(rows)
