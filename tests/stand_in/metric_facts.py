"""What a scrape shows beside its values: families, types, labels and buckets."""

from prometheus_client.parser import text_string_to_metric_families

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
