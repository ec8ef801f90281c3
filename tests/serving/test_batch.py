"""`in=batch:FILE`: every prompt answered once, whatever happens in between."""

import asyncio
import errno
import fcntl
import json
import os
import re
import signal
import subprocess
from unittest.mock import Mock

import pytest

from foundation.identity import Identity
from serving.cli.batch import BatchError, is_answered, read_prompts, run_batch
from serving.cli.job import AskConfig, Job, job_identity
from serving.cli.ways import BatchInput, MockerOutput, OwnFileOutput, ServerOutput
from serving.engines.mock.config import AnswerConfig
from serving.frontend.config import FrontendConfig
from serving.life import DisaggregationConfig
from serving.router import RouterConfig
from serving.runtime.config import RuntimeConfig
from serving.transfer.config import TransferRunConfig
from serving.worker.config import ModelConfig, ModelRunConfig
from tests.support import warm
from tests.support.commands import DYNAMO_RUN, dynamo_run
from tests.support.model import write_model
from tests.support.power import PowerCut
from tests.support.waiting import PATIENCE_S, until


def run(folder, *words, delay_ms=1):
    flags = ["out=echo_full", "--model-name", "m", *words]
    return dynamo_run(f"in=batch:{folder / 'prompts.jsonl'}", *flags, env={"DYN_TOKEN_ECHO_DELAY_MS": str(delay_ms)})


def write(folder, *texts):
    lines = [text if text.startswith("!") else json.dumps({"text": text}) for text in texts]
    (folder / "prompts.jsonl").write_text("\n".join(line.removeprefix("!") for line in lines) + "\n")


def answers(folder):
    return [json.loads(line) for line in (folder / "output.jsonl").read_text().split("\n")[:-1]]


def test_each_prompt_is_answered_with_its_counts(tmp_path):
    write(tmp_path, "What is the capital of France?", "What is the capital of Spain?")
    done = run(tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(
        r"Ran 2 prompts in \d+\.\d\d s\. Tokens in: 59 \(\d+/s\)\. Tokens out: 59 \(\d+/s\)\n", done.stdout
    )
    found = {answer["text"]: answer for answer in answers(tmp_path)}
    assert len(found) == 2
    for text, answer in found.items():
        assert answer["response"] == text
        assert answer["tokens_in"] == answer["tokens_out"] == len(text)  # without a tokenizer tokens are bytes
        assert list(answer) == ["text", "response", "tokens_in", "tokens_out", "elapsed_ms", "finish_reason"]
        assert answer["finish_reason"] == "stop"
        assert answer["elapsed_ms"] > 0


class Echo:
    """A frontend that answers with the prompt."""

    async def model(self, wanted):
        return wanted

    async def ask(self, answer, messages, *, model):
        answer.text, answer.finish_reason = messages[0]["content"], "stop"
        yield answer.text


def test_answers_survive_a_power_cut_once_the_run_has_ended(tmp_path, monkeypatch):
    write(tmp_path, "one", "two")
    disk = PowerCut(monkeypatch)
    ask = run_batch(
        Echo(),
        tmp_path / "prompts.jsonl",
        Identity({}),
        asyncio.Event(),
        model="m",
        options={},
        concurrency=1,
        count=lambda model, text: len(text),
    )
    assert asyncio.run(ask) == 0
    assert len(answers(tmp_path)) == 2
    assert disk.is_kept(tmp_path / "output.jsonl")
    assert disk.is_kept(tmp_path / "output.settings.json")


def test_answers_that_the_disk_does_not_keep_are_an_error_in_one_line(tmp_path, monkeypatch):
    write(tmp_path, "one")
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO))))
    with pytest.raises(BatchError, match=r"output\.jsonl cannot be written: Input/output error"):
        is_answered(tmp_path / "prompts.jsonl", Identity({}))


def test_tokens_in_are_those_of_the_text_without_the_template(tmp_path):
    import tokenizers

    model = write_model(tmp_path / "model")
    write(tmp_path, "the quick brown fox")
    done = dynamo_run(f"in=batch:{tmp_path / 'prompts.jsonl'}", "out=echo_core", model)
    assert done.returncode == 0, done.stderr
    tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    (answer,) = answers(tmp_path)
    assert answer["tokens_in"] == len(tokenizer.encode("the quick brown fox").ids)
    assert answer["tokens_out"] > answer["tokens_in"]  # echo_core answers with the template as well


