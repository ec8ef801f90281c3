"""Where models come from: folders, GGUF files, the Hugging Face hub (a small one of our own)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers

from serving.model.errors import ModelError
from serving.model.files import ModelFiles
from serving.model.hub import is_hub_id, model_name
from tests.support import hub_server
from tests.support.model import write_model
from tests.support.waiting import PATIENCE_S

NAME = "acme/tiny-model"
PROGRAM = """
import sys
from serving.model.errors import ModelError
from serving.model.files import ModelFiles, local_weights
try:
    if sys.argv[2] == "weights":
        print(local_weights(sys.argv[1]))
    else:
        print(sorted(ModelFiles.read(sys.argv[1]).contents))
except ModelError as error:
    print(error, file=sys.stderr)
    sys.exit(2)
"""


@pytest.fixture
def hub(tmp_path):
    folder = write_model(tmp_path / "model")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    files |= {"model.safetensors": b"weights", "pytorch_model.bin": b"the same again", "README.md": b"read me"}
    with hub_server.running({NAME: files}) as found:
        yield found


def fetch(hub, tmp_path, name=NAME, what="files", **environment):
    settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_TELEMETRY": "1"}
    removed = ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE")
    inherited = {key: value for key, value in os.environ.items() if key not in removed}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, name, what],
        env=inherited | settings | environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        cwd=tmp_path,
    )


SMALL = ["config.json", "tokenizer.json", "tokenizer_config.json"]


@pytest.mark.parametrize("name", [NAME, f"hf://{NAME}"])
def test_small_files_come_from_the_hub_and_weights_do_not(hub, tmp_path, name):
    done = fetch(hub, tmp_path, name)
    assert done.stdout.strip() == str(SMALL), done.stderr
    assert hub.asked("tokenizer.json")
    assert not hub.asked("model.safetensors")
    assert (tmp_path / "home" / "hub" / "models--acme--tiny-model").is_dir()


def test_weights_come_for_engines_that_run_the_model_in_one_form(hub, tmp_path):
    done = fetch(hub, tmp_path, what="weights")
    folder = Path(done.stdout.strip())
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert sorted(path.name for path in folder.iterdir()) == [*SMALL[:1], "model.safetensors", *SMALL[1:]]


def test_what_is_in_the_cache_serves_without_the_hub(hub, tmp_path):
    assert fetch(hub, tmp_path).returncode == 0
    count = len(hub.requests)
    assert fetch(hub, tmp_path, HF_HUB_OFFLINE="1").stdout.strip() == str(SMALL)
    assert len(hub.requests) == count
    assert fetch(hub, tmp_path, HF_ENDPOINT="http://127.0.0.1:9").stdout.strip() == str(SMALL)


def only_line(done):
    assert done.returncode == 2
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    return lines[0]


def test_offline_and_not_in_the_cache(hub, tmp_path):
    line = only_line(fetch(hub, tmp_path, HF_HUB_OFFLINE="1"))
    assert line == (
        f"{NAME} is not a local folder or file, and cannot be downloaded: HF_HUB_OFFLINE is set and the cache does not have it"
    )


def test_a_hub_that_does_not_answer(hub, tmp_path):
    line = only_line(fetch(hub, tmp_path, HF_ENDPOINT="http://127.0.0.1:9"))
    assert "http://127.0.0.1:9 cannot be reached" in line


def test_a_model_that_is_not_there(hub, tmp_path):
    line = only_line(fetch(hub, tmp_path, "acme/nothing"))
    assert (
        line
        == f"acme/nothing is neither a local folder or file nor a model at {hub.url}; if it is private, set HF_TOKEN"
    )


def test_a_gated_model_needs_a_token_that_has_access(hub, tmp_path):
    line = only_line(fetch(hub, tmp_path, hub_server.GATED))
    assert line == (
        f"{hub_server.GATED} is gated: ask for access at {hub.url}/{hub_server.GATED}, and set HF_TOKEN to a token that has it"
    )
    assert fetch(hub, tmp_path, hub_server.GATED, HF_TOKEN=hub_server.TOKEN).stdout.strip() == str(SMALL)


@pytest.mark.parametrize("path", ["./nothing", "/no/such/folder", "~/nothing", "nothing.gguf", "a/b/c/d", "with blank"])
def test_what_cannot_be_an_id_is_not_asked_for(path):
    with pytest.raises(ModelError, match="does not exist"):
        ModelFiles.read(path)


def test_ids_names_and_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen").mkdir()
    (tmp_path / "Qwen" / "local").mkdir()
    (tmp_path / "Llama-3.2-3B-Q4_K_M.gguf").touch()
    assert is_hub_id("Qwen/Qwen3-0.6B")
    assert is_hub_id("gpt2")
    assert is_hub_id("hf://Qwen/local")
    assert not is_hub_id("Qwen/local")
    assert model_name("hf://Qwen/Qwen3-0.6B") == model_name("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    assert model_name("Qwen/local/") == "local"
    assert model_name("Llama-3.2-3B-Q4_K_M.gguf") == "Llama-3.2-3B-Q4_K_M"


def write_gguf(path, model="gpt2", pre="gpt-2", **more):
    """Write a GGUF file without weights, of the tokenizer that `write_model` makes, or of SentencePiece's kind."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("A name")
    writer.add_context_length(4096)
    writer.add_tokenizer_model(model)
    if model == "gpt2":
        folder = write_model(path.with_suffix(""))
        facts = json.loads((folder / "tokenizer.json").read_text())["model"]
        tokens = sorted(facts["vocab"], key=facts["vocab"].get)
        writer.add_tokenizer_pre(pre)
        writer.add_token_merges([" ".join(merge) for merge in facts["merges"]])
        types = [gguf.TokenType.CONTROL if name.startswith("<|") else gguf.TokenType.NORMAL for name in tokens]
        end = facts["vocab"]["<|im_end|>"]
    else:
        pieces = ["▁", "h", "e", "l", "o", "w", "r", "d", "he", "ll", "hell", "hello", "▁hello", "wo", "▁wo", "ld"]
        tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
        types = [gguf.TokenType.UNKNOWN, *[gguf.TokenType.CONTROL] * 2, *[gguf.TokenType.BYTE] * 256]
        types += [gguf.TokenType.NORMAL] * len(pieces)
        writer.add_token_scores([0.0] * 259 + [-float(place) for place in range(len(pieces))])
        writer.add_bos_token_id(1)
        end = 2
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_eos_token_id(end)
    writer.add_eot_token_id(end)
    for name, value in more.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_a_gguf_file_tells_its_context_end_tokens_and_template(tmp_path):
    path = write_gguf(tmp_path / "Some-Model.Q4.gguf", chat_template="{{ messages }}")
    files = ModelFiles.read(str(path))
    assert files.context_length == 4096
    assert len(files.eos_token_ids) == 1
    assert files.json("tokenizer_config.json")["chat_template"] == "{{ messages }}"
    assert files.json("tokenizer_config.json")["eos_token"] == "<|im_end|>"
    assert model_name(str(path)) == "Some-Model.Q4"


