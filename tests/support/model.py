"""A small model's files."""

import json

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = [
    "once upon a time there was a small server that served many tokens to many people",
    "the quick brown fox jumps over the lazy dog while the router counts cached blocks",
    "what is the capital of south africa and how many people live there today",
] * 20


def write_model(folder):
    """Write a small model's files: a byte-level BPE tokenizer, a template, a configuration."""
    folder.mkdir()
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id("<|im_end|>")
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 4096, "eos_token_id": end}))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": TEMPLATE, "eos_token": "<|im_end|>", "bos_token": None})
    )
    return folder
