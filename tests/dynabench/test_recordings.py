"""What `dynabench record` writes: 20 to 24 requests in a tight cache, some of which stop, in the ways that vLLM can run."""

import gzip
import json
import shutil
from pathlib import Path

import pytest

from dynabench.fidelity import families
from dynabench.fidelity.recordings import RecordingError, is_recording
from dynabench.fidelity.vllm.entries import Updated
from dynabench.fidelity.vllm.recordings import read
from dynabench.fidelity.vllm.replay import verify
from dynabench.fidelity.vllm.step_times import step_times
from mocker.timing.config import TimingConfig

HERE = Path(__file__).parent / "recorded"
FILES = [HERE / "sync.jsonl.gz", HERE / "async.jsonl.gz"]


def rows_of(path):
    return [json.loads(line) for line in gzip.open(path, "rt")]


def edited(path, tmp_path, edit):
    """Return a copy of a recording whose rows were changed."""
    rows = rows_of(path)
    edit(rows)
    copy = tmp_path / "edited.jsonl"
    copy.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return copy


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_recording_with_stops_and_preemptions_matches(path):
    rows = rows_of(path)[1:]
    reasons = [reason for row in rows for reason in row["finished"].values()]
    assert (reasons.count("stop"), reasons.count("length")) == (8, 16)
    assert any(row.get("preempted") for row in rows)
    assert verify(read(path)).difference is None


@pytest.mark.parametrize("name", ["drafts", "adapters", "windows", "states", "stages"])
def test_recordings_with_speculation_adapters_groups_and_stages_match(name):
    assert verify(read(HERE / f"{name}.jsonl.gz")).difference is None


def first(rows, key):
    """Return what the first row says that says something."""
    return next(row[key] for row in rows[1:] if row.get(key))


def one_more(key):
    def edit(rows):
        found = first(rows, key)
        found[next(iter(found))] += 1

    return edit


def accept_none(rows):
    """Say that no draft was accepted, where some were."""
    accepted = next(row["accepted"] for row in rows[1:] if any(row["accepted"].values()))
    accepted[next(id for id, count in accepted.items() if count)] = 0


def take_another_block(rows):
    table = next(iter(first(rows, "tables").values()))[0]
    table[-1] += 1


def move_to_another_group(rows):
    first(rows, "events")[0]["group"] += 1


def swap_waiting(rows):
    next(row["waiting"] for row in rows[1:] if len(row.get("waiting", ())) > 1).reverse()


@pytest.mark.parametrize(
    ("name", "edit", "what"),
    [
        ("drafts", one_more("drafts"), "drafts"),
        ("drafts", one_more("proposed"), "drafts"),
        ("drafts", accept_none, "sampled"),
        ("drafts", one_more("wasted"), "wasted"),
        ("adapters", swap_waiting, "waiting"),
        ("windows", take_another_block, "tables"),
        ("windows", one_more("junction"), "junction"),
        ("windows", move_to_another_group, "events"),
        ("stages", one_more("scheduled"), "scheduled"),
    ],
)
def test_what_differs_from_a_recording_is_named(tmp_path, name, edit, what):
    assert verify(read(edited(HERE / f"{name}.jsonl.gz", tmp_path, edit))).difference["what"] == what


def test_the_groups_of_a_recording_must_be_those_of_its_layers(tmp_path):
    def widen(rows):
        rows[0]["scenario"]["resolved"]["layers"][2]["window"] *= 2

    with pytest.raises(RecordingError, match="the layers form the groups"):
        read(edited(HERE / "windows.jsonl.gz", tmp_path, widen))


def test_a_step_that_is_already_queued_when_an_answer_stops_is_wasted(tmp_path):
    rows = rows_of(FILES[1])[1:]
    assert sum(len(row.get("wasted", ())) for row in rows) == 7  # the eighth stops where its length ends it, too
    assert not any(row["wasted"] for row in rows_of(FILES[0])[1:])

    def forget(rows):
        next(row for row in rows[1:] if row.get("wasted"))["wasted"] = {}

    assert verify(read(edited(FILES[1], tmp_path, forget))).difference["what"] == "wasted"


def test_why_an_answer_ended_is_compared(tmp_path):
    def blame_length(rows):
        for row in rows[1:]:
            row["finished"] = dict.fromkeys(row["finished"], "length")

    difference = verify(read(edited(FILES[1], tmp_path, blame_length))).difference
    assert difference["what"] == "finished"
    assert set(difference["mocker"].values()) == {"stop"}