@pytest.mark.parametrize("text", ["the quick brown fox", "<|im_start|>user\nwhat?<|im_end|>", "naïve 🎉  x\n\n y", ""])
def test_its_tokenizer_is_the_one_it_was_made_from(tmp_path, text):
    path = write_gguf(tmp_path / "m.gguf")
    original = tokenizers.Tokenizer.from_file(str(tmp_path / "m" / "tokenizer.json"))
    ours = tokenizers.Tokenizer.from_buffer(ModelFiles.read(str(path)).contents["tokenizer.json"])
    assert ours.encode(text).ids == original.encode(text).ids
    assert ours.decode(ours.encode(text).ids, skip_special_tokens=False) == text


def test_a_sentencepiece_tokenizer_of_a_gguf_splits_and_joins_as_llama_does(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", model="llama")
    ours = tokenizers.Tokenizer.from_buffer(ModelFiles.read(str(path)).contents["tokenizer.json"])
    assert ours.encode("hello world", add_special_tokens=False).tokens == ["▁hello", "▁wo", "r", "ld"]
    assert ours.encode("hello").tokens == ["<s>", "▁hello"]
    assert ours.encode("é", add_special_tokens=False).tokens == ["▁", "<0xC3>", "<0xA9>"]
    assert ours.decode(ours.encode("hello é world").ids) == "hello é world"


@pytest.mark.parametrize(("model", "pre"), [("gpt2", "not-known"), ("bert", "")])
def test_a_tokenizer_that_cannot_be_taken_out_is_asked_for(tmp_path, model, pre):
    path = write_gguf(tmp_path / "m.gguf", pre=pre) if model == "gpt2" else write_gguf(tmp_path / "m.gguf", model=model)
    with pytest.raises(ModelError, match="--model-config"):
        ModelFiles.read(str(path))
    folder = write_model(tmp_path / "config")
    files = ModelFiles.read(str(path), str(folder))
    assert files.contents["tokenizer.json"] == (folder / "tokenizer.json").read_bytes()


def test_a_gguf_with_the_model_config_of_another_folder_takes_its_files(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", chat_template="theirs")
    folder = write_model(tmp_path / "config")
    files = ModelFiles.read(str(path), str(folder))
    assert files.contents["tokenizer_config.json"] == (folder / "tokenizer_config.json").read_bytes()


def test_what_is_no_gguf_file_is_refused(tmp_path):
    path = tmp_path / "m.gguf"
    for content in (b"", b"GGUF", b"nonsense" * 100, b"GGUF\x03\x00\x00\x00" + b"\xff" * 64):
        path.write_bytes(content)
        with pytest.raises(ModelError, match="not a readable GGUF file"):
            ModelFiles.read(str(path))


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        ModelFiles.read(str(tmp_path))
