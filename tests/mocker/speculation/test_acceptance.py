"""How many drafts are accepted: rates from lengths, curves and files, and what is drawn from them."""

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mocker.chain import BlockChain
from mocker.sequence import Sequence
from mocker.speculation.acceptance import rates_of_curve, rates_of_length
from mocker.speculation.files import read_rates
from mocker.speculation.random_drafter import RandomDrafter, uniform

GOLDEN = """
_metadata:
  draft-model: a/head
a-model:
  thinking_on: {1: 1.78, 2: 2.38, 3: 2.83, 4: 3.11, 5: 3.35}
  thinking_off: {1: 1.8, 2: 2.5, 3: 2.45}
"""
METRICS = """
# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 80.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 20.0
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 60.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="0"} 15.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 30.0
"""


def sequence(name, num_known):
    found = Sequence(name, num_prompt=4, max_tokens=1000, chain=BlockChain([]))
    found.num_known = num_known
    return found


@given(st.integers(1, 12), st.floats(0, 1), st.integers(1, 12))
def test_rates_of_a_length_have_that_mean(num_measured, share, num_drafts):
    length = 1 + share * num_measured
    assert 1 + sum(rates_of_length(length, num_measured, num_measured)) == pytest.approx(length)
    rates = rates_of_length(length, num_measured, num_drafts)
    assert len(rates) == num_drafts
    assert all(0 <= later <= rate <= 1 for rate, later in itertools.pairwise(rates))


def test_another_number_of_drafts_has_the_rates_that_were_measured():
    assert rates_of_length(2.4, 3, 5)[:3] == rates_of_length(2.4, 3, 3)
    assert 1 + sum(rates_of_length(2.4, 3, 1)) == pytest.approx(1.665, abs=0.001)


@pytest.mark.parametrize("length", [0.9, 4.1])
def test_a_length_that_no_rates_have_is_refused(length):
    with pytest.raises(ValueError, match=rf"acceptance_length is {length}; expected 1 to 4, as 3 drafts were verified"):
        rates_of_length(length, 3, 3)


def test_rates_of_a_curve_add_up_to_its_lengths_in_spite_of_noise():
    assert rates_of_curve({1: 1.78, 2: 2.38, 3: 2.83}, 3) == pytest.approx((0.78, 0.6, 0.45))
    noisy = rates_of_curve({1: 1.4, 2: 2.0, 3: 1.95}, 2)
    assert noisy == pytest.approx((0.5, 0.5))
    assert rates_of_curve({1: 1.4, 2: 2.0, 3: 1.97}, 3) == pytest.approx((0.97 / 3,) * 3)
    with pytest.raises(ValueError, match=r"draft 1 is accepted at a rate of -0\.1; expected 0 to 1"):
        rates_of_curve({1: 0.9}, 1)
    with pytest.raises(
        ValueError, match="num_speculative_tokens is 4, and the curve has no length for 3 drafts; it has 1, 2, 4"
    ):
        rates_of_curve({1: 1.4, 2: 2.0, 4: 3.0}, 4)


def test_files_of_all_kinds_are_read(tmp_path):
    golden, listed, metrics = tmp_path / "a.yaml", tmp_path / "a.json", tmp_path / "metrics.txt"
    golden.write_text(GOLDEN)
    listed.write_text("[0.9, 0.5]")
    metrics.write_text(METRICS)
    assert read_rates(str(golden), 3, "thinking_on") == pytest.approx((0.78, 0.6, 0.45))
    assert read_rates(str(listed), 1, "thinking_on") == (0.9,)
    assert read_rates(str(metrics), 2, "thinking_on") == (0.75, 0.3)
    metrics.write_text(METRICS.replace("vllm:", "dynamo_component_"))  # our frontend's names
    assert read_rates(str(metrics), 2, "thinking_on") == (0.75, 0.3)


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("a.yaml", GOLDEN, "num_speculative_tokens is 6, and the curve has no length for 6 drafts"),
        ("a.yaml", "[", "it is not YAML"),
        ("a.yaml", "{}", "it has 0 models; expected one"),
        ("a.yaml", "{m: {other: {1: 1.5}}}", "it has no lengths for acceptance_mode thinking_on; it has other"),
        ("a.yaml", "{m: {thinking_on: {x: 1.5}}}", "'x' is not a number of drafts"),
        ("a.json", "[0.9]", "it has rates of 1 drafts, and num_speculative_tokens is 6"),
        ("a.json", "[0.5, 0.9]", "draft 2 is accepted at a rate of 0.9, the one before it at 0.5; expected no more"),
        ("a.json", "{}", "expected a list of rates by position"),
        ("a.json", "[null]", "None is not a number"),
        ("a.json", "x", "it is not JSON"),
        ("m.txt", "vllm:prompt_tokens_total 3\n", "expected those of a vLLM server that has speculated"),
        ("a.json", f"[1{'0' * 400}]", "is not a number"),
        ("a.json", "[" * 100_000, "it is nested too deep"),
        ("m.txt", METRICS.replace('position="1"', 'position="999999999"'), "it is not the metrics of a server"),
        ("m.txt", "{", "it is not the metrics of a server"),
        (
            "m.txt",
            f"{METRICS}vllm:spec_decode_num_accepted_tokens_per_pos_total 1\n",
            "it is not the metrics of a server",
        ),
        ("m.txt", None, "cannot be read"),
    ],
)
def test_a_file_that_does_not_say_it_is_refused_by_name(tmp_path, name, text, why):
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=rf"^acceptance_file {path}.*{why}"):
        read_rates(str(path), 6, "thinking_on")


def test_what_is_drawn_has_the_rates_and_depends_on_the_sequence_alone():
    rates = (0.8, 0.5, 0.1)
    drafter, again = RandomDrafter(rates, 7), RandomDrafter(rates, 7)
    drawn = [drafter.accepted(sequence(n % 100, n), 3) for n in range(20_000)]
    assert drawn[::-1] == [again.accepted(sequence(n % 100, n), 3) for n in reversed(range(20_000))]
    counts = Counter(drawn)
    for place, rate in enumerate(rates, 1):
        share = sum(count for number, count in counts.items() if number >= place) / len(drawn)
        assert share == pytest.approx(rate, abs=0.01)  # 3 standard deviations
    assert drafter.accepted(sequence("named", 9), 1) <= 1
    assert drafter.proposed(sequence(1, 5)) == 3


def test_seeds_and_names_draw_differently():
    assert len({uniform(seed, name, place) for seed in range(10) for name in range(10) for place in range(10)}) == 1000
