"""A small run of round numbers, for tests of what is made of one."""

import numpy as np

from reports.records import Record, Requests

GAPS = ("gaps", "num_workers", "repeat", "is_complete", "notes", "facts", "is_live")


def run(arm="a", ttft=(1.0, 2.0), **changes):
    """A request a second, sent a quarter late; the first token after `ttft`, the last of ten tokens 9 s behind it.

    Changes are columns of its requests (None in a list: unknown), or fields of the record.
    """
    count = len(ttft)
    first = np.arange(count) + np.array(ttft, float)
    columns = {
        "worker": np.arange(count) % 2,
        "intended_s": np.arange(count, dtype=float),
        "sent_s": np.arange(count) + 0.25,
        "admitted_s": np.arange(count, dtype=float),
        "first_byte_s": first,
        "first_token_s": first,
        "last_token_s": first + 9.0,
        "done_s": first + 9.0,
        "isl": np.full(count, 100),
        "osl": np.full(count, 10),
        "first_chunk_tokens": np.ones(count, int),
        "cached_tokens": np.arange(count) * 50 % 100,
        "predicted_tokens": np.zeros(count, int),
        "preemptions": np.zeros(count, int),
    }
    fields = {"gaps": np.array([[1.0, 0, 0, 9, count]]), "wall_s": 0.1, "num_workers": 2}
    fields |= {name: changes.pop(name) for name in GAPS if name in changes}
    return Record(arm, Requests.of(**columns | changes), **fields)
