"""Which published points chose the constants of mocker/timing/data/engines.json, so that the others can judge them."""

from typing import Any

import pandas as pd

ARCHITECTURES = {"hopper": ("h100", "h200"), "blackwell": ("b200",)}
KINDS = ["model_path", "gpu", "precision"]
MOST_OF_A_KIND = 40
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


def split_of(table: pd.DataFrame) -> pd.Series:
    """Return what each point was used for: `fitted`, `other half`, or `other`."""
    found = pd.Series("other", index=table.index)
    for architecture in ARCHITECTURES:
        for backend in ("vllm", "trtllm", "sglang"):
            points = chosen(table, backend, architecture).index
            found[points[::2]], found[points[1::2]] = "fitted", "other half"
    return found


def rows(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Return points in a form that can be sent to other processes."""
    return [{str(key): value for key, value in row.items()} for row in table.to_dict("records")]
