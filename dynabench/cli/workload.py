"""`dynabench workload`: inspect, generate and change workloads."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import App, Parameter

from dynabench.cli.groups import plain_errors
from dynabench.experiment.workload_file import read_workload, write_workload
from dynabench.terminal import Terminal
from foundation.files import new_file
from mocker.models.kv_cache import bytes_per_token
from mocker.timing.config import KvCacheDtype, TimingConfig
from serving.cli.command_line import flat
from serving.cli.help import HELP_FLAGS
from workloads import Workload, WorkloadError, formats
from workloads.anonymise import anonymise as anonymised
from workloads.describe import Description, advice, best_shares, describe_workload, lengths_of
from workloads.fit import fit_workload as fit_to
from workloads.fit import make_workload, read_spec
from workloads.merge import merge_workloads as merged_from
from workloads.shape import ShapeConfig, shape
from workloads.synthesize import SynthConfig, synthesize

workload_app = App(
    help_format="markdown",
    name="workload",
    help="Inspect, generate, change and convert workloads.",
    help_flags=HELP_FLAGS,
)


LABELS = {
    "duration_s": "duration (s)",
    "rate": "rate (requests/s)",
    "isl": "isl (tokens)",
    "osl": "osl (tokens)",
    "ends": "answers end by",
    "priorities": "requests by priority",
    "extra_body": "requests by body field",
    "adapters": "requests by adapter",
    "media": "images and other media",
    "endless_cache_hit_share": "unlimited cache hit share",
    "endless_cache_mean_share": "unlimited cache mean share",
    "best_hit_shares": "best share by cache size",
    "kv_bytes_per_token": "KV of a token (bytes)",
}
"""Labels of figures whose names lack a unit, or say too little."""
MOST = 20
"""The most parts of a figure that are printed; JSON has all."""


@workload_app.command
def inspect(
    files: tuple[Path, ...],
    /,
    *,
    format: str | None = None,
    columns: str | None = None,
    trace_block_size: int | None = None,
    tokenizer: str | None = None,
    max_requests: int | None = None,
    model: str | None = None,
    kv_cache_dtype: KvCacheDtype = "auto",
    json_output: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> None:
    """Print what a workload is like.

    Args:
        files: Files or a folder that form one workload.
        format: Their format (default: detected).
        columns: Columns of a CSV, JSONL or Parquet log, as in arrival=ts,input=prompt_tokens,output=completion_tokens.
        trace_block_size: Tokens per hash id (default: the format's).
        tokenizer: Folder, file or Hugging Face id of a model, to count the tokens of texts (default: estimated).
        max_requests: Read only the first N requests.
        model: Hugging Face id of a model, or a folder with its config.json, to also print cache sizes in GiB.
        kv_cache_dtype: Type of the KV cache (auto: what the model asks for, else bfloat16).
        json_output: Print JSON.
    """
    workload = read_workload(files, format=format, columns=columns, block_size=trace_block_size, tokenizer=tokenizer)
    with plain_errors():
        if max_requests is not None:
            workload = shape(workload, ShapeConfig(max_requests=max_requests))
        timing = TimingConfig(model=model, kv_cache_dtype=kv_cache_dtype)
        token_bytes = None if model is None else bytes_per_token(timing.shape, timing.kv_dtype)
    facts: dict[str, Any] = dataclasses.asdict(describe_workload(workload)) | {"best_hit_shares": best_shares(workload)}
    if model is not None:
        facts["kv_bytes_per_token"] = token_bytes
    hints = advice(workload)
    if json_output:
        print(msgspec.json.encode(facts | {"notes": workload.notes, "advice": hints}).decode())  # NaN becomes null
        return
    console = Terminal()
    for name, value in (facts | {"notes": "; ".join(workload.notes) or "-"}).items():
        label = LABELS.get(name, name.replace("_", " "))
        if name == "best_hit_shares" and value is not None:
            text = "  ".join(f"{_cache(size, token_bytes)} {share:.1%}" for size, share in value.items())
        elif value == {}:
            continue
        elif isinstance(value, dict):
            text = "  ".join(f"{key} {number:,.0f}" for key, number in list(value.items())[:MOST])
            text += f"  and {len(value) - MOST:,} more" * (len(value) > MOST)
        elif value is None:
            text = "unknown"
        elif "share" in name:
            text = f"{value:.1%}"
        else:
            text = f"{value:,.2f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value
        console.entry(label, str(text), width=26)
    for hint in hints:
        console.say(hint)


def _cache(tokens: int, token_bytes: float | None) -> str:
    """Format the size of a cache."""
    gib = tokens * (token_bytes or 0.0) / (1 << 30)
    size = f"{gib:,.0f}" if gib >= 100 else f"{gib:.3g}"
    return f"{tokens >> 10:,}k tokens{f' ({size} GiB)' * (gib > 0)}"


@workload_app.command(name="formats")
def formats_() -> None:
    """List the workload formats, and the public data that each was tried on."""
    console = Terminal()
    for name, format in formats.FORMATS.items():
        console.entry(f"{name:18} {'read, write' if format.write else 'read'}", format.description, width=31)
        console.entry("", format.tried, width=31)


@workload_app.command
def convert(
    paths: tuple[Path, ...],
    /,
    *,
    out: Path | None = None,
    to: str = formats.DEFAULT,
    format: str | None = None,
    columns: str | None = None,
    trace_block_size: int | None = None,
    tokenizer: str | None = None,
    seed: int = 0,
    anonymise: Annotated[bool, Parameter(negative=())] = False,
    lossy: Annotated[bool, Parameter(negative=())] = False,
    shape_config: Annotated[ShapeConfig, flat("Changes", 1)] = ShapeConfig(),  # noqa: B008 (frozen)
) -> None:
    """Write a workload in another format, optionally cut, thinned, scaled or anonymised; shared prefixes stay shared.

    Args:
        paths: Files or a folder that form one workload, then the file to write (.gz: compressed), which must not exist.
        out: The file to write; then all paths are read.
        to: Format to write (default: dynabench's own, which loses nothing).
        format: Format of the workload (default: detected).
        columns: Columns of a CSV, JSONL or Parquet log, as in arrival=ts,input=prompt_tokens,output=completion_tokens.
        trace_block_size: Tokens per hash id (default: the format's).
        tokenizer: Folder, file or Hugging Face id of a model, to count the tokens of texts (default: estimated).
        seed: Seed of random choices.
        anonymise: Keep only lengths, times and sharing.
        lossy: Write it even if the format loses something.
        shape_config: What to change.
    """
    files, out = _to_write(paths, out)
    formats.check_name(out, to)
    before = read_workload(files, format=format, columns=columns, block_size=trace_block_size, tokenizer=tokenizer)
    after = shape(before, shape_config, seed=seed)
    if anonymise:
        after = anonymised(after)
    lost = formats.lost(after, to)
    if lost and not lossy:
        raise WorkloadError(
            f"{to} would lose {', '.join(lost)} of {before.name}; "
            f"leave out --to, choose another format, or accept it with --lossy"
        )
    write_workload(after, out, to)
    if lost:
        after = read_workload([out], format=to, block_size=trace_block_size, tokenizer=tokenizer)
    if before.notes:
        Terminal().entry("notes", "; ".join(before.notes), width=26)
    _print_sharing(describe_workload(before), describe_workload(after), out, lost)


@workload_app.command
def merge(
    paths: tuple[Path, ...],
    /,
    *,
    out: Path | None = None,
    format: str | None = None,
    columns: str | None = None,
    shared: Annotated[bool, Parameter(negative=())] = False,
    to: str = formats.DEFAULT,
) -> None:
    """Merge workloads by overlaying them in time.

    Args:
        paths: Workloads, each a file or a folder, then the file to write (.gz: compressed), which must not exist.
        out: The file to write; then all paths are read.
        format: Format of all of them (default: each is detected).
        columns: Columns of a log, instead of a format.
        shared: Treat equal ids as equal blocks (parts of one trace); otherwise the workloads share nothing.
        to: Format to write (default: dynabench's own, which loses nothing).
    """
    files, out = _to_write(paths, out)
    formats.check_name(out, to)
    parts = [read_workload([file], format=format, columns=columns) for file in files]
    merged = merged_from(parts, is_shared=shared)
    if lost := formats.lost(merged, to):
        raise WorkloadError(f"{to} would lose {', '.join(lost)}; leave out --to, or choose another format")
    write_workload(merged, out, to)
    for file, part in zip(files, parts, strict=True):
        print(f"{file}: {len(part):,} requests, hit share in an unlimited cache {_hit_share(describe_workload(part))}")
    print(f"{out}: {len(merged):,} requests, {_hit_share(describe_workload(merged))}")


@workload_app.command
def synth(
    out: Path,
    /,
    *,
    spec: Path | None = None,
    to: str = formats.DEFAULT,
    config: Annotated[SynthConfig, flat("Synthesizer", 1)] = SynthConfig(),  # noqa: B008 (frozen)
) -> None:
    """Generate a synthetic workload, from settings or from a spec that `fit` wrote.

    Args:
        out: The file to write (.jsonl or .jsonl.gz); it must not exist.
        spec: A spec that `dynabench workload fit` wrote; then only --requests and --seed apply.
        to: Format to write (default: dynabench's own, which loses nothing).
        config: Settings of the workload.
    """
    formats.check_name(out, to)
    if spec is None:
        workload = Workload(out.name, config.block_size, synthesize(config))
    else:
        try:
            text = spec.read_bytes()
        except OSError as error:
            raise WorkloadError(f"{spec}: cannot be read ({error.strerror})") from error
        known = read_spec(text, str(spec))
        count = config.requests if config.requests != SynthConfig().requests else None
        requests = make_workload(known, requests=count, seed=config.seed)
        workload = Workload(out.name, known.block_size, requests, knows_prefixes=known.knows_prefixes)
    if lost := formats.lost(workload, to):
        raise WorkloadError(f"{to} would lose {', '.join(lost)}; leave out --to, or choose another format")
    write_workload(workload, out, to)
    console = Terminal()
    console.item(f"{out}: {len(workload):,} requests; {lengths_of(workload)}")
    if spec is None and config.prefix_blocks:
        prefix = config.prefix_blocks * config.block_size
        console.say(
            f"each prompt begins with one of {config.prefix_groups} shared prefixes of {prefix:,} tokens, on top of --isl"
        )


@workload_app.command
def fit(
    paths: tuple[Path, ...],
    /,
    *,
    out: Path | None = None,
    format: str | None = None,
    columns: str | None = None,
    trace_block_size: int | None = None,
) -> None:
    """Describe a workload by distributions only, as a spec that can be shared and from which `synth --spec` generates a similar one.

    Args:
        paths: Files or a folder that form one workload, then the spec to write (.json), which must not exist.
        out: The spec to write; then all paths are read.
        format: Format of the workload (default: detected).
        columns: Columns of a CSV, JSONL or Parquet log, as in arrival=ts,input=prompt_tokens,output=completion_tokens.
        trace_block_size: Tokens per hash id (default: the format's).
    """
    files, out = _to_write(paths, out)
    workload = read_workload(files, format=format, columns=columns, block_size=trace_block_size)
    spec = fit_to(workload)
    with new_file(out) as file:
        file.write(msgspec.json.format(msgspec.json.encode(spec), indent=1) + b"\n")
    like = Workload("", spec.block_size, make_workload(spec), knows_prefixes=spec.knows_prefixes)
    _print_sharing(describe_workload(workload), describe_workload(like), out, [])


def _to_write(paths: tuple[Path, ...], out: Path | None) -> tuple[tuple[Path, ...], Path]:
    """Return the paths to read and the one to write: the last, unless it is named.

    Raises:
        WorkloadError: one of them is missing, or the one to write exists.
    """
    files, file = (paths, out) if out is not None else (paths[:-1], paths[-1] if paths else Path())
    if not files:
        raise WorkloadError(f"{' '.join(map(str, paths))}: expected a workload and then the file to write")
    if file.exists():
        raise WorkloadError(
            f"{file} exists; choose another file or remove it (without --out, the last path is written)"
        )
    return files, file


def _hit_share(described: Description) -> str:
    share = described.endless_cache_hit_share
    return "unknown" if share is None else f"{share:.1%}"


def _print_sharing(before: Description, after: Description, out: Path, lost: list[str]) -> None:
    rows = (
        ("requests", f"{before.requests:,}", f"{after.requests:,}"),
        ("rate (1/s)", f"{before.rate:.2f}", f"{after.rate:.2f}"),
        ("ISL mean", f"{before.isl['mean']:,.0f}", f"{after.isl['mean']:,.0f}"),
        ("OSL mean", f"{before.osl['mean']:,.0f}", f"{after.osl['mean']:,.0f}"),
        ("hit share, unlimited cache", _hit_share(before), _hit_share(after)),
    )
    for label, old, new in rows:
        print(f"{label:26} {old:>12} -> {new}")
    if lost:
        print(f"left out: {', '.join(lost)}")
    print(out)