def test_a_bad_line_is_told_and_the_others_are_answered(tmp_path):
    write(tmp_path, "one", "!nonsense", '!{"text": 5}', '!{"other": "x"}', '!["text"]', "!", "two")
    done = run(tmp_path)
    assert done.returncode == 1
    assert sorted(answer["text"] for answer in answers(tmp_path)) == ["one", "two"]
    for number in (2, 3, 4, 5):
        assert f"prompts.jsonl:{number}: " in done.stderr
    assert "4 of 6 lines have no answer" in done.stderr
    assert "Ran 2 prompts" in done.stdout


def test_an_interrupted_run_goes_on_where_it_was(tmp_path):
    texts = [f"prompt {number} " + "x" * number for number in range(40)] + ["twice", "twice"]
    texts.append("not soon over " * 1000)
    write(tmp_path, *texts)
    environment = os.environ | {"DYN_TOKEN_ECHO_DELAY_MS": "10"}
    flags = ["--model-name", "m", "--batch-concurrency", "8"]
    command = [DYNAMO_RUN, f"in=batch:{tmp_path / 'prompts.jsonl'}", "out=echo_full", *flags]
    process = warm.start(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    until(lambda: (tmp_path / "output.jsonl").exists() and len(answers(tmp_path)) >= 5, process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert "run the same command to continue" in errors
    before = len(answers(tmp_path))
    assert 5 <= before < len(texts)
    with (tmp_path / "output.jsonl").open("a") as file:
        file.write('{"text": "prom')  # as a killed run leaves it
    done = run(tmp_path, delay_ms=0)
    assert done.returncode == 0, done.stderr
    assert f"already has {before} of {len(texts)} answers" in done.stderr
    assert f"Ran {len(texts) - before} prompts" in done.stdout
    assert sorted(answer["text"] for answer in answers(tmp_path)) == sorted(texts)


def test_only_a_line_feed_ends_a_line(tmp_path):
    text = "one\u2028two\u2029three\x85four"
    write(tmp_path, f'!{{"text": "{text}"}}', "five")
    first = run(tmp_path)
    assert (first.returncode, first.stderr) == (0, "")
    assert {answer["text"]: answer["response"] for answer in answers(tmp_path)} == {text: text, "five": "five"}
    with (tmp_path / "prompts.jsonl").open("a") as file:
        file.write('{"text": "six"}\n')
    again = run(tmp_path)
    assert again.returncode == 0, again.stderr
    assert "already has 2 of 3 answers" in again.stderr


def test_what_is_all_answered_needs_no_engine(tmp_path):
    source = """
open("started", "a").write("x")
async def generate(request):
    yield {"choices": [{"index": 0, "delta": {"content": "yes"}, "finish_reason": "stop"}]}
"""
    (tmp_path / "e.py").write_text(source)
    write(tmp_path, "one")
    command = ["in=batch:prompts.jsonl", "out=pystr:e.py"]
    assert dynamo_run(*command, cwd=tmp_path).returncode == 0
    done = dynamo_run(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "already has every answer" in done.stderr
    assert (tmp_path / "started").read_text() == "x"


@pytest.mark.parametrize(
    ("words", "difference"),
    [
        (["out=echo_core", "--model-path", "model"], "out was echo_full and is echo_core"),
        (["out=echo_full", "--model-name", "other"], "--model-name was m and is other"),
        (["out=echo_full", "--model-name", "m", "--temperature", "0"], "--temperature was 0.7 and is 0.0"),
        (["out=echo_full", "--model-name", "m", "--max-tokens", "5"], "--max-tokens was none and is 5"),
    ],
)
def test_answers_that_another_engine_or_other_settings_gave_are_not_taken(tmp_path, words, difference):
    write_model(tmp_path / "model")
    write(tmp_path, "one", "two")
    assert run(tmp_path).returncode == 0
    before = (tmp_path / "output.jsonl").read_bytes()
    done = dynamo_run("in=batch:prompts.jsonl", *words, cwd=tmp_path)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert difference in done.stderr
    assert "move the file away" in done.stderr
    assert (tmp_path / "output.jsonl").read_bytes() == before


def job(tmp_path, out, *arguments, model=""):
    return Job(
        BatchInput(tmp_path / "prompts.jsonl"), out, ModelConfig(model_path=str(model)), AskConfig(), FrontendConfig(),
        ModelRunConfig(), AnswerConfig(), RouterConfig(), DisaggregationConfig(), TransferRunConfig(), RuntimeConfig(), arguments,
    )  # fmt: skip


def test_a_model_or_an_engine_of_ones_own_that_was_edited_gives_other_answers(tmp_path):
    model, engine = write_model(tmp_path / "model"), tmp_path / "e.py"
    engine.write_text("import near")
    (tmp_path / "near.py").write_text("a = 1")
    jobs = job(tmp_path, MockerOutput(), model=model), job(tmp_path, OwnFileOutput("pystr", str(engine)))
    before = [job_identity(one) for one in jobs]
    (model / "tokenizer_config.json").write_text("{}")
    (tmp_path / "near.py").write_text("a = 2")
    differences = [job_identity(one).difference(earlier) for one, earlier in zip(jobs, before, strict=True)]
    assert differences == [f"{model} has changed", f"{tmp_path / 'near.py'} has changed"]


def test_an_engine_of_ones_own_is_the_same_by_another_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "e.py").write_text("a = 1")
    made = job_identity(job(tmp_path, OwnFileOutput("pystr", "e.py")))
    assert job_identity(job(tmp_path, OwnFileOutput("pystr", str(tmp_path / "e.py")))) == made
    assert job_identity(job(tmp_path, OwnFileOutput("pytok", "e.py"))).difference(made) == "out was pystr and is pytok"


def test_engine_arguments_count_and_their_secrets_are_not_written(tmp_path):
    server = ServerOutput("http://me:hush@host:1/?key=hush")
    words = ("--api-key", "hush", "--hf-token=hush", "--max-num-seqs", "8")
    made = job_identity(job(tmp_path, server, *words))
    assert "hush" not in "".join(made.facts.values())
    assert job_identity(job(tmp_path, server, *words[:-1], "9")).difference(made).endswith("--max-num-seqs, 9")


def test_answers_of_which_nothing_says_what_made_them_are_not_taken(tmp_path):
    write(tmp_path, "one", "two")
    (tmp_path / "output.jsonl").write_text('{"text": "one", "response": ""}\n')
    with pytest.raises(BatchError, match=r"no output\.settings\.json says what they are from"):
        is_answered(tmp_path / "prompts.jsonl", Identity({}))


def test_an_output_of_something_else_is_not_touched(tmp_path):
    write(tmp_path, "one")
    for content in ('{"text": "other", "response": ""}\n', "not json\n", "[]\n"):
        (tmp_path / "output.jsonl").write_text(content)
        with pytest.raises(BatchError, match=r"output\.jsonl"):
            is_answered(tmp_path / "prompts.jsonl", Identity({}))
        assert (tmp_path / "output.jsonl").read_text() == content


def test_asking_whether_all_is_answered_changes_nothing_that_an_earlier_run_wrote(tmp_path):
    write(tmp_path, "one", "two")
    output, settings = tmp_path / "output.jsonl", tmp_path / "output.settings.json"
    assert not is_answered(tmp_path / "prompts.jsonl", Identity({}))
    assert not settings.exists()
    Identity({}).write(settings)
    output.write_text('{"text": "one", "response": ""}\n{"text": "tw')  # as a killed run leaves it
    before = output.read_bytes()
    assert not is_answered(tmp_path / "prompts.jsonl", Identity({}))
    assert output.read_bytes() == before


def test_two_runs_do_not_write_one_file(tmp_path):
    write(tmp_path, "one")
    with (tmp_path / "output.jsonl").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(BatchError, match="another run"):
            is_answered(tmp_path / "prompts.jsonl", Identity({}))


def test_what_cannot_be_read_is_named(tmp_path):
    with pytest.raises(BatchError, match="no such file"):
        read_prompts(tmp_path)
    (tmp_path / "x.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(BatchError, match=r"x\.jsonl"):
        read_prompts(tmp_path / "x.jsonl")


def test_a_request_that_fails_is_asked_again_next_time(tmp_path):
    source = """
import os
async def generate(request):
    text = request["messages"][-1]["content"]
    if text == "bad" and not os.path.exists("mended"):
        raise RuntimeError("not today")
    yield {"choices": [{"index": 0, "delta": {"content": text.upper()}, "finish_reason": "stop"}]}
"""
    (tmp_path / "e.py").write_text(source)
    write(tmp_path, "good", "bad")
    words = ["in=batch:prompts.jsonl", "out=pystr:e.py"]
    first = dynamo_run(*words, cwd=tmp_path)
    assert first.returncode == 1
    assert "no answer to 'bad'" in first.stderr
    assert "not today" in first.stderr
    (tmp_path / "mended").touch()
    second = dynamo_run(*words, cwd=tmp_path)
    assert second.returncode == 0, second.stderr
    assert [(answer["text"], answer["response"]) for answer in answers(tmp_path)] == [("good", "GOOD"), ("bad", "BAD")]
