"""Fit what sampling adds to picking the most probable token (mocker/timing/sampling.py) to measured kernels.

    python benchmarks/fit_sampling.py        # reads benchmarks/measured/gpu_sampling.csv

A step's sampling takes `launch_s` and a time for every logit, that is for each sequence and entry of the vocabulary. Of
each kind of sampling, every second row is fitted, by relative errors, and the others are held out. H100 and H200 take
about the same time, although their bandwidths differ by 43%, so they are fitted together.
"""

from pathlib import Path

import numpy as np
import pandas as pd
from scipy.optimize import nnls

MEASURED = Path(__file__).with_name("measured") / "gpu_sampling.csv"
KEYS = ["gpu", "vocabulary", "sequences"]


def extra_of(table: pd.DataFrame, kind: str) -> pd.DataFrame:
    """Return the number of logits and the time that a kind of sampling adds (s)."""
    greedy = table[table.kind == "greedy"].set_index(KEYS).ms
    rows = table[table.kind == kind].set_index(KEYS)
    found = pd.DataFrame({"extra_s": (rows.ms - greedy) / 1e3}).reset_index()
    return found.assign(logits=found.vocabulary * found.sequences)


def main() -> None:
    """Print coefficients and held-out errors."""
    table = pd.read_csv(MEASURED)
    print("kind          launch (us)   a logit (ps)   held-out error: mean, median (%)")
    for kind in ("temperature", "top_k", "top_p", "penalties"):
        rows = extra_of(table, kind)
        design = np.column_stack([np.ones(len(rows)), rows.logits]) / rows.extra_s.to_numpy()[:, None]
        launch_s, logit_s = nnls(design[::2] * (1.0, 1e6), np.ones(len(rows[::2])))[0] * (1.0, 1e6)
        held_out = np.abs(design[1::2] @ (launch_s, logit_s) - 1) * 100
        print(f"{kind:14}{launch_s * 1e6:8.0f}{logit_s * 1e12:14.0f}{held_out.mean():17.1f} {np.median(held_out):.1f}")


if __name__ == "__main__":
    main()
