"""`dynabench workload`: look at workloads, make them, change them."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import App, Parameter

from dynabench.experiment.workload_file import read_workload, write_workload
from dynabench.terminal import Terminal
from foundation.files import new_file
from serving.cli.command_line import flat
from workloads import Workload, WorkloadError, formats
from workloads.anonymise import anonymise as anonymised
from workloads.describe import Description, advice, describe
from workloads.fit import fit as fit_to
from workloads.fit import make, read_spec
from workloads.merge import merge as merged_from
from workloads.shape import ShapeConfig, shape
from workloads.synthesize import SynthConfig, synthesize

workload_app = App(
    help_format="markdown", name="workload", help="Look at workloads, make them, change and convert them."
)


LABELS = {
    "duration_s": "duration (s)",
    "rate": "rate (requests/s)",
    "isl": "isl (tokens)",
    "osl": "osl (tokens)",
    "ends": "answers end by",
}
"""Labels of figures whose names say no unit, or too little."""


@workload_app.command
def inspect(
    files: tuple[Path, ...],
    /,
    *,
    format: str | None = None,
    trace_block_size: int | None = None,
    tokenizer: str | None = None,
    json_output: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> None:
    """Print what a workload is like.

    Args:
        files: files or a folder that are one workload.
        format: their format (default: detected).
        trace_block_size: tokens each hash id stands for (default: the format's).
        tokenizer: folder, file or Hugging Face id of a model, to count the tokens of texts (default: estimated).
        json_output: print JSON.
    """
    workload = read_workload(files, format=format, block_size=trace_block_size, tokenizer=tokenizer)
    facts: dict[str, Any] = dataclasses.asdict(describe(workload))
    hints = advice(workload)
    if json_output:
        print(
            msgspec.json.encode(facts | {"notes": workload.notes, "advice": hints}).decode()
        )  # what is no number is null
        return
    console = Terminal()
    for name, value in (facts | {"notes": "; ".join(workload.notes) or "-"}).items():
        label = LABELS.get(name, name.replace("_", " "))
        if isinstance(value, dict):
            text = "  ".join(f"{key} {number:,.0f}" for key, number in value.items())
        elif "share" in name:
            text = f"{value:.1%}"
        else:
            text = f"{value:,.2f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value
        console.print(f"{label:26} {text}", soft_wrap=True)
    for hint in hints:
        console.print(hint, soft_wrap=True)


@workload_app.command(name="formats")
def formats_() -> None:
    """List the workload formats, and the public data that each was tried on."""
    for name, format in formats.FORMATS.items():
        print(f"{name:18} {'read, write' if format.write else 'read       '}  {format.description}")
        print(f"{'':31} {format.tried}")


@workload_app.command
def convert(
    paths: tuple[Path, ...],
    /,
    *,
    to: str = formats.DEFAULT,
    format: str | None = None,
    trace_block_size: int | None = None,
    tokenizer: str | None = None,
    seed: int = 0,
    anonymise: Annotated[bool, Parameter(negative=())] = False,
    lossy: Annotated[bool, Parameter(negative=())] = False,
    shape_config: Annotated[ShapeConfig, flat("Changes", 1)] = ShapeConfig(),  # noqa: B008 (frozen)
) -> None:
    """Write a workload in another format, perhaps cut, thinned, scaled or anonymised; what prompts share stays shared.

    Args:
        paths: files or a folder that are one workload, and last the file to write (.gz: compressed); it must not exist.
        to: format to write; by default our own, which loses nothing.
        format: format of the workload (default: detected).
        trace_block_size: tokens each hash id stands for (default: the format's).
        tokenizer: folder, file or Hugging Face id of a model, to count the tokens of texts (default: estimated).
        seed: of random choices.
        anonymise: leave lengths, times and sharing, and nothing else.
        lossy: write it even if the format cannot tell everything.
        shape_config: what to change.
    """
    *files, out = _with_last(paths)
    formats.writer(to)
    before = read_workload(files, format=format, block_size=trace_block_size, tokenizer=tokenizer)
    after = shape(before, shape_config, seed=seed)
    if anonymise:
        after = anonymised(after)
    lost = formats.lost(after, to)
    if lost and not lossy:
        raise WorkloadError(
            f"{to} cannot tell {', '.join(lost)} of {before.name}; "
            f"leave out --to, choose another format, or accept it with --lossy"
        )
    write_workload(after, out, to)
    if lost:
        after = read_workload([out], format=to, block_size=trace_block_size, tokenizer=tokenizer)
    _print_sharing(describe(before), describe(after), out, lost)


@workload_app.command
def merge(
    files: list[Path],
    /,
    *,
    out: Path,
    format: str | None = None,
    shared: Annotated[bool, Parameter(negative=())] = False,
    to: str = formats.DEFAULT,
) -> None:
    """Lay workloads over each other in time.

    Args:
        files: workloads, each a file or a folder.
        out: the file to write; it must not exist.
        format: format of all of them (default: that of each is detected).
        shared: equal ids are equal blocks (parts of one trace); otherwise the workloads share nothing.
        to: format to write; by default our own, which loses nothing.
    """
    formats.writer(to)
    parts = [read_workload([file], format=format) for file in files]
    merged = merged_from(parts, is_shared=shared)
    if lost := formats.lost(merged, to):
        raise WorkloadError(f"{to} cannot tell {', '.join(lost)}; leave out --to, or choose another format")
    write_workload(merged, out, to)
    for file, part in zip(files, parts, strict=True):
        print(
            f"{file}: {len(part):,} requests, hit share in an unlimited cache {describe(part).endless_cache_hit_share:.1%}"
        )
    print(f"{out}: {len(merged):,} requests, {describe(merged).endless_cache_hit_share:.1%}")


@workload_app.command
def synth(
    out: Path,
    /,
    *,
    spec: Path | None = None,
    to: str = formats.DEFAULT,
    config: Annotated[SynthConfig, flat("Synthesizer", 1)] = SynthConfig(),  # noqa: B008 (frozen)
) -> None:
    """Write a synthetic workload, from dials or like a trace that `fit` described.

    Args:
        out: the file to write (.jsonl or .jsonl.gz); it must not exist.
        spec: a spec that `dynabench workload fit` wrote; of the dials, --requests and --seed then count.
        to: format to write; by default our own, which loses nothing.
        config: its dials.
    """
    formats.writer(to)
    if spec is None:
        workload = Workload(out.name, config.block_size, synthesize(config))
    else:
        try:
            text = spec.read_bytes()
        except OSError as error:
            raise WorkloadError(f"{spec}: cannot be read ({error.strerror})") from error
        known = read_spec(text, str(spec))
        count = config.requests if config.requests != SynthConfig().requests else None
        workload = Workload(out.name, known.block_size, make(known, requests=count, seed=config.seed))
    if lost := formats.lost(workload, to):
        raise WorkloadError(f"{to} cannot tell {', '.join(lost)}; leave out --to, or choose another format")
    write_workload(workload, out, to)
    print(f"{out}: {len(workload):,} requests")


@workload_app.command
def fit(paths: tuple[Path, ...], /, *, format: str | None = None, trace_block_size: int | None = None) -> None:
    """Describe a workload by distributions only, so that it can be shared and `synth --spec` makes one like it.

    Args:
        paths: files or a folder that are one workload, and last the spec to write (.json); it must not exist.
        format: format of the workload (default: detected).
        trace_block_size: tokens each hash id stands for (default: the format's).
    """
    *files, out = _with_last(paths)
    workload = read_workload(files, format=format, block_size=trace_block_size)
    spec = fit_to(workload)
    with new_file(out) as file:
        file.write(msgspec.json.format(msgspec.json.encode(spec), indent=1) + b"\n")
    like = Workload("", spec.block_size, make(spec))
    _print_sharing(describe(workload), describe(like), out, [])


def _with_last(paths: tuple[Path, ...]) -> tuple[Path, ...]:
    """Return the paths of a workload and, last, of what is written.

    Raises:
        WorkloadError: one of them is missing, or what is written exists.
    """
    if len(paths) < 2:
        raise WorkloadError(f"{' '.join(map(str, paths))}: expected a workload, and last the file to write")
    if paths[-1].exists():
        raise WorkloadError(f"{paths[-1]} exists; name another file, or remove it (the last one named is written)")
    return paths


def _print_sharing(before: Description, after: Description, out: Path, lost: list[str]) -> None:
    rows = (
        ("requests", f"{before.requests:,}", f"{after.requests:,}"),
        ("rate (1/s)", f"{before.rate:.2f}", f"{after.rate:.2f}"),
        ("ISL mean", f"{before.isl['mean']:,.0f}", f"{after.isl['mean']:,.0f}"),
        ("OSL mean", f"{before.osl['mean']:,.0f}", f"{after.osl['mean']:,.0f}"),
        ("hit share, unlimited cache", f"{before.endless_cache_hit_share:.1%}", f"{after.endless_cache_hit_share:.1%}"),
    )
    for label, old, new in rows:
        print(f"{label:26} {old:>12} -> {new}")
    if lost:
        print(f"left out: {', '.join(lost)}")
    print(out)
