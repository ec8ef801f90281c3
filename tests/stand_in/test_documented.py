"""The numbers that docs/stand-ins-compared.md gives are those of the tables that they come from."""

import json
import re
from collections import Counter
from pathlib import Path

from serving.stand_in.vllm.flags.treatment import treatments

PAGE = (Path(__file__).parents[2] / "docs" / "stand-ins-compared.md").read_text()
RECORDED = json.loads((Path(__file__).parent / "vllm_metrics.json").read_text())["default"]


def numbers(pattern):
    (found,) = re.findall(pattern, PAGE)
    return [int(number) for number in found]


def test_flags_are_as_many_as_the_table_has_of_each_treatment():
    kinds = Counter(kind for kind, _ in treatments().values())
    with_gpu = kinds["refused with --gpu"]
    assert numbers(
        r"(\d+) of 0\.32 are known: (\d+) modelled, (\d+) harmless, (\d+) refused with a reason, (\d+) of"
    ) == [
        len(treatments()),
        kinds["modelled"],
        kinds["harmless"],
        kinds["refused"] + with_gpu,
        with_gpu,
    ]


def test_families_of_metrics_are_as_many_as_vllm_shows_without_flags():
    families = [name for name in RECORDED if name.startswith("vllm:")]
    created = [name for name in families if name.endswith("_created")]
    assert numbers(r"(\d+) families with none, of which (\d+) are `_created`") == [len(families), len(created)]
