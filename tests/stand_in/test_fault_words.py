"""Faults as text, and which request they befall: pure functions."""

import pytest

from serving.stand_in.faults.choice import PLACES, fault_of, num_good_blocks
from serving.stand_in.faults.config import AdminConfig, FaultConfig
from serving.stand_in.faults.values import read_times
from serving.stand_in.faults.words import changed_faults, fault_words, read_faults

ALL = {
    "429": 0.05,
    "503": 0.01,
    "disconnect": 0.01,
    "cut": 0.02,
    "stall": "0.01:30s",
    "first_byte": "0.1:200ms",
    "token": "10ms..30ms",
    "slow": 2.5,
    "exit": 100,
    "kill": "30s",
    "engine_death": "500ms",
    "startup": "2s",
    "unready": "3s",
    "health": "down",
    "kv_events_drop": 0.2,
    "kv_events_delay": "50ms+-10ms",
    "kv_events_swap": 0.3,
    "metrics_freeze": 7,
    "metrics_fail": 0.4,
    "metrics_delay": "1s",
    "by": "id",
}


def test_faults_are_written_as_they_are_read():
    config = read_faults([f"{name}={value}" for name, value in ALL.items()], seed=5)
    assert fault_words(config) == ALL
    assert changed_faults(FaultConfig(seed=5), fault_words(config)) == config
    assert config.seed == 5


def test_a_change_keeps_what_it_does_not_name_and_null_removes():
    config = read_faults(["429=0.05", "500=0.1", "slow=2"])
    assert fault_words(changed_faults(config, {"429": None, "cut": 0.5, "slow": None})) == {"500": 0.1, "cut": 0.5}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["429"], "--fault 429: expected NAME=VALUE, such as 429=0.05"),
        (["429=2"], "--fault 429=2: expected a share from 0 to 1, such as 0.05"),
        (["429=nan"], "--fault 429=nan: expected a share from 0 to 1, such as 0.05"),
        (["200=0.1"], "--fault 200=0.1: expected one of 400 to 599, disconnect"),
        (["stall=0.1"], "--fault stall=0.1: expected a share and a time, such as 0.01:30s"),
        (["stall=0.1:30"], "--fault stall=0.1:30: expected a share and a time"),
        (["first_byte=3"], "--fault first_byte=3: expected a time: 200ms, 100ms..300ms or 200ms+-50ms"),
        (["token=3s..2s"], "--fault token=3s..2s: expected a time"),
        (["slow=0"], "--fault slow=0: expected a factor above 0, such as 2"),
        (["exit=0"], "--fault exit=0: expected a number of answers, such as 100, or a time, such as 30s"),
        (["health=odd"], "--fault health=odd: expected one of honest, up, down"),
        (["startup=2d"], "--fault startup=2d: expected a time of at most a day with its unit"),
        (["429=0.1", "429=0.2"], "--fault 429=0.2: 429 is given twice"),
        (["429=0.6", "cut=0.6"], "add up to 1.2; expected at most 1"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(words, message):
    with pytest.raises(ValueError) as refusal:
        read_faults(words)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_an_admin_port_that_others_reach_needs_a_token():
    with pytest.raises(ValueError, match=r"--admin-host 0\.0\.0\.0: others can reach"):
        AdminConfig(host="0.0.0.0")
    assert AdminConfig(host="0.0.0.0", token="secret").host == "0.0.0.0"
    assert "secret" not in repr(AdminConfig(token="secret"))
    for host in ("127.0.0.2", "::1", "localhost"):
        AdminConfig(host=host)


def test_the_same_seed_and_number_always_meet_the_same_fault():
    config = read_faults(["429=0.1", "cut=0.1", "stall=0.1:1s", "first_byte=0.5:1ms..9ms"], seed=3)
    faults = [fault_of(config, number) for number in range(200)]
    assert faults == [fault_of(config, number) for number in range(200)]
    other = read_faults(["429=0.1", "cut=0.1", "stall=0.1:1s", "first_byte=0.5:1ms..9ms"], seed=4)
    assert [fault.kind for fault in faults] != [fault_of(other, number).kind for number in range(200)]


def test_each_fault_befalls_its_share_and_no_request_meets_two():
    config = read_faults(["429=0.1", "500=0.2", "disconnect=0.1", "cut=0.2", "stall=0.1:1s"])
    kinds = [fault_of(config, number).kind for number in range(20_000)]
    shares = {kind: kinds.count(kind) / len(kinds) for kind in set(kinds)}
    expected = {"429": 0.1, "500": 0.2, "disconnect": 0.1, "cut": 0.2, "stall": 0.1, "": 0.3}
    assert shares == pytest.approx(expected, abs=0.015)
    assert {fault_of(config, number).place for number in range(1000)} == set(range(1, PLACES + 1))


def test_times_are_drawn_as_their_distribution_says():
    def times(text):
        return [read_times(text).time_s(1, "token", number) for number in range(5000)]

    assert set(times("20ms")) == {0.02}
    uniform = times("10ms..30ms")
    assert 0.01 <= min(uniform) < 0.0101 and 0.0299 < max(uniform) <= 0.03
    assert sum(uniform) / 5000 == pytest.approx(0.02, rel=0.02)
    normal = times("20ms+-5ms")
    assert sum(normal) / 5000 == pytest.approx(0.02, rel=0.02)
    assert sum(time < 0.015 for time in normal) / 5000 == pytest.approx(0.159, abs=0.02)
    assert min(times("1ms+-10ms")) == 0.0
    assert sum(time > 0 for time in times("0.25:20ms")) / 5000 == pytest.approx(0.25, abs=0.02)


def test_a_load_of_kv_fails_at_some_block():
    config = FaultConfig(kv_load=0.5)
    found = [num_good_blocks(config, number, 4) for number in range(2000)]
    assert sum(each is not None for each in found) / 2000 == pytest.approx(0.5, abs=0.04)
    assert {each for each in found if each is not None} == {0, 1, 2, 3}
    assert num_good_blocks(FaultConfig(), 1, 4) is None
