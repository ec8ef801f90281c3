"""Files that say how many drafts a model accepts.

.yaml    InferenceX's `golden_al_distribution`: {model: {thinking_on: {1: 1.78, 2: 2.38}, thinking_off: ...}}
.json    rates by position: [0.8, 0.5, 0.3]
other    metrics of a vLLM server or of our frontend, as `curl .../metrics` saves them
"""

import json
import re
from pathlib import Path
from typing import Any

import yaml

from mocker.speculation.acceptance import check_rates, rates_of_curve

MOST_DRAFTS = 1024
"""More than any engine verifies in a step."""
DRAFTS = "vllm:spec_decode_num_drafts_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
_OURS = re.compile(r"^\w+_component_(?=spec_decode_)")
"""How our frontend's names of the same metrics begin; NVIDIA Dynamo's prefix may be another."""


def read_rates(path: str, num_drafts: int, mode: str) -> tuple[float, ...]:
    """Return the rates by position of `num_drafts` drafts; `mode` chooses a curve of a golden file.

    Raises:
        ValueError: the file cannot be read, or does not say it for so many drafts.
    """
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"acceptance_file {path} cannot be read: {error}") from None
    try:
        return _rates(Path(path).suffix, text, num_drafts, mode)
    except RecursionError:
        raise ValueError(f"acceptance_file {path}: it is nested too deep") from None
    except ValueError as error:
        raise ValueError(f"acceptance_file {path}: {error}") from None


def _rates(suffix: str, text: str, num_drafts: int, mode: str) -> tuple[float, ...]:
    if suffix in (".yaml", ".yml"):
        return rates_of_curve(_curve(text, mode), num_drafts)
    rates = _listed(text) if suffix == ".json" else _counted(text)
    check_rates(rates)
    if len(rates) < num_drafts:
        raise ValueError(f"it has rates of {len(rates)} drafts, and num_speculative_tokens is {num_drafts}")
    return tuple(rates[:num_drafts])


def _curve(text: str, mode: str) -> dict[int, float]:
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"it is not YAML: {str(error).splitlines()[0]}") from None
    models = {name: part for name, part in found.items() if name != "_metadata"} if isinstance(found, dict) else {}
    if len(models) != 1:
        raise ValueError(f"it has {len(models)} models; expected one, with lengths by mode and number of drafts")
    (modes,) = models.values()
    if not isinstance(modes, dict) or not isinstance(modes.get(mode), dict):
        known = ", ".join(map(str, modes)) if isinstance(modes, dict) else "no mode"
        raise ValueError(f"it has no lengths for acceptance_mode {mode}; it has {known}")
    return {_whole(count): _number(length) for count, length in modes[mode].items()}


def _listed(text: str) -> list[float]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error}") from None
    if not isinstance(found, list):
        raise ValueError("expected a list of rates by position, such as [0.8, 0.5]")
    return [_number(rate) for rate in found]


def _counted(text: str) -> list[float]:
    """Return the rates from a server's counters, all its engines together."""
    from prometheus_client.parser import text_string_to_metric_families  # it loads a web server

    drafts, accepted = 0.0, dict[int, float]()
    try:
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        for sample in samples:
            name = _OURS.sub("vllm:", sample.name)
            if name == DRAFTS:
                drafts += sample.value
            elif name == ACCEPTED:
                place = int(sample.labels["position"])
                if not 0 <= place < MOST_DRAFTS:
                    raise ValueError(f"position {place}")
                accepted[place] = accepted.get(place, 0.0) + sample.value
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"it is not the metrics of a server ({error}); expected samples of {ACCEPTED} by position"
        ) from None
    if not drafts or not accepted:
        raise ValueError(f"it has no {DRAFTS} and {ACCEPTED}; expected those of a vLLM server that has speculated")
    return [accepted.get(place, 0.0) / drafts for place in range(max(accepted) + 1)]


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{value!r} is not a number of drafts")
    return value


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{repr(value)[:40]} is not a number") from None
