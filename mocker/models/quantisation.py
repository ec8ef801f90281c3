"""In which type each matrix of a checkpoint is stored: what its quantization_config says, module by module.

Weights of few bits have a scale, and some a zero point, for each group of weights; their bits count.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from mocker.models.identity import parts_of
from mocker.models.keys import MOST, shown, whole
from mocker.models.layers import BFLOAT16, WeightType
from mocker.models.module_names import Matches, any_of, below, everything, matching, nothing
from mocker.models.weight_types import (
    FP8,
    INT8,
    MXFP4,
    MXFP8,
    NVFP4,
    algorithm,
    integer,
    number,
    of_group,
    torchao_type,
)


class Rule(NamedTuple):
    """One type, and the modules that it applies to."""

    weight: WeightType
    matches: Matches


class Quantisation(NamedTuple):
    """How a checkpoint's matrices are stored."""

    rules: tuple[Rule, ...] = ()
    """The first that matches counts."""
    is_left_out: Matches = nothing
    kv_dtype: str = "bfloat16"
    block: int = 0
    """Side of the blocks that share a scale, which the part of each GPU must consist of; 0: no blocks."""

    def weight_of(self, modules: Iterable[str]) -> WeightType:
        """Return the type of a matrix with these names; engines need one type for matrices that they fuse."""
        if any(map(self.is_left_out, modules)):
            return BFLOAT16
        found = [rule.weight for rule in self.rules for module in modules if rule.matches(module)]
        return found[0] if found else BFLOAT16


def quantisation_of(config: Mapping[str, Any], beside: Mapping[str, Any] | None = None) -> Quantisation:
    """Read a quantization_config, wherever it stands, or else the hf_quant_config.json beside the file.

    Raises:
        ValueError: its method is not known, or it is not what that method writes.
    """
    parts = list(parts_of(config))
    where, found = next(
        ((name, part[name]) for part in parts for name in PLACES if part.get(name)), ("quantization_config", None)
    )
    if found is not None and not isinstance(found, dict):
        raise ValueError(f"{where} is {shown(found)}; expected an object with a quant_method")
    if found is None and beside is not None:
        where = "hf_quant_config.json"
        inner = beside.get("quantization")
        found = {"quant_method": "modelopt", **(inner if isinstance(inner, dict) else beside)}
    if found is None:
        return Quantisation()
    expert_dtype = next((part["expert_dtype"] for part in parts if part.get("expert_dtype")), None)
    method = _method(found)
    try:
        return READERS[method]({**found, "expert_dtype": expert_dtype})
    except (TypeError, AttributeError, LookupError, OverflowError) as error:
        raise ValueError(f"{where} is {shown(found)}, which is not what {method} writes") from error
    except ValueError as error:
        raise ValueError(f"{where} of {method}: {error}") from error


PLACES = ("quantization_config", "compression_config", "quantization")


def _method(found: Mapping[str, Any]) -> str:
    """Return the name of a reader.

    Raises:
        ValueError: there is none.
    """
    method = str(found.get("quant_method") or "").lower().replace("_", "-")
    if found.get("quant_algo") or found.get("quantized_layers"):
        return "modelopt"
    if not method and found.get("bits"):
        return "mlx"
    if not method and (found.get("load_in_4bit") or found.get("load_in_8bit")):
        return "bitsandbytes"
    if not method and found.get("config_groups"):
        return "compressed-tensors"
    if method not in READERS:
        raise ValueError(f"quant_method is {shown(method)}; expected one of {', '.join(sorted(READERS))}")
    return method


def _fp8(found: Mapping[str, Any]) -> Quantisation:
    """One scale for a matrix, or for each block; DeepSeek V4's experts have 4 bits."""
    rules = [Rule(FP8, everything)]
    if found.get("expert_dtype") == "fp4":
        rules.insert(0, Rule(MXFP4, _is_of_experts))
    left_out = found.get("ignored_layers") or found.get("modules_to_not_convert") or []
    return Quantisation(tuple(rules), any_of(left_out), block=_side(found, "weight_block_size"))


