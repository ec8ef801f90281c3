"""Where a step must end so that the states of layers can be shared: at the end of a block."""


def aligned_chunk(
    start: int,
    count: int,
    *,
    prompt: int,
    known: int,
    end_of_known: int,
    junction: int,
    block_size: int,
    most: int,
    drops_last: bool,
) -> int:
    """Return how many of `count` tokens to compute so that states are computed where blocks end.

    Args:
        start: tokens that are computed; within a block, if an encoder had no room for the item that follows.
        count: tokens that the budget allows.
        prompt: tokens of the prompt.
        known: tokens that are known.
        end_of_known: those of them after which a later prompt may go on: all but the last, or fewer if names are coarse.
        junction: where the prompt leaves another one's; 0: nowhere.
        block_size: tokens in a block.
        most: tokens that one step may compute of a sequence.
        drops_last: whether the last block of a hit is computed again.
    """
    stop, end = max(prompt, known - 1), start + count
    if start >= stop:
        return count
    cut = end // block_size * block_size
    if end < stop and (cut > start or block_size <= most):
        end = cut
    last = known // block_size * block_size - block_size if drops_last else end_of_known // block_size * block_size
    ends = [last]
    if start % block_size:
        ends.append(-(-start // block_size) * block_size)
    if start < junction < end:
        ends.append(start + (junction - start) // block_size * block_size)
    return max(min([end, *[each for each in ends if start < each < end]]) - start, 0)
