"""How wide a text is, in the font that is the widest of those that pages are commonly shown in (DejaVu Sans)."""

import functools
import unicodedata

FIRST = 32
WIDTHS = (
    318, 401, 460, 838, 636, 950, 780, 275, 390, 390, 500, 838, 318, 361, 318, 337, 636, 636, 636, 636, 636, 636, 636, 636,
    636, 636, 337, 337, 838, 838, 838, 531, 1000, 684, 686, 698, 770, 632, 575, 775, 752, 295, 295, 656, 557, 863, 748, 787,
    603, 787, 695, 635, 611, 732, 684, 989, 685, 611, 685, 390, 337, 390, 838, 500, 500, 613, 635, 550, 635, 615, 352, 635,
    634, 278, 278, 579, 278, 974, 634, 612, 635, 635, 411, 521, 392, 634, 592, 818, 592, 592, 525, 636, 337, 636, 838,
)  # fmt: skip
"""Of ASCII's printable characters, in thousandths of the font's size."""
OTHERS = 838
"""Of signs, and of most letters of other alphabets, at most."""
IDEOGRAPH = 1000


@functools.lru_cache(4096)
def width_of(text: str, size: float) -> float:
    """Return how wide a text is."""
    return sum(map(_width, text)) * size / 1000


def _width(character: str) -> int:
    place = ord(character) - FIRST
    if 0 <= place < len(WIDTHS):
        return WIDTHS[place]
    if unicodedata.combining(character):
        return 0
    return IDEOGRAPH if unicodedata.east_asian_width(character) in "FW" or character == "■" else OTHERS
