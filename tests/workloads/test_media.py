"""Images and other media in workloads: read, checked, kept or refused."""

import json
from collections import Counter

import pytest

from workloads import Request, Workload, WorkloadError, formats
from workloads.anonymise import anonymise
from workloads.describe import describe_workload
from workloads.fit import fit_workload
from workloads.merge import merge_workloads
from workloads.request import Media
from workloads.shape import ShapeConfig, shape
from workloads.synthesize import SynthConfig, synthesize

CAT = Media(3, 20, "cat")


def read(tmp_path, *requests):
    """Read requests of 40 tokens in blocks of 16, each with other ids unless it says otherwise."""
    header = {"schema": "dynabench.workload/1", "block_size": 16}
    rows = [
        {"arrival_s": 1.0 * n, "input_length": 40, "output_length": 2, "hash_ids": [9 * n, 9 * n + 1, 9 * n + 2]} | row
        for n, row in enumerate(requests)
    ]
    path = tmp_path / "w.jsonl"
    path.write_text("\n".join(map(json.dumps, [header, *rows])))
    return formats.read(path)


def item(offset=3, tokens=20, id="cat"):
    return {"offset": offset, "tokens": tokens, "id": id}


def test_a_request_says_which_tokens_are_of_an_image(tmp_path):
    workload = read(tmp_path, {}, {"media": [item(), item(23, 5, "dog")]})
    assert [request.media for request in workload] == [(), (CAT, Media(23, 5, "dog"))]
    assert workload.columns.has_media
    assert not read(tmp_path, {}).columns.has_media


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([{"media": [item(id="")]}], r"line 2: media\[0\]: id must not be empty"),
        ([{"media": [item(tokens=0)]}], r"line 2: media\[0\]: tokens must be at least 1, not 0"),
        ([{"media": [item(-1)]}], r"media\[0\]: offset must be at least 0, where the item before ends, not -1"),
        (
            [{"media": [item(), item(22)]}],
            r"media\[1\]: offset must be at least 23, where the item before ends, not 22",
        ),
        ([{"media": [item(30)]}], r"media\[0\]: it ends at 50; expected at most input_length, 40: its tokens are part"),
        (
            [{"media": [item()]}, {"media": [item(tokens=21)]}],
            r"line 3: media\[0\]: 'cat' has 21 tokens; expected 20, as in an earlier request: equal ids are equal items",
        ),
        (
            [{"media": [item()]}, {"media": [item(id="dog")], "hash_ids": [0, 10, 11]}],
            r"line 3: hash_ids\[0\] is 0, a block with 'dog' at 3, and in an earlier request a block with 'cat' at 3; expected",
        ),
        (
            [{"media": [item()]}, {"hash_ids": [0, 1, 2]}],
            r"line 3: hash_ids\[0\] is 0, a block of text, and in another request a block with 'cat' at 3; expected other",
        ),
        (
            [{"hash_ids": [9, 10, 11]}, {"media": [item()], "hash_ids": [9, 10, 11]}],
            r"line 2: hash_ids\[0\] is 9, a block of text, and in another request a block with 'cat' at 3; expected other",
        ),
        ([{"media": [{"offset": 3, "tokens": 20}]}], "line 2: not a request .*missing required field `id`"),
        ([{"media": "cat"}], "line 2: not a request"),
    ],
)
def test_media_that_cannot_be_are_refused(tmp_path, rows, problem):
    with pytest.raises(WorkloadError, match=problem):
        read(tmp_path, *rows)


def test_equal_blocks_with_equal_items_are_shared(tmp_path):
    same = {"media": [item()], "hash_ids": [1, 2, 3]}
    assert len(read(tmp_path, same, same)) == 2


def workload(*media, name="w"):
    return Workload(
        name, 16, [Request(float(n), 40, 2, (n, n + 90, n + 95), media=items) for n, items in enumerate(media)]
    )


def test_what_is_written_is_read_again(tmp_path):
    mine, path = workload((), (CAT,)), tmp_path / "w.jsonl"
    with path.open("wb") as file:
        formats.writer("dynabench")(mine, file)
    assert formats.read(path).columns == mine.columns
    assert formats.lost(mine, "mooncake")[-1] == "images and other media"


@pytest.mark.parametrize("change", [{"cap_isl": 30}, {"isl_scale": 2.0}])
def test_prompts_with_media_are_not_cut_or_stretched(change):
    with pytest.raises(
        WorkloadError, match=f"w: requests have media, which {next(iter(change))} might cut; expected none"
    ):
        shape(workload((CAT,)), ShapeConfig(**change))
    assert shape(workload(()), ShapeConfig(**change))


def test_a_fit_would_lose_them():
    with pytest.raises(WorkloadError, match="w: requests have media, which a fit would lose; expected none"):
        fit_workload(workload(*[(CAT,)] * 20))


def test_anonymous_items_have_numbers_and_those_of_merged_workloads_are_different_ones():
    (request,) = anonymise(workload((CAT, Media(30, 2, "dog"))))
    assert [each.id for each in request.media] == ["item-0", "item-1"]
    merged = merge_workloads([workload((CAT,)), workload((CAT,))])
    assert [each.id for request in merged for each in request.media] == ["0:cat", "1:cat"]
    shared = merge_workloads([workload((CAT,)), workload((CAT,))], is_shared=True)
    assert [each.id for request in shared for each in request.media] == ["cat", "cat"]


def test_synthetic_turns_begin_with_images_out_of_a_pool(tmp_path):
    config = SynthConfig(
        requests=200, images=2, image_tokens=100, image_pool=5, turns=3, isl=50, block_size=16, prefix_blocks=2
    )
    requests = synthesize(config)
    first = [request for request in requests if len(request.media) == 2]
    assert all([each.offset for each in request.media] == [32, 132] for request in first)
    assert {len(request.media) for request in requests} == {2, 4, 6}
    uses = Counter(each.id for request in first for each in request.media)
    assert set(uses) == {f"image-{n}" for n in range(5)}
    path = tmp_path / "w.jsonl"
    with path.open("wb") as file:
        formats.writer("dynabench")(Workload("w", 16, requests), file)
    assert formats.read(path).columns == requests


def test_a_description_counts_media_and_adapters():
    config = SynthConfig(requests=50, images=2, image_tokens=64, image_pool=5, adapters=3, isl=100, block_size=16)
    facts = describe_workload(Workload("w", 16, synthesize(config)))
    assert facts.media == {"requests": 50, "items": 100, "distinct": 5, "tokens": 6400}
    assert sum(facts.adapters.values()) == 50
    assert len(facts.adapters) == 3
    plain = describe_workload(Workload("w", 512, synthesize(SynthConfig(requests=3))))
    assert (plain.media, plain.adapters) == ({}, {})


@pytest.mark.parametrize(
    ("name", "value", "needed"),
    [("image_pool", 5, "images"), ("image_tokens", 999, "images"), ("adapter_skew", 2.0, "adapters")],
)
def test_settings_of_what_is_not_made_are_refused(name, value, needed):
    with pytest.raises(ValueError, match=f"{name} is {value:g}, but {needed} is 0; expected both or neither"):
        SynthConfig(**{name: value})
    SynthConfig(**{name: value, needed: 2})
