"""The runs of an experiment, and the order in which they are carried out."""

import pytest

from dynabench.arm import SEEDS_APART, Arm, ClientConfig, Run, Settings, runs_of

A, B = (Arm(name, Settings(), {}) for name in "AB")


def test_arms_alternate_in_direction_and_share_a_seed_in_each_repeat():
    order = [(run.arm.name, run.repeat, run.seed) for run in runs_of([A, B], repeats=3, seed=7)]
    assert order == [("A", 0, 7), ("B", 0, 7), ("B", 1, 8), ("A", 1, 8), ("A", 2, 9), ("B", 2, 9)]


def test_the_twin_that_shows_the_noise_floor_has_seeds_of_its_own():
    twin = Arm("A (A/A)", Settings(), {}, is_repeated=True)
    seeds = {run.arm.name: run.seed for run in runs_of([A, twin], repeats=1, seed=3)}
    assert seeds == {"A": 3, "A (A/A)": 3 + SEEDS_APART}


def test_a_run_that_is_compared_with_none_is_named_by_its_router_mode():
    run = Run.alone(Settings(), seed=5)
    assert (run.arm.name, run.repeat, run.seed) == ("round-robin", 0, 5)


def test_changes_of_an_arm_are_plain_enough_for_json():
    arm = Arm("x", Settings(), {"a": 1, "b": None, "c": ("kv", "random")})
    assert arm.plain_changes == {"a": 1, "b": None, "c": "('kv', 'random')"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"url": "host:1"}, "url must begin with http:// or https://, not 'host:1'"),
        ({"clients": 65}, "clients must be from 1 to 64, not 65"),
        ({"max_failed_share": 1.5}, "max_failed_share must be from 0 to 1, not 1.5"),
        ({"timeout_s": 0}, "timeout_s must be greater than 0, not 0"),
    ],
)
def test_a_client_that_cannot_measure_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        ClientConfig(**settings)
