from workloads import Request
from workloads.tokens import prompt_tokens


def test_equal_ids_become_equal_tokens():
    one, two = Request(0.0, 700, 1, (3, 4)), Request(0.0, 1024, 1, (3, 5))
    first, second = prompt_tokens(one, 512), prompt_tokens(two, 512)
    assert len(first) == 700
    assert (first[:512] == second[:512]).all()
    assert (first[512:] != second[512:700]).any()
    assert (prompt_tokens(one, 512, salt="x") != first).mean() > 0.9
