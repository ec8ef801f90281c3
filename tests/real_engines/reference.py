"""The tiny model's forward pass in numpy, in float64: what every engine should compute."""

import json

import numpy as np
from safetensors.numpy import load_file


class Reference:
    def __init__(self, folder):
        self.config = json.loads((folder / "config.json").read_text())
        self.weights = {
            name: value.astype(np.float64) for name, value in load_file(folder / "model.safetensors").items()
        }

    def logits(self, tokens):
        """Return the logits at every place, shape (tokens, vocabulary)."""
        config, weights = self.config, self.weights
        heads, kv_heads, size = (config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        x = weights["model.embed_tokens.weight"][tokens]
        places = np.arange(len(tokens))
        angles = places[:, None] / config["rope_theta"] ** (np.arange(0, size, 2) / size)
        cos, sin = (np.concatenate([part(angles)] * 2, 1)[:, None] for part in (np.cos, np.sin))

        def rotate(values):
            half = size // 2
            turned = np.concatenate([-values[..., half:], values[..., :half]], -1)
            return values * cos + turned * sin

        def norm(values, name):
            return values / np.sqrt((values**2).mean(-1, keepdims=True) + config["rms_norm_eps"]) * weights[name]

        mask = np.where(places[:, None] >= places, 0, -np.inf)
        for layer in range(config["num_hidden_layers"]):
            name = f"model.layers.{layer}"
            y = norm(x, f"{name}.input_layernorm.weight")
            q, k, v = (
                (y @ weights[f"{name}.self_attn.{part}_proj.weight"].T).reshape(len(tokens), -1, size) for part in "qkv"
            )
            q, k = rotate(q), rotate(k)
            k, v = (np.repeat(part, heads // kv_heads, 1) for part in (k, v))
            scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(size) + mask
            shares = np.exp(scores - scores.max(-1, keepdims=True))
            shares /= shares.sum(-1, keepdims=True)
            y = np.einsum("hij,jhd->ihd", shares, v).reshape(len(tokens), -1)
            x = x + y @ weights[f"{name}.self_attn.o_proj.weight"].T
            y = norm(x, f"{name}.post_attention_layernorm.weight")
            gate = y @ weights[f"{name}.mlp.gate_proj.weight"].T
            up = y @ weights[f"{name}.mlp.up_proj.weight"].T
            x = x + (gate / (1 + np.exp(-gate)) * up) @ weights[f"{name}.mlp.down_proj.weight"].T
        return norm(x, "model.norm.weight") @ weights["lm_head.weight"].T

    def greedy(self, tokens, count):
        """Return the likeliest continuation and the log-probability of each of its tokens."""
        tokens, values = list(tokens), []
        for _ in range(count):
            logits = self.logits(tokens)[-1]
            best = int(logits.argmax())
            values.append(float(logits[best] - logits.max() - np.log(np.exp(logits - logits.max()).sum())))
            tokens.append(best)
        return tokens[-count:], values
