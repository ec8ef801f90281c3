"""Load generators of others: they finish without an error, and count the tokens that the stand-in's metrics count.

What they wrote is read by `dynabench compare`.
"""

import json
import shutil
from pathlib import Path

import pytest

from reports import theirs
from tests.routers.fleet import MODEL, needs, run, stand_ins

BENCH = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""`vllm bench serve`, which the package for CPUs cannot start under that name."""


@pytest.fixture
def worker(tiny_folder):
    with stand_ins(("--served-model-name", MODEL), model=tiny_folder) as (found,):
        yield found


def check_read(path, *, num_requests, num_runs):
    """Check that what a tool wrote is understood, with times for every request."""
    found = theirs.read(path)
    assert len(found) == num_runs
    for measured in found.values():
        arm = measured.arm
        assert (arm.requests, arm.failed, arm.ttft.count, measured.osl) == (num_requests, 0, num_requests, 16)
        assert 0 < arm.ttft.mean < arm.e2e.mean


@needs("vllm")
def test_vllm_bench_serve(worker, tiny_folder, tmp_path):
    run(
        *(Path(shutil.which("vllm")).with_name("python"), "-c", BENCH),
        *("--backend", "openai", "--base-url", worker.url, "--model", MODEL, "--tokenizer", tiny_folder),
        *("--dataset-name", "random", "--random-input-len", 64, "--random-output-len", 16, "--ignore-eos"),
        *("--num-prompts", 20, "--max-concurrency", 4, "--ready-check-timeout-sec", 0),
        *("--save-result", "--result-dir", tmp_path, "--result-filename", "result.json"),
        HF_HUB_OFFLINE="1",
    )
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"], worker.num_answers) == (20, 0, 20)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == worker.num_tokens
    check_read(tmp_path / "result.json", num_requests=20, num_runs=1)


@needs("guidellm")
def test_guidellm(worker, tiny_folder, tmp_path):
    run(
        *("guidellm", "run", "--backend", f"kind=openai_http,target={worker.url},model={MODEL}"),
        *("--profile", "kind=concurrent,streams=4", "--constraint", "kind=max_requests,count=20"),
        *("--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16"),
        *("--tokenizer", f"kind=hf_auto,model={tiny_folder}"),
        *("--output", f"kind=json,path={tmp_path / 'result.json'}", "--disable-console"),
    )
    (benchmark,) = json.loads((tmp_path / "result.json").read_text())["benchmarks"]
    metrics = benchmark["metrics"]
    asked, given = (metrics[f"{kind}_token_count"]["successful"]["total_sum"] for kind in ("prompt", "output"))
    assert (metrics["request_totals"]["successful"], metrics["request_totals"]["errored"]) == (20, 0)
    assert (asked, given) == worker.num_tokens
    check_read(tmp_path / "result.json", num_requests=20, num_runs=1)


@needs("aiperf")
def test_aiperf(worker, tiny_folder, tmp_path):
    run(
        *("aiperf", "profile", "--model", MODEL, "--url", worker.url, "--endpoint-type", "chat", "--streaming"),
        *("--tokenizer", tiny_folder, "--isl", 64, "--osl", 16, "--extra-inputs", "ignore_eos:true"),
        *("--request-count", 20, "--concurrency", 4, "--use-server-token-count"),
        *("--no-gpu-telemetry", "--ui", "none", "--output-artifact-dir", tmp_path),
    )
    result = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert (result["request_count"]["avg"], result["request_error_rate"]["avg"], worker.num_answers) == (20, 0, 20)
    assert (result["total_isl"]["avg"], result["total_osl"]["avg"]) == worker.num_tokens
    for path in (tmp_path, tmp_path / "profile_export.jsonl", tmp_path / "profile_export_aiperf.json"):
        check_read(path, num_requests=20, num_runs=1)
