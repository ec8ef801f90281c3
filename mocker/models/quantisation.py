"""In which type each matrix of a checkpoint is stored: what its quantization_config says, module by module.

Formats: fp8 (DeepSeek's blocks), compressed-tensors, modelopt (also as hf_quant_config.json), GPTQ, AWQ, bitsandbytes,
MXFP4, torchao. Weights of 4 bits have a scale for each group; its bits count.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from fnmatch import translate
from typing import Any, NamedTuple

from mocker.models.layers import BFLOAT16, WeightType

PLAIN = {
    "bfloat16": BFLOAT16,
    "fp8": WeightType("fp8", 1.0, "fp8"),
    "int8": WeightType("int8", 1.0, "int8"),
    "int4": WeightType("int4", 0.5625, "bfloat16"),
    "fp4": WeightType("fp4", 0.5625, "fp4"),
}
"""The types that a setting can ask for; the 4-bit ones with a scale of 8 bits for every 16 weights."""
OTHERS = re.compile(r"^(model\.)?(mtp|visual|vision|audio)|vision_tower|audio_tower|embed_vision|embed_audio")
"""Names of modules beside the language model, which have layers of their own."""
MXFP4 = WeightType("fp4", 0.5 + 1 / 32, "fp4")


def _everything(module: str) -> bool:
    return True


def _nothing(module: str) -> bool:
    return False


class Rule(NamedTuple):
    """One type, and the modules that it applies to."""

    weight: WeightType
    matches: Callable[[str], bool]


class Quantisation(NamedTuple):
    """How a checkpoint's matrices are stored."""

    rules: tuple[Rule, ...] = ()
    """The first that matches counts."""
    is_left_out: Callable[[str], bool] = _nothing
    kv_dtype: str = "bfloat16"
    block: int = 0
    """Side of the blocks that share a scale, which the part of each GPU must consist of; 0: no blocks."""

    def weight_of(self, modules: Iterable[str]) -> WeightType:
        """Return the type of a matrix with these names; engines need one type for matrices that they fuse."""
        for module in modules:
            if self.is_left_out(module):
                return BFLOAT16
            for rule in self.rules:
                if rule.matches(module):
                    return rule.weight
        return BFLOAT16


def quantisation_of(config: Mapping[str, Any], beside: Mapping[str, Any] | None = None) -> Quantisation:
    """Read a quantization_config, wherever it stands, or else the hf_quant_config.json beside the file.

    Raises:
        ValueError: its method is not known.
    """
    text = config.get("text_config") or {}
    found = next(
        (
            part[name]
            for part in (config, text)
            for name in ("quantization_config", "compression_config")
            if isinstance(part.get(name), dict) and part[name]
        ),
        None,
    )
    if found is None and beside is not None:
        found = {"quant_method": "modelopt", **beside.get("quantization", beside)}
    if found is None:
        return Quantisation()
    method = str(found.get("quant_method") or "").lower()
    if found.get("quant_algo") or "quantized_layers" in found:
        method = "modelopt"
    read = READERS.get(method.replace("_", "-"))
    if read is None:
        raise ValueError(f"quant_method {method!r} is not known; expected one of {', '.join(READERS)}")
    return read({**found, "expert_dtype": config.get("expert_dtype") or text.get("expert_dtype")})


def _fp8(found: Mapping[str, Any]) -> Quantisation:
    block = (found.get("weight_block_size") or [0])[0]
    rules = [Rule(PLAIN["fp8"], _everything)]
    if found.get("expert_dtype") == "fp4":  # DeepSeek V4
        rules.insert(0, Rule(MXFP4, lambda module: ".experts" in module))
    left_out = found.get("modules_to_not_convert") or found.get("ignored_layers") or []
    return Quantisation(tuple(rules), _any_of(left_out), block=int(block))


def _compressed_tensors(found: Mapping[str, Any]) -> Quantisation:
    rules, block = [], 0
    for group in (found.get("config_groups") or {}).values():
        weights = group.get("weights")
        if not isinstance(weights, dict):
            continue
        weight = _type(weights, is_weight_only=not group.get("input_activations"))
        rules.append(Rule(weight, _targets(group.get("targets") or ["Linear"])))
        if weights.get("strategy") == "block":
            block = int((weights.get("block_structure") or [0])[0])
    return Quantisation(tuple(rules), _any_of(found.get("ignore") or []), _kv(found), block)


def _modelopt(found: Mapping[str, Any]) -> Quantisation:
    left_out = found.get("ignore") or found.get("exclude_modules") or []
    layers = found.get("quantized_layers")
    if layers:
        types = {name: _algorithm(str(how.get("quant_algo")), how) for name, how in layers.items()}
        rules = [Rule(weight, _below(name)) for name, weight in types.items()]
        if "fp8" in str(found.get("quant_method")).lower():  # the rest as the checkpoint that it was made from
            rules.append(Rule(PLAIN["fp8"], _everything))
        return Quantisation(tuple(rules), _nothing, _kv(found))
    return Quantisation(
        (Rule(_algorithm(str(found.get("quant_algo")), found), _everything),), _any_of(left_out), _kv(found)
    )


