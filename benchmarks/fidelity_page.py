"""Write the tables of docs/fidelity.md, and draw its pictures, from the files of predictions. Nothing is simulated.

    python benchmarks/fidelity_page.py

The files are dynabench/experiment/published_points.csv (fidelity_points.py writes it) and benchmarks/measured/blis_runs.csv
(blis_runs.py). Each table replaces what is between its markers, `<!-- table: NAME -->` and `<!-- end -->`. A picture says
in its description which figures it shows.
"""

import hashlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import blis_runs
import pandas as pd
from fidelity_points import KEYS, add_errors, gpus_of, points_in
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter
from splits import is_dense

from reports.key import MARKERS, PALETTE

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "fidelity.md"
POINTS = ROOT / "dynabench" / "experiment" / "published_points.csv"
ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "trtllm": "TensorRT-LLM"}
GPUS = ("h100", "h200", "b200")
KINDS = ("dense", "mixture")
SIMULATORS = {
    "dynabench": "**dynabench**",
    "blis": "BLIS, trained-physics",
    "blis_roofline": "BLIS, roofline",
    "llmservingsim": "LLMServingSim 1.1",
    "vidur": "Vidur",
    "aiconfigurator": "AIConfigurator 0.9",
    "llm_optimizer": "llm-optimizer",
}
MOST_KINDS = 12
"""How many kinds of points the table of the worst has."""


class Case(NamedTuple):
    """A row of the first table."""

    names: tuple[str, str, str]
    """Engine, GPU and model."""
    number: str
    """How many points it has."""
    ttft: pd.Series
    """Errors (%)."""
    tpot: pd.Series

    @property
    def worst(self) -> float:
        """The larger mean absolute error (%)."""
        return float(max(self.ttft.abs().mean(), self.tpot.abs().mean()))


def points() -> pd.DataFrame:
    """Return the published points that are predicted, with errors (%)."""
    table = points_in(POINTS)
    table = table[table.problem == ""].copy()
    add_errors(table)
    table["kind"] = is_dense(table).map({True: "dense", False: "mixture"})
    table["worst"] = table[["ttft_error", "tpot_error"]].abs().max(axis=1)
    return table


def runs() -> pd.DataFrame:
    """Return BLIS's runs, those where we lose first."""
    return blis_runs.worst_first(pd.read_csv(blis_runs.FILE))


def slashed(values: Iterable[float], form: str = ",.1f") -> str:
    """Return several figures in one cell."""
    return " / ".join(format(value, form) for value in values)


def off(errors: pd.Series) -> str:
    """Return mean and median absolute error and the mean error (%)."""
    return f"{slashed([errors.abs().mean(), errors.abs().median()])} / {errors.mean():+.1f}"


def short(model: str) -> str:
    """Return the name of a model without its publisher's."""
    return re.sub("-Instruct|-hf|-v0.1", "", model.rpartition("/")[2])


# Tables


