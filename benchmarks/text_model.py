"""Make a model folder with a tokenizer of 32,000 tokens, trained on Python's own sources, and texts it has not seen.

    python benchmarks/text_model.py FOLDER

Benchmarks of text prompts, ours and others', can use it: it needs no model hub, and its tokens are about as long as
real ones.
"""

import argparse
import json
import random
import sysconfig
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from serving.model.tokenizer import HuggingFaceTokenizer

VOCAB_SIZE = 32_000
CONTEXT = 100_000
TRAINING_BYTES = 12 << 20
SPLIT = (  # Llama 3's
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def sources() -> list[str]:
    """Return the texts of Python's own library, in a fixed order that does not follow the folders."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    paths = [path for path in paths if "site-packages" not in path.parts]
    random.Random(0).shuffle(paths)
    return [path.read_text(errors="replace") for path in paths]


def write(folder: Path) -> Path:
    """Write the model's files."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus, size = [], 0
    for text in sources():
        corpus.append(text)
        size += len(text)
        if size > TRAINING_BYTES:
            break
    tokenizer.train_from_iterator(corpus, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "max_position_embeddings": CONTEXT,
        "vocab_size": VOCAB_SIZE,
        "eos_token_id": 1,
        "bos_token_id": 0,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 4,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "chat_template": TEMPLATE,
                "eos_token": "<|im_end|>",
                "bos_token": "<|im_start|>",
                "tokenizer_class": "PreTrainedTokenizerFast",
            }
        )
    )
    return folder


def prompts(folder: Path, num_tokens: int, count: int) -> list[str]:
    """Return texts of about this many tokens: parts of one long text that begin at different places."""
    tokenizer = HuggingFaceTokenizer((folder / "tokenizer.json").read_bytes(), encodes=True)
    ids = tokenizer.encode("\n".join(sources()[-200:])[: 16 * num_tokens + 2_000_000], special=False)
    rng = random.Random(1)
    starts = [rng.randrange(len(ids) - num_tokens) for _ in range(count)]
    return [tokenizer.decode(ids[start : start + num_tokens].tolist()) for start in starts]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    print(write(parser.parse_args().folder))