def _side(found: Mapping[str, Any], name: str) -> int:
    """Return the side of the blocks that share a scale; 0: no blocks."""
    sides = found.get(name) or [0]
    if not isinstance(sides, list) or not 0 <= (whole(sides[0]) or 0) <= MOST or whole(sides[0]) is None:
        raise ValueError(f"{name} is {shown(sides)}; expected two whole numbers")
    return whole(sides[0]) or 0


def _int4_experts(found: Mapping[str, Any]) -> Quantisation:
    plain = _fp8(found)
    return plain._replace(rules=(Rule(integer(4, number(found, "group_size") or 128), _is_of_experts), *plain.rules))


def _is_of_experts(module: str) -> bool:
    return ".experts" in module


def _compressed_tensors(found: Mapping[str, Any]) -> Quantisation:
    """Groups of modules: by name, which count first, or by class (`Linear`)."""
    named, by_class, block = [], [], 0
    for group in (found.get("config_groups") or {}).values():
        weights = group.get("weights")
        if weights is None:
            continue
        weight = of_group(weights, is_weight_only=not group.get("input_activations"))
        targets = group.get("targets") or ["Linear"]
        names = [name for name in targets if name.startswith("re:") or "." in name or name.islower()]
        named += [Rule(weight, any_of(names))] if names else []
        by_class += [Rule(weight, everything)] if len(names) < len(targets) else []
        if weights.get("strategy") == "block":
            block = _side(weights, "block_structure")
    return Quantisation((*named, *by_class), any_of(found.get("ignore") or []), _kv(found), block)


def _modelopt(found: Mapping[str, Any]) -> Quantisation:
    left_out = any_of(found.get("ignore") or found.get("exclude_modules") or [])
    layers = found.get("quantized_layers")
    if not layers and not found.get("quant_algo"):  # only the KV cache is quantised
        return Quantisation(kv_dtype=_kv(found))
    if not layers:
        name = str(found["quant_algo"])
        return Quantisation((Rule(algorithm(name, found), everything),), left_out, _kv(found), _block(name))
    types = {name: algorithm(str(how.get("quant_algo")), how) for name, how in layers.items()}
    of_module = below(types)
    rules = [Rule(weight, _has(of_module, weight)) for weight in sorted(set(types.values()))]
    block = max([_block(str(how.get("quant_algo"))) for how in layers.values()])
    if "fp8" in str(found.get("quant_method")).lower():  # the rest is as in the checkpoint that it was made from
        return Quantisation((*rules, Rule(FP8, everything)), nothing, _kv(found), _fp8(found).block or block)
    return Quantisation(tuple(rules), nothing, _kv(found), block)


def _has(of_module: Callable[[str], Any], weight: WeightType) -> Matches:
    return lambda module: bool(of_module(module) == weight)


def _block(name: str) -> int:
    return 128 if name.upper() in ("FP8_PB_WO", "FP8_BLOCK_SCALES") else 0


def _gptq(found: Mapping[str, Any]) -> Quantisation:
    """Whole numbers, with rules for modules (`dynamic`: `-:` leaves out), or only in those that are listed."""
    rules, left_out = [], list(found.get("modules_to_not_convert") or [])
    for name, own in (found.get("dynamic") or {}).items():
        if name.startswith("-:"):
            left_out.append(f"re:{name[2:]}")
        else:
            rules.append(Rule(_zeros({**found, **own}), matching(name.removeprefix("+:"))))
    only = [
        name
        for part in found.get("modules_in_block_to_quantize") or []
        for name in ([part] if isinstance(part, str) else part)
    ]
    rules.append(Rule(_zeros(found), any_of(only) if only else everything))
    return Quantisation(tuple(rules), any_of(left_out))


def _awq(found: Mapping[str, Any]) -> Quantisation:
    return Quantisation((Rule(_zeros(found), everything),), any_of(found.get("modules_to_not_convert") or []))