def test_the_time_of_an_asynchronous_step_is_that_of_the_row_it_was_scheduled_in():
    rows = rows_of(FILES[1])[1:]
    updates = [entry for entry in read(FILES[1]).entries if isinstance(entry, Updated)]
    assert [entry.number for entry in updates] == [row["updated"] for row in rows[1:]]
    assert [entry.duration_s for entry in updates] == [row["duration_ms"] / 1e3 for row in rows[:-1]]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_simulated_times_stand_beside_those_of_the_steps_that_computed(path):
    timing = TimingConfig(timing="constant", constant_prefill_ms=7, constant_decode_ms=3)
    found = step_times(read(path), timing)
    taken = [row["duration_ms"] / 1e3 for row in rows_of(path)[1:] if row.get("scheduled")]
    assert [real for _, real, _ in found] == taken
    assert all((simulated > 0.004) == has_prefill for has_prefill, _, simulated in found)
    assert 20 < sum(has_prefill for has_prefill, _, _ in found) < 100


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_family_of_a_recording_is_found_by_its_first_line(path):
    verdict = families.verify(path)
    assert (verdict.engine, verdict.version, verdict.difference) == ("vllm", "0.32.0", None)
    timing = TimingConfig(timing="constant", constant_prefill_ms=7, constant_decode_ms=3)
    assert families.step_times(path, timing) == step_times(read(path), timing)


def of_release(tmp_path, release):
    """Return a recording that names another release of vLLM."""

    def rename(rows):
        rows[0]["scenario"]["vllm_version"] = release

    return edited(FILES[0], tmp_path, rename)


@pytest.mark.parametrize(("release", "version"), [("0.32.4", "0.32"), ("0.33.0", "0.33")])
def test_a_recording_is_replayed_with_the_rules_of_the_version_that_it_names(tmp_path, release, version):
    assert read(of_release(tmp_path, release)).config.engine_version == version


def test_a_recording_of_an_unknown_version_is_refused_unless_one_is_chosen(tmp_path):
    path = of_release(tmp_path, "0.35.1")
    with pytest.raises(
        RecordingError,
        match=r"recorded from vLLM 0\.35\.1; expected 0\.32 or 0\.33.*choose one of them with --engine-version \(the nearest is 0\.33",
    ):
        families.verify(path)
    verdict = families.verify(path, "0.33")
    assert (verdict.version, verdict.difference) == ("0.35.1", None)
    timing = TimingConfig(timing="constant", constant_prefill_ms=7, constant_decode_ms=3)
    assert families.step_times(path, timing, "0.32") == step_times(read(FILES[0]), timing)


def test_a_recording_that_names_no_version_of_vllm_is_refused_unless_one_is_chosen(tmp_path):
    path = of_release(tmp_path, None)
    with pytest.raises(RecordingError, match=r"recorded from a vLLM whose version it does not name; expected 0\.32 or"):
        families.verify(path)
    verdict = families.verify(path, "0.32")
    assert (verdict.version, verdict.difference) == ("of unknown version", None)


def test_a_version_of_vllm_is_refused_with_a_recording_of_another_engine():
    path = HERE.parents[1] / "golden" / "sglang-0.5" / "dups.jsonl.gz"
    with pytest.raises(RecordingError, match=r"engine_version is 0\.33; expected none with a recording of SGLang"):
        families.verify(path, "0.33")


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"otherllm_version": "1.2"}, "recorded from otherllm; expected one of"),
        ({}, "recorded from an engine that it does not name; expected one of"),
    ],
    ids=["unknown", "unnamed"],
)
def test_a_recording_of_another_engine_is_refused_in_a_line(tmp_path, named, message):
    def rename(rows):
        del rows[0]["scenario"]["vllm_version"]
        rows[0]["scenario"] |= named

    path = edited(FILES[0], tmp_path, rename)
    with pytest.raises(RecordingError) as caught:
        families.verify(path)
    assert str(caught.value) == f"{path}: {message} {', '.join(families.FAMILIES)}"


def without(key):
    return lambda rows: rows[3].pop(key)


def never_schedule(rows):
    del rows[1]["running"]
    rows[1]["updated"] = 5


