import pytest

from serving.planner.budget import clamp, gpus_of, grow, keep, raised


@pytest.mark.parametrize(
    ("replicas", "gpus", "fitted"),
    [((6, 6), (1, 1), (4, 4)), ((10, 2), (1, 1), (6, 2)), ((3, 3), (2, 4), (1, 1)), ((2, 5), (1, 2), (1, 3))],
)
def test_pools_shrink_in_proportion_to_fit_eight_gpus(replicas, gpus, fitted):
    """C12."""
    assert clamp(replicas, gpus, (1, 1), most=8) == fitted


def test_pools_that_fit_the_budget_stay_as_they_are():
    assert clamp((3, 4), (1, 1), (1, 1), most=8) == (3, 4)


def test_the_pool_with_the_smallest_share_of_what_it_wants_grows_first():
    assert grow((1, 4), (1, 1), (4, 5), room=2) == (3, 4)


def test_a_pool_whose_workers_do_not_fit_leaves_gpus_to_others():
    assert grow((1, 1), (4, 1), (2, 3), room=3) == (1, 3)


def test_reductions_are_undone_down_to_the_least():
    assert keep((1, 3), (1, 1), (4, 4), least=6) == (3, 3)


def test_too_few_gpus_are_raised_in_proportion():
    assert raised((1, 3), (1, 1), least=8) == (2, 6)
    assert gpus_of((2, 6), (1, 1)) == 8