def _zeros(found: Mapping[str, Any]) -> WeightType:
    """Return whole numbers that have a zero point of their own width for each group."""
    bits = number(found, "bits", "w_bit", default=None)
    return integer(bits, number(found, "group_size", "q_group_size") or 128, 16 + bits)


def _auto_round(found: Mapping[str, Any]) -> Quantisation:
    """As GPTQ, or floats in groups; modules may have their own bits, and 16 leave them out."""
    data_type = str(found.get("data_type") or "int")
    plain = NVFP4 if "nv_fp" in data_type else MXFP4 if "mx_fp" in data_type else _zeros(found)
    if "mx_fp" in data_type and number(found, "bits") == 8:
        plain = MXFP8
    rules, left_out = [], list(found.get("modules_to_not_convert") or [])
    for name, own in (found.get("extra_config") or {}).items():
        pattern = f"re:{name}" if any(sign in name for sign in "*|([") else name
        if number(own, "bits", default=16) >= 16:
            left_out.append(pattern)
        else:
            rules.append(Rule(_zeros({**found, **own}), any_of([pattern])))
    return Quantisation((*rules, Rule(plain, everything)), any_of(left_out))


def _mlx(found: Mapping[str, Any]) -> Quantisation:
    """A scale and a bias of 16 bits for each group, unless `mode` names a format with its own.

    Raises:
        ValueError: modules have types of their own, which are not read.
    """
    own = next((name for name, value in found.items() if isinstance(value, dict)), None)
    if own is not None:
        raise ValueError(f"{own} has a type of its own; expected one for all modules")
    if (mode := found.get("mode") or "affine") != "affine":
        return Quantisation((Rule(algorithm(str(mode), found), everything),))
    return Quantisation(
        (Rule(integer(number(found, "bits", default=None), number(found, "group_size") or 64, 32), everything),)
    )


def _mxfp4(found: Mapping[str, Any]) -> Quantisation:
    """gpt-oss: experts only."""
    return Quantisation((Rule(MXFP4, _is_of_experts),), any_of(found.get("modules_to_not_convert") or []))


def _mxfp8(found: Mapping[str, Any]) -> Quantisation:
    left_out = found.get("ignored_layers") or found.get("modules_to_not_convert") or found.get("ignore") or []
    return Quantisation((Rule(MXFP8, everything),), any_of(left_out))


def _experts_int8(found: Mapping[str, Any]) -> Quantisation:
    return Quantisation((Rule(INT8, _is_of_experts),))


def _bitsandbytes(found: Mapping[str, Any]) -> Quantisation:
    """NF4 has 32 bits of scale for 64 weights, or 8 bits and 32 for every 256 of those; 8 bits have a scale for each row."""
    if not found.get("load_in_4bit") and not found.get("load_in_8bit"):
        raise ValueError("it lacks load_in_4bit or load_in_8bit")
    bits = (8 + 32 / 256) if found.get("bnb_4bit_use_double_quant") else 32
    weight = integer(4, 64, bits) if found.get("load_in_4bit") else integer(8, 0)
    return Quantisation((Rule(weight, everything),), any_of(found.get("llm_int8_skip_modules") or []))


def _torchao(found: Mapping[str, Any]) -> Quantisation:
    """One type for all modules, or one for each (`module_fqn_to_config`)."""
    given = found["quant_type"]
    default = (
        given["default"] if isinstance(given, dict) else {"_type": given, "_data": found.get("quant_type_kwargs") or {}}
    )
    of_modules = default.get("_data", {}).get("module_fqn_to_config") or default.get("_data", {}).get("fqn_to_config")
    left_out = list(found.get("modules_to_not_convert") or [])
    if of_modules is None:
        return Quantisation((Rule(torchao_type(default), everything),), any_of(left_out))
    rules = []
    for name, how in of_modules.items():
        pattern = name.replace("regex:", "re:")
        if how is None:
            left_out.append(pattern)
        elif name != "_default":
            rules.append(Rule(torchao_type(how), any_of([pattern])))
    if of_modules.get("_default") is not None:
        rules.append(Rule(torchao_type(of_modules["_default"]), everything))
    return Quantisation(tuple(rules), any_of([name for name in left_out if name != "_default"]))