def _packed(found: Mapping[str, Any]) -> Quantisation:
    """GPTQ and AWQ: whole numbers with a scale and a zero point for each group."""
    weight = _integer(int(found.get("bits") or found.get("w_bit") or 4), int(found.get("group_size") or 128))
    left_out = list(found.get("modules_to_not_convert") or [])
    left_out += [
        re.escape(key[2:]) if key[2:].isalnum() else key[2:] for key in found.get("dynamic") or {} if key[:2] == "-:"
    ]
    return Quantisation(
        (Rule(weight, _everything),), _any_of([f"re:.*{name}.*" if "\\" in name else name for name in left_out])
    )


def _mxfp4(found: Mapping[str, Any]) -> Quantisation:
    """gpt-oss: experts only."""
    return Quantisation(
        (Rule(MXFP4, lambda module: "expert" in module),), _any_of(found.get("modules_to_not_convert") or [])
    )


def _bitsandbytes(found: Mapping[str, Any]) -> Quantisation:
    weight = _integer(4, 64) if found.get("load_in_4bit") else WeightType("int8", 1.0, "bfloat16")
    return Quantisation((Rule(weight, _everything),), _any_of(found.get("llm_int8_skip_modules") or []))


READERS: dict[str, Callable[[Mapping[str, Any]], Quantisation]] = {
    "fp8": _fp8,
    "fbgemm-fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "modelopt-fp4": _modelopt,
    "gptq": _packed,
    "awq": _packed,
    "mxfp4": _mxfp4,
    "bitsandbytes": _bitsandbytes,
}


def _algorithm(name: str, found: Mapping[str, Any]) -> WeightType:
    """Return the type of a modelopt algorithm, such as FP8, NVFP4, W4A16_AWQ or MXFP8."""
    plain = name.upper()
    size = int(found.get("group_size") or 0)
    if "NVFP4" in plain or plain == "W4A8_NVFP4_FP8":
        return WeightType("fp4", 0.5 + 1 / (size or 16), "fp4")
    if "MXFP4" in plain:
        return MXFP4
    if "MXFP8" in plain:
        return WeightType("fp8", 1.0 + 1 / 32, "fp8")
    if "FP8" in plain and "W4" not in plain:
        return PLAIN["fp8"]
    if "W4A16" in plain or "INT4" in plain or "W4A8" in plain:
        return _integer(4, size or 128)
    if "INT8" in plain or "W8A8" in plain:
        return PLAIN["int8"]
    raise ValueError(f"quant_algo {name!r} is not known; expected one of FP8, NVFP4, MXFP4, MXFP8, W4A16_AWQ, INT8")


def _type(weights: Mapping[str, Any], *, is_weight_only: bool) -> WeightType:
    """Return the type of a group of compressed-tensors."""
    bits, size = int(weights.get("num_bits") or 16), int(weights.get("group_size") or 0)
    if bits >= 16:
        return BFLOAT16
    if weights.get("type") == "float":
        if bits == 8:
            return PLAIN["fp8"]._replace(compute="bfloat16" if is_weight_only else "fp8")
        scale = 1 / size if size > 0 else 0.0  # one byte for each group
        return WeightType("fp4", 0.5 + scale, "bfloat16" if is_weight_only else "fp4")
    if bits == 8 and not is_weight_only:
        return PLAIN["int8"]
    return _integer(bits, size)


def _integer(bits: int, group_size: int) -> WeightType:
    """Return whole numbers that are unpacked before they are multiplied, with 16 bits of scale for each group."""
    scale = 2 / group_size if group_size > 0 else 0.0
    return WeightType("int4" if bits <= 4 else "int8", bits / 8 + scale, "bfloat16")


def _kv(found: Mapping[str, Any]) -> str:
    scheme = found.get("kv_cache_scheme") or found.get("kv_cache_quant_algo")
    if isinstance(scheme, dict):
        return "fp8" if int(scheme.get("num_bits") or 16) == 8 else "bfloat16"
    return "fp8" if scheme and "FP8" in str(scheme).upper() else "bfloat16"


def _targets(targets: Iterable[str]) -> Callable[[str], bool]:
    """Compile the targets of a group; names of classes mean all matrices."""
    names = [name for name in targets if name.startswith("re:") or "." in name or name.islower()]
    return _any_of(names) if names else _everything


def _below(name: str) -> Callable[[str], bool]:
    plain = _plain(name)
    return lambda module: module == plain or module.startswith(f"{plain}.")


def _any_of(patterns: Iterable[str]) -> Callable[[str], bool]:
    """Compile the names of modules that are left out: exact, part of a name, with *, or `re:` and an expression."""
    expressions, parts = [], set()
    for pattern in patterns:
        if OTHERS.search(pattern):
            continue
        if pattern.startswith("re:"):
            expressions.append(f"(?:{pattern[3:]})")
        elif "*" in pattern:
            expressions.append(translate(_plain(pattern)))
        else:
            parts.add(_plain(pattern))
    compiled = re.compile("|".join(expressions)) if expressions else None

    def matches(module: str) -> bool:
        if compiled is not None and (compiled.match(module) or compiled.match(f"model.{module}")):
            return True
        return any(_is_part(part, module) for part in _names(module) & parts) if parts else False

    return matches


def _names(module: str) -> set[str]:
    """Return all runs of whole words of a module's name."""
    words = module.split(".")
    return {".".join(words[i:j]) for i in range(len(words)) for j in range(i + 1, len(words) + 1)}


def _is_part(part: str, module: str) -> bool:
    return bool(part) and part in module


def _plain(name: str) -> str:
    """Remove what stands before `layers` in a module's name, which differs with the class that wraps the model."""
    place = name.find("layers.")
    return name[place:] if place > 0 else name
