"""Make a tiny model with random weights, to try real engines where no model can be downloaded.

    python examples/tiny_model.py FOLDER

This writes FOLDER/ (config.json, tokenizer.json, model.safetensors: a two-layer Llama of a megabyte) and FOLDER.gguf
with the same weights for llama.cpp. Its answers make no sense, but they are the same on every engine.
"""

import json
import sys
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

HIDDEN, LAYERS, HEADS, KV_HEADS, INNER, CONTEXT, VOCABULARY = 128, 2, 4, 2, 256, 4096, 1024
HEAD = HIDDEN // HEADS
SPECIAL = ("<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tokenizer(corpus: list[str]) -> Tokenizer:
    """Train a byte-level BPE."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(name, special=True) for name in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(corpus, trainer)
    return made


def weights(seed: int) -> dict[str, np.ndarray]:
    """Return random weights by their Hugging Face names, large enough to make clear choices between tokens."""
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return rng.normal(0, 1.2 / np.sqrt(columns), (rows, columns)).astype(np.float32)

    tensors = {"model.embed_tokens.weight": rng.normal(0, 1, (VOCABULARY, HIDDEN)).astype(np.float32)}
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        tensors[f"{name}.input_layernorm.weight"] = np.ones(HIDDEN, np.float32)
        tensors[f"{name}.self_attn.q_proj.weight"] = matrix(HEADS * HEAD, HIDDEN)
        tensors[f"{name}.self_attn.k_proj.weight"] = matrix(KV_HEADS * HEAD, HIDDEN)
        tensors[f"{name}.self_attn.v_proj.weight"] = matrix(KV_HEADS * HEAD, HIDDEN)
        tensors[f"{name}.self_attn.o_proj.weight"] = matrix(HIDDEN, HEADS * HEAD)
        tensors[f"{name}.post_attention_layernorm.weight"] = np.ones(HIDDEN, np.float32)
        tensors[f"{name}.mlp.gate_proj.weight"] = matrix(INNER, HIDDEN)
        tensors[f"{name}.mlp.up_proj.weight"] = matrix(INNER, HIDDEN)
        tensors[f"{name}.mlp.down_proj.weight"] = matrix(HIDDEN, INNER)
    tensors["model.norm.weight"] = np.ones(HIDDEN, np.float32)
    tensors["lm_head.weight"] = matrix(VOCABULARY, HIDDEN)
    for special in range(len(SPECIAL)):
        tensors["lm_head.weight"][special] = 0  # so that answers continue
    return tensors


def write_folder(folder: Path, made: Tokenizer, tensors: dict[str, np.ndarray]) -> None:
    """Write the Hugging Face model."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "intermediate_size": INNER,
        "max_position_embeddings": CONTEXT,
        "vocab_size": VOCABULARY,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    names = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[1],
        "model_max_length": CONTEXT,
        "chat_template": TEMPLATE,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "tokenizer_config.json").write_text(json.dumps(names, indent=1))
    made.save(str(folder / "tokenizer.json"))
    write_safetensors(folder / "model.safetensors", tensors)


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Write tensors: the length of a header, the header in JSON, and the values."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, value in tensors.items():
        start, end = end, end + value.nbytes
        header[name] = {"dtype": "F32", "shape": list(value.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for value in tensors.values():
            file.write(value.tobytes())


def write_gguf(path: Path, made: Tokenizer, tensors: dict[str, np.ndarray]) -> None:
    """Write the same model as a GGUF file."""
    import gguf

    facts = json.loads(made.to_str())["model"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(path.stem)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HEAD)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(facts["vocab"], key=facts["vocab"].get))
    writer.add_token_types(
        [gguf.TokenType.CONTROL if token < len(SPECIAL) else gguf.TokenType.NORMAL for token in range(VOCABULARY)]
    )
    writer.add_token_merges([" ".join(merge) for merge in facts["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    for name, value in tensors.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):  # llama.cpp rotates neighbours, Hugging Face halves
            rows, columns = value.shape
            value = value.reshape(-1, 2, HEAD // 2, columns).swapaxes(1, 2).reshape(rows, columns)
        writer.add_tensor(_gguf_name(name), np.ascontiguousarray(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_name(name: str) -> str:
    parts = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers": "blk",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    for ours, theirs in parts.items():
        name = name.replace(ours, theirs)
    return name


def make(folder: Path, seed: int = 0) -> None:
    """Write the folder, and the GGUF file next to it."""
    here = Path(__file__).resolve().parent.parent
    made = tokenizer([(here / "LICENSE").read_text()])
    assert made.get_vocab_size() == VOCABULARY
    tensors = weights(seed)
    write_folder(folder, made, tensors)
    write_gguf(folder.with_name(folder.name + ".gguf"), made, tensors)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/tiny_model.py FOLDER")
    make(Path(sys.argv[1]))