def _quark(found: Mapping[str, Any]) -> Quantisation:
    """One type for all modules, and others by name."""
    rules = [
        Rule(_quark_type(how), any_of([name]))
        for name, how in (found.get("layer_quant_config") or {}).items()
        if how.get("weight") is not None
    ]
    if (found.get("global_quant_config") or {}).get("weight") is not None:
        rules.append(Rule(_quark_type(found["global_quant_config"]), everything))
    left_out = [name for name, how in (found.get("layer_quant_config") or {}).items() if how.get("weight") is None]
    kv = (found.get("global_quant_config") or {}).get("output_tensors") or found.get("kv_cache_quant_config")
    dtype = "fp8" if kv and "fp8" in str(kv) else "bfloat16"
    return Quantisation(tuple(rules), any_of([*left_out, *(found.get("exclude") or [])]), dtype)


def _quark_type(how: Mapping[str, Any]) -> WeightType:
    weight = how["weight"][0] if isinstance(how["weight"], list) else how["weight"]
    name, size = str(weight.get("dtype")), number(weight, "group_size")
    kind, digits = "float" if name.startswith("fp") else "int", "".join(filter(str.isdecimal, name.partition("_")[0]))
    if not digits:
        raise ValueError(f"dtype is {shown(name)}; expected one such as fp8_e4m3 or int4")
    strategy = "group" if "group" in str(weight.get("qscheme")) else "tensor"
    group = {
        "type": kind,
        "num_bits": int(digits[:3]),
        "strategy": strategy,
        "group_size": size,
        "symmetric": weight.get("symmetric", True),
    }
    return of_group(group, is_weight_only=not how.get("input_tensors"))


def _kv(found: Mapping[str, Any]) -> str:
    """Return the type of the KV cache.

    Raises:
        ValueError: it is neither 8-bit floats nor left as it is.
    """
    scheme = found.get("kv_cache_scheme") or found.get("kv_cache_quant_algo")
    if not scheme or str(scheme).lower() == "none":
        return "bfloat16"
    is_fp8 = (
        scheme.get("num_bits") == 8 and scheme.get("type", "float") == "float"
        if isinstance(scheme, dict)
        else "FP8" in str(scheme).upper()
    )
    if not is_fp8:
        raise ValueError(f"the type of its KV cache is {shown(scheme)}; expected FP8 or none")
    return "fp8"


READERS: dict[str, Callable[[Mapping[str, Any]], Quantisation]] = {
    "auto-awq": _awq,
    "auto-gptq": _gptq,
    "auto-round": _auto_round,
    "auto-round-awq": _auto_round,
    "auto-round-gptq": _auto_round,
    "awq": _awq,
    "awq-marlin": _awq,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed_tensors,
    "deepseek-v4-fp8": _fp8,
    "experts-int8": _experts_int8,
    "fbgemm-fp8": _fp8,
    "fp8": _fp8,
    "gpt-oss-mxfp4": _mxfp4,
    "gptq": _gptq,
    "gptq-marlin": _gptq,
    "gptqmodel": _gptq,
    "inc": _auto_round,
    "intel/auto-round": _auto_round,
    "mlx": _mlx,
    "modelopt": _modelopt,
    "modelopt-fp4": _modelopt,
    "modelopt-mixed": _modelopt,
    "modelopt-mxfp8": _modelopt,
    "mxfp4": _mxfp4,
    "mxfp8": _mxfp8,
    "quark": _quark,
    "torchao": _torchao,
    "w4afp8": _int4_experts,
}
"""How each `quant_method` is read."""
