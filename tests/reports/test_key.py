"""The key: short names that stay different, and colours that people with other eyes can tell apart."""

import itertools

import numpy as np
import pytest
from rich.cells import cell_len

from reports.key import PALETTE, WIDEST, css, key_of, with_short_names

# Machado, Oliveira and Fernandes (2009), severity 1: what is left of linear RGB where one kind of cone is missing.
SIGHT = {
    "all colours": np.eye(3),
    "no red": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "no green": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "no blue": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
CONES = np.array(
    [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
)
OKLAB = np.array(
    [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
)
"""A space in which equal distances look equal; 0.02 is the least that is seen side by side."""
PAPER = ("#ffffff", "#16181c")


def linear(colour):
    values = np.array([int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def seen(colour, sight):
    return OKLAB @ np.cbrt(CONES @ np.clip(sight @ linear(colour), 0, 1))


@pytest.mark.parametrize("side", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("name", SIGHT)
def test_any_two_colours_are_told_apart(name, side):
    colours = [seen(pair[side], SIGHT[name]) for pair in PALETTE]
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(colours, 2)) > 0.1


@pytest.mark.parametrize("side", [0, 1], ids=["light", "dark"])
def test_every_colour_stands_out_from_its_paper(side):
    def brightness(colour):
        return float(linear(colour) @ [0.2126, 0.7152, 0.0722]) + 0.05

    paper = brightness(PAPER[side])
    for pair in PALETTE:
        one = brightness(pair[side])
        assert max(one, paper) / min(one, paper) >= 3, pair[side]


def names(*arms):
    return [entry.name for entry in key_of(arms).values()]


MODES = ("kv", "lmetric+eps(5)", "prodstack-loadaware")


@pytest.mark.parametrize(
    ("arms", "wanted"),
    [
        (("random", "round-robin", "kv"), ["random", "round-robin", "kv"]),
        (("workers 1", "workers 2"), ["workers 1", "workers 2"]),
        (("az-1/kv", "az-2/kv"), ["az-1/kv", "az-2/kv"]),
        (("results/azure-2026-1/kv", "results/azure-2026-2/kv"), ["azure-2026-1", "azure-2026-2"]),
        (("kv, max_num_batched_tokens 512", "random, max_num_batched_tokens 512"), ["kv", "random"]),
        (("kv, max_num_batched_tokens 512", "random, max_num_batched_tokens 1024"), ["kv, 512", "random, 1024"]),
        (("prodstack-loadaware, max_num_batched_tokens 8192", "kv, max_num_batched_tokens 512"), ["prodstack-loada…, 8192", "kv, 512"]),
        (("a-very-long-name-of-a-run-1", "a-very-long-name-of-a-run-2"), ["long-name-of-a-run-1", "long-name-of-a-run-2"]),
        (("one_very_long_name_of_one_arm",), ["one_very_l…_of_one_arm"]),
        (("kv", "random", "kv (A/A)"), ["kv", "random", "kv (A/A)"]),
    ],
)  # fmt: skip
def test_names_leave_out_what_all_share(arms, wanted):
    assert names(*arms) == wanted


@pytest.mark.parametrize(
    "arms",
    [
        [f"{mode}, max_num_batched_tokens {512 << n}" for mode in MODES for n in range(4)],
        [f"{'x' * 40}{n}{'y' * 40}" for n in range(30)],
        ["電" * 20, "車" * 20, "電" * 21],
        ["a\nb", "\x1b[31mred", " ", ""],
        ["kv", "kv, caching 1", "kv, caching 0 (A/A)"],
    ],
)
def test_names_are_narrow_and_different(arms):
    short = names(*arms)
    assert len(set(short)) == len(arms)
    assert max(map(cell_len, short)) <= WIDEST
    assert all(name.isprintable() for name in short)


def test_no_two_arms_look_alike():
    entries = key_of([f"arm {n}" for n in range(28)]).values()
    assert len({(entry.colour, entry.dashes) for entry in entries}) == 28
    assert [entry.place for entry in entries] == list(range(28))


def test_the_first_arm_once_more_has_its_colour():
    key = key_of(["kv", "random", "kv (A/A)"])
    assert key["kv (A/A)"].colour == key["kv"].colour != key["random"].colour
    assert key["kv (A/A)"].dashes != key["kv"].dashes == ()


def test_the_page_has_every_colour_light_and_dark():
    for number, (light, dark) in enumerate(PALETTE):
        assert f"--arm-{number}: {light};" in css()
        assert css().count(f"--arm-{number}: {dark};") == 2


def test_a_sentence_has_the_short_names_of_arms():
    arms = ["kv, num_gpu_blocks 1024, max_num_seqs 8", "kv, num_gpu_blocks 4096, max_num_seqs 64"]
    key = key_of(arms)
    assert with_short_names(f"{arms[0]} could not keep up, {arms[1]} could.", key) == (
        f"'{key[arms[0]].name}' could not keep up, '{key[arms[1]].name}' could."
    )
    assert len(key[arms[0]].name) < len(arms[0])
    assert with_short_names(f"'{arms[0]}' could.", key) == f"'{key[arms[0]].name}' could."


def test_a_short_name_in_a_longer_one_is_left_alone():
    key = key_of(["kv", "kv-tiered", "dynamo-kv"])
    text = "kv-tiered and dynamo-kv have a lower mean TTFT than kv."
    assert with_short_names(text, key) == text


def test_a_setting_with_a_long_name_keeps_the_end_of_it():
    names = [f"num_speculative_tokens {count}" for count in (0, 3)]
    assert [entry.name for entry in key_of(names).values()] == ["speculative_tokens 0", "speculative_tokens 3"]


@pytest.mark.parametrize(
    ("setting", "wanted"),
    [
        ("disable_chunked_mm_input", "disable_…input"),
        ("enable_prefix_caching", "enable_…caching"),
        ("pools.decode.enable_prefix_caching", "enable_…caching"),
        ("no_async_scheduling_at_all", "no_…at_all"),
        ("disable_hybrid_kv_cache_manager", "disable_…manager"),
    ],
)
def test_a_word_that_turns_a_setting_around_stays(setting, wanted):
    short = names(*(f"{setting} {value}" for value in ("True", "False")))
    assert [name.rpartition(" ")[0] for name in short] == [wanted] * 2
