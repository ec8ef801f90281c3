"""Which published points chose the constants of mocker/timing/data/engines.json, so that the others can judge them."""

from hashlib import md5
from typing import Any

import pandas as pd
from recipes import has_launches

ARCHITECTURES = {"hopper": ("h100", "h200"), "blackwell": ("b200",)}
KINDS = ["model_path", "gpu", "precision"]
LAYOUT = ["isl", "osl", "concurrency", "tp_size", "attention_dp_size", "moe_ep_size"]
MOST_OF_A_KIND = 40
MOST_MIXTURES = 8
SHORT = 1024
"""Prompts whose steps take about as long as launching them."""
MOST_AT_A_TIME = 32
"""With more requests, those of NVIDIA's sweeps wait for what is in front of the engine."""


def is_dense(table: pd.DataFrame) -> pd.Series:
    """Return which points are of models without experts."""
    return table.model_path.str.contains("Llama")


def chosen(table: pd.DataFrame, backend: str, architecture: str) -> pd.DataFrame:
    """Return the points of a backend whose every second one is fitted, in order.

    vLLM's are all dense ones. Of the others, they are at most 40 of each model, GPU and precision, of dense models if
    there are any.
    """
    table = table[table.gpu.isin(ARCHITECTURES[architecture]) & (table.backend == backend) & ~table.drafts]
    if backend == "vllm":
        return table[is_dense(table)]
    table = table[is_dense(table)] if is_dense(table).any() else table
    table = table[table.concurrency <= MOST_AT_A_TIME]
    return table.sample(frac=1, random_state=0).groupby(KINDS, dropna=False).head(MOST_OF_A_KIND)


def mixtures(table: pd.DataFrame, backend: str, architecture: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the mixtures whose TTFT chose what launching kernels takes, and those that judge it.

    At most MOST_MIXTURES points of half of the configurations of each model, GPU and precision, which launch short prompts
    without CUDA graphs, with at most MOST_AT_A_TIME requests at a time; and all points of the other half. NVIDIA's sweeps
    do not say how they were run. SGLang's mixtures are in `chosen`.
    """
    table = table[table.gpu.isin(ARCHITECTURES[architecture]) & (table.backend == backend) & ~table.drafts]
    table = table[~is_dense(table)]
    names = table[["backend", *KINDS, *LAYOUT]].astype(str).agg("|".join, axis=1)
    is_first = pd.Series(False, index=table.index)
    for _, rows_of in names.groupby([table[name] for name in KINDS]):
        first = sorted(rows_of.unique(), key=lambda name: md5(name.encode()).hexdigest())[::2]
        is_first |= names.isin(first)
    is_short = (table.isl <= SHORT) & (table.concurrency <= MOST_AT_A_TIME)
    is_launched = pd.Series([has_launches(point) for point in table.itertuples()], index=table.index, dtype=bool)
    fitted = table[is_first & is_short & is_launched]
    return fitted.sample(frac=1, random_state=0).groupby(KINDS).head(MOST_MIXTURES), table[~is_first]


def split_of(table: pd.DataFrame) -> pd.Series:
    """Return what each point was used for: `fitted`, `other half`, or `other`."""
    found = pd.Series("other", index=table.index)
    for architecture in ARCHITECTURES:
        for backend in ("vllm", "trtllm", "sglang"):
            points = chosen(table, backend, architecture).index
            found[points[::2]], found[points[1::2]] = "fitted", "other half"
        for backend in ("vllm", "trtllm"):
            first, second = mixtures(table, backend, architecture)
            found[first.index], found[second.index] = "fitted", "other half"
    return found


def rows(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Return points in a form that can be sent to other processes."""
    return [{str(key): value for key, value in row.items()} for row in table.to_dict("records")]
