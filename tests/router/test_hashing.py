from serving.router.hashing import block_hashes, sequence_hashes

BLOCKS = [14643705804678351452, 16777012769546811212, 483935686894639516]
CHAIN = [14643705804678351452, 4945711292740353085, 12583592247330656132]


def test_hashes_are_dynamos():
    hashes = block_hashes(list(range(1, 13)), 4)
    assert hashes == BLOCKS
    assert sequence_hashes(hashes) == CHAIN


def test_a_partial_tail_has_no_hash():
    assert block_hashes([1, 2, 3, 4, 5], 4) == BLOCKS[:1]


def test_a_chain_can_go_on_from_a_parent():
    assert sequence_hashes(BLOCKS[1:], CHAIN[0]) == CHAIN[1:]
