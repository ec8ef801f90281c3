"""Where TTFT goes: its parts, in the order in which a request goes through them.

    apart           sent --queue--> admitted --prefill--> computed --decode queue--> read --transfer--> come --first step--> first token
    blocks first    sent --decode queue--> blocks --queue--> admitted --prefill--> computed --transfer--> come --first step--> first token
    one worker      sent --queue--> admitted --prefill, with its first step--> first token

The parts of a request add up to its TTFT from sent. Overlaps count once: KV that is transferred during the prefill is part
of the prefill.
"""

import msgspec
import numpy as np

from reports.figures.metrics import of_each
from reports.record.records import Flags, Floats, Record, Requests

PARTS = {
    "queue": "until a worker starts on the prompt",
    "prefill": "until the prompt is computed or, if one worker does everything, until the first token",
    "decode_queue": "until the decode worker has blocks for the prompt and the transfer of its KV starts",
    "transfer": "until the KV has arrived",
    "first_step": "until the first token",
}
"""Every part of TTFT, and when it ends."""
LABELS = {name: name.replace("_", " ") for name in PARTS}


class Split(msgspec.Struct, frozen=True):
    """The mean of each part over all requests of an arm with known times (s); the parts add up to `ttft`."""

    requests: int
    ttft: float
    """Mean TTFT from sent."""
    queue: float
    prefill: float
    decode_queue: float | None = None
    """None, like the next two, if one worker does everything."""
    transfer: float | None = None
    first_step: float | None = None
    apart: float = 0.0
    """Share of the requests that one worker prefilled and another decoded."""
    blocks_first: bool = False
    """Whether they waited for blocks at the decode worker before the prefill instead of after it."""

    @property
    def parts(self) -> dict[str, float]:
        """The parts that exist, in the order in which requests go through them."""
        names = [name for name in PARTS if getattr(self, name) is not None]
        if self.blocks_first:
            names.sort(key=lambda name: name != "decode_queue")
        return {name: getattr(self, name) for name in names}


def split_ttft(runs: list[Record]) -> Split | None:
    """Return where the TTFT of an arm's runs goes; None if no server reported when it started on a request."""
    requests = Requests.concatenate([run.requests for run in runs])
    requests = requests[~np.isnan(of_each(requests, "ttft")) & ~requests.admitted_s.mask]
    if not len(requests):
        return None
    is_apart, is_early = ~requests.prefill_worker.mask, _had_blocks_early(requests)
    found = _parts(requests, is_early) if is_apart.any() else _parts_at_one(requests)
    parts = {name: float(values.mean()) for name, values in found.items()}
    return Split(
        requests=len(requests),
        ttft=float((requests.first_token_s - requests.sent_s).mean()),
        apart=float(is_apart.mean()),
        blocks_first=bool(is_early.any()),
        **parts,
    )


def _had_blocks_early(requests: Requests) -> Flags:
    """Return which requests had blocks at their decode worker before the prefill."""
    is_early = requests.decode_blocks_s <= requests.admitted_s
    return np.asarray(is_early.filled(False) & ~requests.prefill_worker.mask)


def _parts_at_one(requests: Requests) -> dict[str, Floats]:
    """Return the parts of each request's TTFT (s) where the same worker computes prompts and answers."""
    sent, end = requests.sent_s.data, requests.first_token_s.data
    started = np.minimum(np.fmax(sent, requests.admitted_s.data), end)
    return {"queue": started - np.minimum(sent, end), "prefill": end - started}


def _parts(requests: Requests, is_early: Flags) -> dict[str, Floats]:
    """Return the parts of each request's TTFT (s)."""
    is_apart = ~requests.prefill_worker.mask
    sent, end = requests.sent_s.data, requests.first_token_s.data
    early = [np.where(is_early, times.data, sent) for times in (requests.decode_queued_s, requests.decode_blocks_s)]
    late = [
        np.where(is_apart, times.filled(np.nan), end)
        for times in (requests.prefill_end_s, requests.transfer_start_s, requests.transfer_end_s)
    ]
    stamps = np.fmax.accumulate([sent, *early, requests.admitted_s.data, *late, end])
    before, wait, queue, prefill, decode_queue, transfer, first_step = np.diff(np.minimum(stamps, end), axis=0)
    return {
        "queue": before + queue,
        "prefill": prefill,
        "decode_queue": wait + decode_queue,
        "transfer": transfer,
        "first_step": first_step,
    }
