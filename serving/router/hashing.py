"""Block and sequence hashes, as NVIDIA Dynamo computes them, so that events and tools interoperate.

Block hash: XXH3-64, seed 1337, over the block's token ids as little-endian u32. Sequence hash: the block
hash for a first block, else XXH3-64, seed 1337, over parent sequence hash and block hash as little-endian u64.
"""

import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

SEED = 1337
_pair = struct.Struct("<QQ").pack


def block_hashes(tokens: Sequence[int] | npt.NDArray[np.uint32], block_size: int) -> list[int]:
    """Hash each full block of a token sequence; a partial tail has none."""
    data = memoryview(np.asarray(tokens, "<u4").tobytes())
    width = 4 * block_size
    return [xxh3_64_intdigest(data[at : at + width], SEED) for at in range(0, len(data) - width + 1, width)]


def sequence_hashes(hashes: Sequence[int], parent: int | None = None) -> list[int]:
    """Chain block hashes to their prefixes, starting from a parent sequence hash."""
    chained = []
    for block_hash in hashes:
        parent = block_hash if parent is None else xxh3_64_intdigest(_pair(parent, block_hash), SEED)
        chained.append(parent)
    return chained
