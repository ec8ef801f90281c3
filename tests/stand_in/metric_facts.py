"""What a scrape shows beside its values: families, types, labels and buckets."""

import json
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

RECORD = Path(__file__).with_name("vllm_metrics.json")

FREE = ("vllm:cache_config_info", "vllm:lora_requests_info")
"""Families whose labels say what is so: their values are not facts about the server."""

EVERYWHERE = ("model_name", "engine", "le")


def facts(text):
    """Return each family's type, names of labels, values of the labels that are its own, and buckets."""
    return {family.name: fact(family) for family in text_string_to_metric_families(text)}


def fact(family):
    labels = [sample.labels for sample in family.samples]
    found = {"type": family.type, "labels": sorted({name for each in labels for name in each})}
    own = {tuple(sorted((k, v) for k, v in each.items() if k not in EVERYWHERE)) for each in labels}
    if not family.name.startswith(("python_", *FREE)) and own - {()}:
        found["series"] = sorted(",".join(f"{name}={value}" for name, value in each) for each in own)
    bounds = list(dict.fromkeys(each["le"] for each in labels if "le" in each))
    return found | ({"buckets": bounds} if bounds else {})


def values(text):
    """Return the values of vLLM's own families: by the sample's name and labels, without times and creation times."""
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        if family.name.startswith("vllm:") and not family.name.endswith("_created") and family.name not in FREE
        for sample in family.samples
    }


def recorded(settings):
    """Return the facts of a real server with these settings; the record has how they differ from the default ones."""
    record = json.loads(RECORD.read_text())
    found = record["default"] | record[settings]
    return {family: fact for family, fact in found.items() if fact is not None}


def record(of_settings):
    """Write the facts of real servers by their settings; `default` must be among them."""
    default = of_settings["default"]
    lines = []
    for settings, found in of_settings.items():
        if settings != "default":
            found = dict.fromkeys(set(default) - set(found)) | {f: x for f, x in found.items() if x != default.get(f)}
        each = ",\n".join(f"  {json.dumps(f)}: {json.dumps(found[f], sort_keys=True)}" for f in sorted(found))
        lines.append(f" {json.dumps(settings)}: {{\n{each}\n }}")
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")