def markdown(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table in Markdown."""
    names = list(head)
    return "\n".join(f"| {' | '.join(line)} |" for line in [names, ["---"] * len(names), *rows])


def errors_by_case() -> str:
    """Return how far off each engine, GPU and model is, the worst first."""
    table, every = points(), runs()
    cases = [
        Case(
            (ENGINES[engine], gpu.upper(), f"{short(model)} {', '.join(sorted(set(part.precision))) or 'bf16'}"),
            f"{len(part)} ({(part.split == 'fitted').sum()})",
            part.ttft_error,
            part.tpot_error,
        )
        for (engine, gpu, model), part in table.groupby(["backend", "gpu", "model_path"])
    ]
    for (gpu, is_mixture), part in every.groupby(["gpu", every.model.str.contains("Mixtral")]):
        errors = blis_runs.errors(part, blis_runs.OURS)
        models = "Mixtral-8x7B, 8x22B" if is_mixture else ", ".join(sorted({short(model) for model in part.model}))
        cases.append(Case(("vLLM 0.15", gpu.upper(), f"{models} bf16"), f"{len(part)} runs", errors.ttft, errors.itl))
    number = f"{len(table):,} ({(table.split == 'fitted').sum()})"
    rows = sorted(cases, key=lambda case: -case.worst)
    rows.append(Case(("**all points**", "", ""), number, table.ttft_error, table.tpot_error))
    return markdown(
        ["engine", "GPU", "model, weights", "points (fitted)", "TTFT off by (%)", "TPOT off by (%)"],
        [[*case.names, case.number, off(case.ttft), off(case.tpot)] for case in rows],
    )


def worst_kinds() -> str:
    """Return the kinds of points that are predicted worst, and the worst point of each."""
    rows = []
    for key, part in sorted(points().groupby(KEYS), key=lambda kind: -kind[1].worst.mean())[:MOST_KINDS]:
        point = part.loc[part.worst.idxmax()]
        rows.append(
            [
                " ".join(key),
                f"{point.isl}/{point.osl}, {point.concurrency:.0f} at a time, {gpus_of(point)}",
                f"{point.silicon_ttft_ms:,.0f}, {point.silicon_tpot_ms:.1f}",
                f"{point.ttft:,.0f} ({point.ttft_error:+.0f}%), {point.tpot:.1f} ({point.tpot_error:+.0f}%)",
            ]
        )
    return markdown(["kind", "its worst point", "measured TTFT, TPOT (ms)", "predicted (ms)"], rows)


def simulators() -> str:
    """Return how far off each simulator is on BLIS's runs."""
    table, rows = runs(), []
    for who, name in SIMULATORS.items():
        errors = blis_runs.errors(table, who).abs().dropna()
        ours = blis_runs.errors(table.loc[errors.index], blis_runs.OURS).abs()
        rows.append([name, str(len(errors)), slashed(errors.mean()), slashed(errors.median()), slashed(ours.mean())])
    return markdown(
        ["simulator", "runs", "TTFT / ITL / E2E off by, mean (%)", "median", "ours on these runs, mean"], rows
    )


def each_run() -> str:
    """Return BLIS's runs one by one."""
    table = runs()
    of = {who: blis_runs.errors(table, who) for who in SIMULATORS}
    means = pd.DataFrame({who: errors.abs().mean(axis=1) for who, errors in of.items()})
    best = means.drop(columns=blis_runs.OURS).idxmin(axis=1)
    rows = [
        [
            f"{run.run}: {short(run.model)}, {run.tp} {run.gpu.upper()}",
            f"{run.workload}, {run.max_num_batched_tokens}",
            f"{slashed([run.real_ttft, run.real_itl])} / {run.real_e2e:,.0f}",
            slashed(of[blis_runs.OURS].loc[place], "+,.0f"),
            slashed(of[best[place]].loc[place], "+,.0f") + f" ({SIMULATORS[best[place]]})" * (best[place] != "blis"),
        ]
        for place, run in zip(table.index, table.itertuples(), strict=True)
    ]
    head = [
        "run",
        "workload, tokens a step",
        "measured TTFT / ITL / E2E (ms)",
        "ours off by (%)",
        "best of the others (%)",
    ]
    return markdown(head, rows)


TABLES: dict[str, Callable[[], str]] = {
    "errors": errors_by_case,
    "worst": worst_kinds,
    "simulators": simulators,
    "runs": each_run,
}


def fill(page: str) -> str:
    """Return the page with the tables of the files."""
    for name, write in TABLES.items():
        found = write()
        pattern = rf"(<!-- table: {name} -->\n).*?(<!-- end -->)"
        page, count = re.subn(
            pattern, lambda match, found=found: f"{match[1]}\n{found}\n\n{match[2]}", page, flags=re.DOTALL
        )
        if count != 1:
            sys.exit(f"the page has {count} places for the table {name!r}; expected one")
    return page


# Pictures


def pictures() -> Iterator[tuple[Path, pd.DataFrame, str]]:
    """Return where the picture of each engine is, what it shows, and its description."""
    table = points()
    for engine in ENGINES:
        part = table[table.backend == engine]
        shown = part[["gpu", "kind", "silicon_ttft_ms", "ttft", "silicon_tpot_ms", "tpot"]]
        digest = hashlib.sha256(shown.to_csv(index=False).encode()).hexdigest()[:16]
        yield PAGE.with_name(f"fidelity-{engine}.png"), part, f"figures {digest}"


def draw(engine: str, table: pd.DataFrame, out: Path, description: str) -> None:
    """Draw predicted over measured TTFT and TPOT of an engine, with bands of 10%."""
    figure, panels = plt.subplots(1, 2, figsize=(9, 4.2))
    for axes, metric in zip(panels, ("ttft", "tpot"), strict=True):
        scatter(axes, table, metric)
    panels[0].legend(fontsize=8, loc="upper left")
    figure.suptitle(f"{engine}: {len(table):,} published points", fontsize=11)
    figure.tight_layout()
    figure.savefig(out, dpi=90, metadata={"Description": description}, pil_kwargs={"optimize": True})
    plt.close(figure)


def scatter(axes: Axes, table: pd.DataFrame, metric: str) -> None:
    """Draw the points of a metric: colours are GPUs, marks are kinds of models."""
    measured, predicted = table[f"silicon_{metric}_ms"], table[metric]
    edges = [min(measured.min(), predicted.min()) * 0.8, max(measured.max(), predicted.max()) * 1.2]
    axes.fill_between(edges, [edge * 0.9 for edge in edges], [edge * 1.1 for edge in edges], color="0.85", lw=0)
    for place, gpu in enumerate(GPUS):
        for mark, kind in zip(MARKERS, KINDS, strict=False):
            part = table[(table.gpu == gpu) & (table.kind == kind)]
            if len(part):
                look = {"color": PALETTE[place][0], "markersize": 3.5, "alpha": 0.6, "markeredgewidth": 0}
                label = f"{gpu.upper()}, {kind}"
                axes.plot(part[f"silicon_{metric}_ms"], part[metric], mark, label=label, **look)
    axes.set(
        xscale="log", yscale="log", xlabel="measured (ms)", ylabel="predicted (ms)", title=f"mean {metric.upper()}"
    )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_formatter(NullFormatter())


def main() -> None:
    """Write the tables and draw the pictures."""
    PAGE.write_text(fill(PAGE.read_text()))
    for (path, table, description), engine in zip(pictures(), ENGINES.values(), strict=True):
        draw(engine, table, path, description)


if __name__ == "__main__":
    main()
