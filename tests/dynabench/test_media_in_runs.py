"""Images and other media in virtual time: when they are encoded, how long that takes, and what a report says of it."""

from dataclasses import replace

import pytest

from dynabench.arm import ClientConfig, Run, Settings
from dynabench.cli.workload import convert
from dynabench.deployment.description import Deployment, Pool
from dynabench.deployment.engines import refuse_encoders, refuse_idle_settings
from dynabench.experiment.head import head_of
from dynabench.experiment.no_effect import no_effect
from dynabench.live.run import measure
from dynabench.virtual.cluster import StalledError
from dynabench.virtual.run import simulate
from mocker import EngineConfig
from mocker.timing.choose import resolve
from mocker.timing.config import TimingConfig
from reports.summarize import summarize
from reports.tables.media import media_grid
from tests.support.commands import dynabench
from tests.support.simulated import deployed, simulate_pool
from workloads import Request, Workload, WorkloadError, formats
from workloads.pacing import LoadConfig
from workloads.request import Media

VISION = EngineConfig(max_tokens_per_mm_item=100, encoding_ms_per_1000_tokens=500.0, block_size=16)


def workload(*items):
    """Return requests of 40 tokens with one item of 20 each, the next long after the one before."""
    return Workload(
        "w",
        16,
        [
            Request(10.0 * n, 40, 4, (2 * n, 2 * n + 1, -n), media=(Media(5, 20, id),) * bool(id))
            for n, id in enumerate(items)
        ],
    )


def test_the_first_step_of_an_image_waits_for_the_encoder_unless_its_cache_has_it():
    ttft_s = {}
    for items in (("", "", ""), ("cat", "dog", "cat")):
        requests = simulate_pool(workload(*items), engine=VISION).requests
        ttft_s[items] = requests.first_token_s - requests.intended_s
    assert (ttft_s["cat", "dog", "cat"] - ttft_s["", "", ""]).tolist() == pytest.approx([0.01, 0.01, 0.0], abs=1e-9)


def test_a_speedup_makes_the_encoder_faster_too():
    items = ("cat", "")
    requests = simulate_pool(workload(*items), engine=VISION, timing=TimingConfig(speedup_ratio=2.0)).requests
    first_s, second_s = (requests.first_token_s - requests.intended_s).tolist()
    assert first_s - second_s == pytest.approx(0.005, abs=1e-9)


def test_an_engine_with_an_encoder_answers_requests_without_media_as_one_without():
    plain = replace(VISION, max_tokens_per_mm_item=None, encoding_ms_per_1000_tokens=0.0)
    runs = [simulate_pool(workload("", "", ""), engine=engine).requests for engine in (VISION, plain)]
    assert runs[0].last_token_s.tolist() == pytest.approx(runs[1].last_token_s.tolist())


def test_a_run_counts_what_is_encoded_and_what_is_found():
    run = simulate_pool(workload("cat", "dog", "cat", ""), engine=VISION)
    (use,) = run.encoders
    assert (use.requests, use.items, use.encoded_tokens, use.found_tokens) == (3, 3, 40, 20)
    assert use.busy_s == pytest.approx(0.02)
    (row,) = media_grid(summarize([run])).rows
    assert row[1] == ["3", "3", "40", "20", "0.02"]
    assert media_grid(summarize([simulate_pool(workload("", ""), engine=VISION)])) is None


def test_a_prefill_worker_encodes_and_a_decode_worker_does_not():
    pools = tuple(Pool(name=role, role=role, mocker=VISION) for role in ("prefill", "decode"))
    run = simulate(Run.alone(Settings(Deployment(pools=pools), load=LoadConfig())), workload("cat", "dog", ""))
    assert {use.name: (use.requests, use.encoded_tokens) for use in run.encoders} == {
        "prefill": (2, 40),
        "decode": (0, 0),
    }
    assert run.requests.succeeded.all()


def test_media_need_an_engine_whose_encoder_takes_them():
    with pytest.raises(
        WorkloadError,
        match=r"item 'cat' of request 1 cannot .*: it has 20 tokens, and max_tokens_per_mm_item is not set; exp",
    ):
        simulate_pool(workload("", "cat"))
    with pytest.raises(WorkloadError, match=r"max_tokens_per_mm_item is 19; expected .*, at least 20"):
        simulate_pool(workload("cat"), engine=replace(VISION, max_tokens_per_mm_item=19))


@pytest.mark.parametrize(("type", "name"), [("sglang", "SGLang"), ("trtllm", "TensorRT-LLM")])
def test_other_schedulers_refuse_media(type, name):
    with pytest.raises(
        WorkloadError, match=f"images or other media, which are not simulated with {name}; expected engine_type"
    ):
        simulate(Run.alone(Settings(Deployment(pools=(Pool(engine_type=type),)))), workload("cat"))


def test_encoders_are_refused_with_stages():
    timing = TimingConfig(model="llama-3.1-8b", gpu="h100", pipeline_parallel_size=2)
    with pytest.raises(
        ValueError, match=r"expected 1 with an encoder of images \(max_tokens_per_mm_item\): it is not simulated"
    ):
        simulate_pool(workload("cat"), engine=VISION, timing=timing)


