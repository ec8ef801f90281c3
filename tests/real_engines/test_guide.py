"""The guide's commands as they stand there, with our model's name in the place of theirs."""

import contextlib
import json
import os
import re
import signal
import subprocess
from pathlib import Path

import httpx
import pexpect
import pytest
from tokenizers import Tokenizer

from serving.worker.config import flags_to_arguments
from tests.real_engines.reference import Reference
from tests.support import hub_server
from tests.support.commands import BIN
from tests.support.servers import Etcd, Nats, free_port
from tests.support.waiting import PATIENCE_S, until, wait_for

pytestmark = pytest.mark.timeout(500)
QUESTION = {
    "model": "Llama-3.2-3B-Instruct-Q4_K_M",
    "max_completion_tokens": 2049,
    "messages": [{"role": "user", "content": "What is the capital of South Africa?"}],
}


@pytest.fixture
def home(tmp_path, engine):
    """A folder with the model under the guide's name and a file of engine arguments; commands run in it."""
    suffix = engine.model.suffix
    (tmp_path / f"Llama-3.2-3B-Instruct-Q4_K_M{suffix}").symlink_to(engine.model)
    (tmp_path / "extra.json").write_text(json.dumps(flags_to_arguments(engine.flags)))
    return tmp_path


@pytest.fixture
def model(home, engine):
    return f"Llama-3.2-3B-Instruct-Q4_K_M{engine.model.suffix}"


@pytest.fixture
def shell(home):
    with running_shell(home, {}) as found:
        yield found


@contextlib.contextmanager
def running_shell(home, environment):
    """Run commands in the background; each must end by itself with 0 when asked to."""
    base = {"DYN_DISCOVERY_DIR": str(home / "d"), "ETCD_ENDPOINTS": "", "NATS_SERVER": ""}
    environment = os.environ | base | environment
    processes = []

    def run(*words):
        command = [str(BIN / words[0]), *map(str, words[1:])]
        log = (home / f"log-{len(processes)}").open("w+")
        process = subprocess.Popen(command, env=environment, cwd=home, stdout=log, stderr=log, start_new_session=True)
        processes.append((process, log))
        return process

    try:
        yield run
        for process, _ in processes:
            process.send_signal(signal.SIGTERM)
        for process, log in processes:
            assert process.wait(PATIENCE_S) == 0, Path(log.name).read_text()[-3000:]
            assert "Traceback" not in Path(log.name).read_text()
    finally:
        for process, log in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            log.close()


def chat(url, **more):
    answer = httpx.post(f"{url}/v1/chat/completions", json=QUESTION | more)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_http_interface_list_the_models_send_a_request(shell, engine, model):
    port = free_port()
    flags = ["--http-port", port, "--extra-engine-args", "extra.json"]
    shell("dynamo-run", "in=http", f"out={engine.name}", model, *flags)
    url = f"http://127.0.0.1:{port}"
    wait_for(url, 1)
    models = httpx.get(f"{url}/v1/models").json()["data"]
    assert [entry["id"] for entry in models] == ["Llama-3.2-3B-Instruct-Q4_K_M"]
    answer = chat(url, max_completion_tokens=20, ignore_eos=True)  # or a random model may end by chance
    assert answer["usage"]["completion_tokens"] == 20
    assert answer["choices"][0]["message"]["content"]
    chat(url, logit_bias={"1": 100})  # 2,049 tokens fit the context


def test_a_distributed_system_routed_by_kv_over_etcd_and_nats(home, engine, model):
    with contextlib.ExitStack() as stack:
        servers = {"ETCD_ENDPOINTS": stack.enter_context(Etcd()).url, "NATS_SERVER": stack.enter_context(Nats()).url}
        with running_shell(home, servers) as shell:
            port = free_port()
            flags = ["--extra-engine-args", "extra.json", "--migration-limit=3"]
            shell("dynamo-run", "in=http", "out=dyn", "--router-mode", "kv", "--http-port", port)
            for _ in range(2):
                shell("dynamo-run", "in=dyn://llama3B.backend.generate", f"out={engine.name}", model, *flags)
            url = f"http://127.0.0.1:{port}"
            wait_for(url, 2)
            conversation = [{"role": "user", "content": "Tell me a long story about the router. " * 8}]
            first = chat(url, messages=conversation, max_completion_tokens=8)
            assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            conversation.append(first["choices"][0]["message"])
            conversation.append({"role": "user", "content": "And then?"})
            again = QUESTION | {"messages": conversation[:1], "max_completion_tokens": 1}
            until(lambda: int(httpx.post(f"{url}/v1/chat/completions", json=again).headers["x-overlap-tokens"]) > 0)
            second = chat(url, messages=conversation, max_completion_tokens=8)
            cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached > first["usage"]["prompt_tokens"] - 64


def test_a_file_of_prompts(home, engine, model):
    (home / "prompts.jsonl").write_text(
        '{"text": "What is the capital of France?"}\n{"text": "What is the capital of Spain?"}\n'
    )
    flags = ["--max-tokens", "7", "--temperature", "0", "--extra-engine-args", "extra.json"]
    done = subprocess.run(
        [BIN / "dynamo-run", "in=batch:prompts.jsonl", f"out={engine.name}", model, *flags],
        cwd=home,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in (home / "output.jsonl").read_text().splitlines()]
    assert {answer["text"] for answer in answers} == {
        "What is the capital of France?",
        "What is the capital of Spain?",
    }
    assert all(answer["tokens_out"] == 7 and answer["response"] for answer in answers)
    assert "Ran 2 prompts" in done.stdout


