"""The table of images and other media: what the encoders computed, and what they found in their caches."""

from reports.figures.cells import number
from reports.record.pools import EncoderUse
from reports.summary import Summary
from reports.tables.by_pool import labelled
from reports.tables.grid import Grid


def media_grid(summary: Summary) -> Grid | None:
    """Lay out what encoders did; None if no request had media."""
    arms = {arm: figures.encoders for arm, figures in summary.arms.items() if figures.encoders}
    lines = [(label, _cells(use)) for label, use in labelled(arms) if use.requests]
    if not lines:
        return None
    return Grid(
        "What did the encoders do?",
        ["requests with media", "items", "encoded tokens", "found in the cache", "encoder busy (s)"],
        lines,
        "Items: the images and other media of those requests. Encoded: what the encoders of all workers made. Found: tokens "
        "of items that another request, or the same, had needed before. Items whose KV a prefix hit covers are in neither. Busy: "
        "what encoding added to steps; 0 where the encoder's time is not modelled.",
    )


def _cells(use: EncoderUse) -> list[str]:
    return [
        number(use.requests),
        number(use.items),
        number(use.encoded_tokens),
        number(use.found_tokens),
        number(use.busy_s, 2),
    ]