def swap(place, name, value):
    def edit(rows):
        rows[0]["scenario"][place][name] = value

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda rows: rows.clear(), "is empty"),
        (lambda rows: rows.__delitem__(slice(1, None)), "ends before step 0, when request"),
        (lambda rows: rows.__delitem__(slice(-30, None)), "of its requests are unfinished"),
        (lambda rows: rows.__delitem__(8), "line 9: has step 8 instead of 7; lines are missing"),
        (lambda rows: rows.insert(8, rows.pop(9)), "line 9: has step 8 instead of 7; .* not in order"),
        (without("tokens"), "cannot be read as a recording .it has no 'tokens'"),
        (swap("resolved", "num_gpu_blocks", 0), "num_gpu_blocks must be at least 2, not 0"),
        (swap("resolved", "num_gpu_blocks", "many"), "num_gpu_blocks"),
        (lambda rows: rows[0]["scenario"]["requests"].append(rows[0]["scenario"]["requests"][0]), "is added twice"),
        (never_schedule, "step 5 ends but was never scheduled"),
        (lambda rows: rows.__setitem__(0, {"op": "meta"}), "it has no 'config'"),
    ],
    ids=["empty", "head", "cut", "gap", "order", "tokens", "blocks", "text", "twice", "unscheduled", "meta"],
)
def test_what_is_no_whole_recording_is_refused_in_a_line(tmp_path, edit, message):
    with pytest.raises(RecordingError, match=message) as caught:
        verify(read(edited(FILES[1], tmp_path, edit)))
    assert "\n" not in str(caught.value)


def sent(name, value):
    """Change what an SGLang recording says of its second call."""
    return lambda rows: rows[0]["scenario"]["actions"][1].__setitem__(name, value)


def asked(name, value):
    """Change what a TensorRT-LLM recording says of its second request."""
    return lambda rows: rows[0]["requests"][1].__setitem__(name, value)


@pytest.mark.parametrize(
    ("file", "edit", "message"),
    [
        ("sglang-0.5", sent("prompt", [1, -5]), r"Expected `int` >= 0 - at `\$\[1\]\.prompt\[1\]`"),
        ("sglang-0.5", sent("prompt", "hello"), r"Expected `array`, got `str` - at `\$\[1\]\.prompt`"),
        ("sglang-0.5", sent("max_new_tokens", 10**18), r"at `\$\[1\]\.max_new_tokens`"),
        ("sglang-0.5", sent("before_step", None), r"at `\$\[1\]\.before_step`"),
        ("sglang-0.5", sent("op", "pause"), "Invalid value 'pause'"),
        ("sglang-0.5", swap("resolved", "max_total_num_tokens", []), "cannot be replayed"),
        ("trtllm", asked("max_new", 10**18), r"at `\$\[1\]\.max_new`"),
        ("trtllm", asked("prompt", [[5, 1 << 23], [7, 1 << 23], [9, 9]]), "expected at most 16,777,216"),
        ("trtllm", asked("prompt", [[5]]), r"at `\$\[1\]\.prompt\[0\]`"),
        ("trtllm", lambda rows: rows[9].__setitem__("ranks", 7), "step 8: cannot be replayed"),
    ],
)
def test_what_another_engines_recording_has_wrong_is_named(tmp_path, file, edit, message):
    first = min((HERE.parents[1] / "golden" / file).glob("*.gz"))
    with pytest.raises(RecordingError, match=message) as caught:
        families.verify(edited(first, tmp_path, edit))
    assert "\n" not in str(caught.value)


def test_a_file_that_unpacks_to_more_than_a_recording_holds_is_not_read(tmp_path):
    bomb = tmp_path / "bomb.jsonl.gz"
    with gzip.open(bomb, "wb", compresslevel=1) as packed:
        for _ in range(300):
            packed.write(bytes(1 << 20))
    with pytest.raises(RecordingError, match="larger than 256 MiB"):
        read(bomb)
    (tmp_path / "broken.jsonl.gz").write_bytes(FILES[0].read_bytes()[:3000])
    with pytest.raises(RecordingError, match=r"broken\.jsonl\.gz: cannot be read as a recording"):
        read(tmp_path / "broken.jsonl.gz")
    assert not is_recording(bomb)


def test_a_recording_is_read_from_the_folder_it_lies_in(tmp_path, monkeypatch):
    for folder, name in (
        ("traces", "s01_no_sharing__bs16.sched.jsonl.gz"),
        ("scenarios", "s01_no_sharing__bs16.json.gz"),
    ):
        (tmp_path / folder).mkdir()
        shutil.copy(HERE.parents[1] / "golden" / "vllm-0.32-full" / name, tmp_path / folder)
    monkeypatch.chdir(tmp_path / "traces")
    assert verify(read(Path("s01_no_sharing__bs16.sched.jsonl.gz"))).difference is None


def test_a_trace_in_which_a_step_lacks_what_others_have_is_refused(tmp_path):
    folder = Path(__file__).parents[1] / "golden" / "vllm-0.32-media"
    path = next(folder.rglob("media_dev1.*.gz"))
    shutil.copytree(folder, tmp_path / "copy")
    copy = tmp_path / "copy" / path.relative_to(folder).with_name("lacking.jsonl")
    rows = rows_of(path)
    steps = [row for row in rows if row["op"] == "schedule"]
    del steps[3]["encoder_cache"]
    copy.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(RecordingError, match="no encoder_cache in this schedule; expected it, as in other lines"):
        read(copy)