def test_text_interface_with_the_default_engine(home, engine, model):
    words = ["out=vllm", model, "--extra-engine-args", "extra.json"] if engine.name == "vllm" else [model]
    environment = os.environ | {"TERM": "xterm", "XDG_STATE_HOME": str(home), "PROMPT_TOOLKIT_NO_CPR": "1"}
    child = pexpect.spawn(str(BIN / "dynamo-run"), words, env=environment, cwd=str(home), encoding="utf8", timeout=240)
    try:
        child.expect("User.*›")
        child.send("Hello, how are you?\r")
        child.expect("2004l")
        child.expect(r"TTFT \d+ ms", timeout=120)  # a random model talks until its context is full
        child.expect("User.*›")
        child.send("/clear\r")
        child.expect("User.*›")
        child.send("Again, please, and at length.\r")
        child.expect("2004l")
        child.expect("[^\r\n]{3,}")
        child.send("\x03")
        child.expect("stopped|TTFT")
        child.expect("User.*›")
        child.send("\x04")
        child.expect(pexpect.EOF)
        child.close()
        assert child.exitstatus == 0
    finally:
        child.close(force=True)


def test_the_multi_process_quick_start(shell, engine, model):
    port = free_port()
    module = {"llamacpp": "llama_cpp"}.get(engine.name, engine.name)
    shell("python", "-m", "serving.frontend", "--http-port", port)
    flags = ["--", *engine.flags] if engine.flags else []
    shell("python", "-m", f"serving.{module}", "--model-path", model, *flags)
    url = f"http://127.0.0.1:{port}"
    wait_for(url, 1)
    answer = chat(url, stream=False, max_tokens=30, max_completion_tokens=None, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 30


def test_an_experiment_on_the_engine(home, engine, model):
    rows = [
        {"timestamp": 60 * place, "input_length": 64 * (2 + place // 8), "output_length": 8, "hash_ids": [conversation, *range(100 * conversation, 100 * conversation + 1 + place // 8)]}
        for place, conversation in enumerate([1, 2, 3, 4, 5, 6, 7, 8] * 3)
    ]  # fmt: skip
    (home / "trace.jsonl").write_text("\n".join(map(json.dumps, rows)))
    modes = ["--router-mode", "kv"] + ([] if engine.name == "vllm" else ["--router-mode", "round-robin"])
    flags = ["--trace-block-size", "64", "--engine", engine.name, "--model", model, "--workers", "2"]
    flags += ["--extra-engine-args", "extra.json", "--out", "results"]
    done = subprocess.run(
        [BIN / "dynabench", "run", "trace.jsonl", *flags, *modes],
        cwd=home,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    manifest = json.loads((home / "results" / "experiment.json").read_text())
    assert manifest["engine"]["name"] == engine.name
    assert re.fullmatch(r"\d+\.\d+.*", manifest["engine"]["version"])
    report = (home / "results" / "report.html").read_text()
    assert f"2 {engine.name} {manifest['engine']['version']} workers with Llama-3.2-3B-Instruct-Q4_K_M" in report
    summary = json.loads((home / "results" / "summary.json").read_text())
    assert summary["is_valid"]
    for arm in summary["arms"].values():
        assert arm["errors"] == {}


def test_a_model_comes_from_the_hub_by_its_id(home, engine, folder):
    """Not for llama.cpp, whose models are files."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    name = "TinyLlama/TinyLlama-1.1B-Chat-v1.0"
    with hub_server.running({name: files}) as hub:
        hub_settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home / "hf"), "HF_HUB_DISABLE_TELEMETRY": "1"}
        done = subprocess.run(
            [BIN / "dynamo-run", f"out={engine.name}", name, "--max-tokens", "5", "--extra-engine-args", "extra.json"],
            input="Hello, how are you?",
            cwd=home,
            env=os.environ | hub_settings,
            capture_output=True,
            text=True,
            timeout=240,
        )
        if engine.name == "llamacpp":
            assert done.returncode == 2
            assert "needs a GGUF file" in done.stderr
        else:
            assert done.returncode == 0, done.stderr[-3000:]
            assert done.stdout.strip()
            assert hub.asked("model.safetensors")


def test_a_gguf_file_with_the_tokenizer_of_a_folder(home, engine, folder):
    words = [f"out={engine.name}", str(folder.with_name("tiny.gguf")), "--context-length", "1024"]
    words += ["--model-config", str(folder), "--max-tokens", "9", "--temperature", "0"]
    done = subprocess.run(
        [BIN / "dynamo-run", *words, "--extra-engine-args", "extra.json"],
        input="hello world",
        cwd=home,
        capture_output=True,
        text=True,
        timeout=120,
    )
    if engine.name == "vllm":  # 0.32 reads no GGUF files without a plugin
        assert done.returncode == 2
        assert done.stderr.splitlines()[-1].startswith("dynamo-run: vLLM does not start: ")
        return
    assert done.returncode == 0, done.stderr[-3000:]
    prompt = "<s><|user|>hello world<|end|><|assistant|>"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    expected, _ = Reference(folder).greedy(tokenizer.encode(prompt).ids, 9)
    answer = "".join(character for character in tokenizer.decode(expected) if character.isprintable())
    assert "".join(character for character in done.stdout if character.isprintable()).strip() == answer.strip()