def test_live_runs_refuse_media():
    settings = Settings(deployed(engine=VISION), load=LoadConfig(), client=ClientConfig())
    with pytest.raises(WorkloadError, match="media, which are sent over HTTP only as images of a size"):
        measure(Run.alone(settings), workload("cat"))


def test_served_engines_take_no_settings_of_encoders():
    with pytest.raises(
        ValueError, match="max_tokens_per_mm_item is 100, but images are not sent to workers that are served"
    ):
        refuse_encoders(deployed(engine=VISION))
    refuse_encoders(deployed())


def test_settings_of_encoders_without_one_are_refused():
    with pytest.raises(
        ValueError, match="disable_chunked_mm_input is True, but there is no encoder; expected max_tokens_per"
    ):
        refuse_idle_settings([deployed(engine=EngineConfig(disable_chunked_mm_input=True))])
    refuse_idle_settings([deployed(engine=VISION)])


def test_a_report_says_what_of_the_encoder_is_not_modelled():
    def said(engine):
        return head_of(workload("cat"), [deployed(engine=engine)], [LoadConfig()]).get("Encoder")

    assert (
        said(VISION)
        == "items of up to 100 tokens; 1,000 tokens take 500 ms, as set; its weights and its cache take no memory here"
    )
    assert "its time is not modelled (encoding_ms_per_1000_tokens is 0)" in said(
        EngineConfig(max_tokens_per_mm_item=100)
    )
    assert said(EngineConfig()) is None
    assert (
        "max_tokens_per_mm_item, because media are not sent to our own stack"
        in no_effect("wall", workload(""), [deployed(engine=VISION)])["No effect"]
    )
    assert (
        "max_tokens_per_mm_item, because" in no_effect("virtual", workload(""), [deployed(engine=VISION)])["No effect"]
    )


@pytest.mark.parametrize("model", ["google/gemma-3-27b-it", "google/gemma-4-26B-A4B"])
def test_models_whose_images_are_seen_whole_compute_them_in_one_step(model):
    timing = TimingConfig(model=model, gpu="h200")
    assert resolve(VISION, timing).config.disable_chunked_mm_input
    assert not resolve(EngineConfig(), timing).config.disable_chunked_mm_input
    assert not resolve(
        VISION, TimingConfig(model="meta-llama/Llama-3.1-8B", gpu="h100")
    ).config.disable_chunked_mm_input
    said = head_of(workload("cat"), [Deployment(pools=(Pool(mocker=VISION, timing=timing),))], [LoadConfig()])
    assert "each is computed in one step, as vLLM sets it for this model" in said["Encoder"]
    with pytest.raises(
        ValueError, match=r"an item .* never be computed; vLLM sets disable_chunked_mm_input for google/"
    ):
        resolve(replace(VISION, max_num_batched_tokens=64, max_num_seqs=64), timing)


def test_images_from_the_synthesizer_to_the_report_and_back(tmp_path, capsys):
    path, out = tmp_path / "w.jsonl", tmp_path / "out"
    made = dynabench(
        "workload", "synth", path, "--requests", "30", "--images", "2", "--image-tokens", "64", "--isl", "50"
    )
    assert made.returncode == 0, made.stderr
    run = dynabench(
        "simulate", path, "--max-tokens-per-mm-item", "64", "--encoding-ms-per-1000-tokens", "9", "--out", out
    )
    assert run.returncode == 0, run.stderr
    assert "Encoder: items of up to 64 tokens; 1,000 tokens take 9 ms, as set" in run.stdout.replace("\n", " ")
    page = (out / "report.html").read_text()
    assert "What did the encoders do?" in page
    assert "items of up to 64 tokens; 1,000 tokens take 9 ms" in page
    said = "images and other media are left out, because results do not hold them"
    idle = no_effect("virtual", formats.read(out), [deployed(engine=VISION)])["No effect"]
    assert f"max_tokens_per_mm_item, because of the workload, {said}" in idle
    convert((out, tmp_path / "again.jsonl"))
    assert said in capsys.readouterr().out


def test_a_run_that_locks_up_as_the_engine_would_ends_with_a_line():
    drafts = {"num_speculative_tokens": 1, "speculative_method": "eagle", "acceptance_length": 1.5, "drafting_ms": 0.0}
    engine = EngineConfig(
        engine_version="0.32", max_num_batched_tokens=64, max_num_seqs=8, max_tokens_per_mm_item=40, **drafts
    )
    media = (Media(0, 40, "cat"), Media(40, 40, "dog"))
    asked = Workload("w", 64, [Request(0.0, 100, 4, (1, 2), media=media)])
    with pytest.raises(
        StalledError, match=r"1 requests never finish, as with the real engine: .* it cannot go on: the encoder's"
    ):
        simulate_pool(asked, engine=engine)
    assert simulate_pool(asked, engine=replace(engine, engine_version="0.33")).requests.succeeded.all()
