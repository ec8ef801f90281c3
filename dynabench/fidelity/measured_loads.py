"""What past live runs measured at each load: the requests that were sent, how, and the times of their answers."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import structs

from dynabench.apis import endpoint_of
from dynabench.experiment.source import load_workload
from foundation.errors import UserError
from foundation.text import one_line, printable
from reports import folder
from reports.exports.answers import model_of
from reports.figures.metrics import of_each, share
from reports.record.records import Floats, Ints, Record
from reports.sweep.report import runs_within
from workloads import Request, Workload, WorkloadError
from workloads.pacing import LoadConfig
from workloads.shape import ShapeConfig
from workloads.synthesize import SynthConfig, synthesize

OFF = 0.05
"""Relative difference of prompt lengths beyond which the server's prompts are not the workload's."""
BUNDLED = "bundled"
OWN_BLOCK = 1 << 20
"""Block size at which no two prompts share a block."""


@dataclass(frozen=True, eq=False)
class MeasuredLoad:
    """One run: its workload as it was answered, how it was sent, and the times by request."""

    folder: Path
    name: str
    workload: Workload
    load: LoadConfig
    ttft_s: Floats
    """From sent; NaN for requests that failed or are not measured, like the next field."""
    tpot_s: Floats
    isl: Ints
    in_system: float
    """The mean number of requests in flight."""
    server: str
    """Its address; nothing if it was our own stack."""
    model: str
    """The name that requests asked for; nothing if they named none."""
    hit_share: float | None
    """The share of prompt tokens that the server found in its prefix cache, if it or its answers say so."""
    shares_nothing: bool
    """Whether prompts are taken to share no prefix, because they were not those of the workload."""

    @property
    def count(self) -> int:
        """Requests with a known TTFT."""
        return int((~np.isnan(self.ttft_s)).sum())


def read_loads(folders: tuple[Path, ...]) -> list[MeasuredLoad]:
    """Read the live runs of results folders that are valid, in the order of their loads; name the others on stderr.

    Raises:
        UserError: a folder has no live run, no run is valid, one has no answers, or its workload cannot be read any more.
    """
    each = [path for given in folders for path in runs_within(given)]
    found = [load for path in each for load in _loads_of(path)]
    if each and not found:
        raise UserError(f"{', '.join(map(str, folders))}: no run is valid, so nothing can be fitted")
    return sorted(found, key=lambda load: load.in_system)


def _loads_of(path: Path) -> list[MeasuredLoad]:
    manifest, runs = folder.read(path)
    live = [run for run in runs if run.is_live]
    if not live:
        raise UserError(f"{path} has no live run; expected the folder of dynabench run --url")
    for run in live:
        if run.notes:
            print(
                printable(f"{path}: {run.arm} is left out, because it is not valid: {'; '.join(run.notes)}"),
                file=sys.stderr,
            )
    try:
        return [_load(path, manifest, run) for run in live if not run.notes]
    except (WorkloadError, KeyError, TypeError, msgspec.ValidationError) as error:
        raise UserError(
            f"{path}: its workload cannot be read again ({one_line(str(error))}); files are looked for as they were named then"
        ) from error


def _load(path: Path, manifest: dict[str, Any], run: Record) -> MeasuredLoad:
    changes = manifest["arms"].get(run.arm, {})
    load = _settings(LoadConfig, manifest["load"], changes)
    workload = _workload(manifest, _settings(ShapeConfig, manifest["shape"], changes))
    requests = run.requests
    if len(workload) <= int(requests.request.max(initial=-1)):
        raise WorkloadError(f"{workload.name} has {len(workload)} requests, fewer than the run: it has changed")
    kept = run.measured.requests
    number = kept.request
    times = {name: np.full(len(workload), np.nan) for name in ("ttft", "tpot")}
    for name, values in times.items():
        values[number] = of_each(kept, name)
    if np.isnan(times["ttft"]).all():
        raise UserError(f"{path}: {run.arm} has no answers, so nothing can be fitted to it")
    planned = np.array([request.input_length for request in workload.requests], np.int32)
    isl = planned.copy()
    isl[requests.request] = np.where(requests.isl > 0, requests.isl, planned[requests.request])
    differs = np.abs(isl - planned) > OFF * planned
    shares_nothing = bool(differs.mean() > OFF)
    osl = np.array([request.output_length for request in workload.requests], np.int32)
    osl[requests.request] = np.where(requests.osl > 0, requests.osl, osl[requests.request])
    same = _answered(workload, isl if shares_nothing else planned, osl, shares_nothing=shares_nothing)
    done = requests[requests.succeeded]
    busy_s = float((done.last_token_s - done.sent_s).filled(0).sum())
    span_s = float(done.last_token_s.filled(0).max() - requests.sent_s.filled(np.inf).min())
    name = f"{load.kept} at a time" if load.is_closed else f"{len(done) / max(span_s, 1e-9):.3g} requests/s"
    return MeasuredLoad(
        path,
        f"{path.name}: {name}",
        same,
        load,
        times["ttft"],
        times["tpot"],
        isl,
        busy_s / max(span_s, 1e-9),
        _server(manifest, changes),
        str(changes.get("model_name") or changes.get("model") or model_of(manifest) or ""),
        _hit_share(run),
        shares_nothing,
    )


def _server(manifest: dict[str, Any], changes: dict[str, Any]) -> str:
    url = changes.get("url") or (manifest.get("client") or {}).get("url")
    return endpoint_of(str(url)).base if url else ""


def _hit_share(run: Record) -> float | None:
    said = share(run.requests.cached_tokens, run.requests.isl)
    if said is None and run.server is not None and run.server.looked_up_tokens and run.server.hit_tokens is not None:
        return run.server.hit_tokens / run.server.looked_up_tokens
    return said


def _workload(manifest: dict[str, Any], shape: ShapeConfig) -> Workload:
    named, how = manifest["workload"]["file"], manifest["experiment"]
    if synth := manifest["workload"].get("synth"):
        config = msgspec.convert(synth, SynthConfig)
        return Workload(manifest["workload"]["name"], config.block_size, synthesize(config))
    files = () if named == BUNDLED else tuple(map(Path, named.split(" ")))
    return load_workload(files, how["trace_block_size"], shape, how["seed"], how["format"], how["columns"])


def _settings(kind: type[Any], said: dict[str, Any], changes: dict[str, Any]) -> Any:
    """Return settings of an arm: those of the experiment with what sets it apart."""
    names = said.keys() & changes.keys()
    return msgspec.convert(said | {name: changes[name] for name in names}, kind)


def _answered(workload: Workload, isl: Ints, osl: Ints, *, shares_nothing: bool) -> Workload:
    """Return the workload with the lengths of a run; with prompts of their own, if they were not the workload's."""
    requests: list[Request] = []
    for number, request in enumerate(workload.requests):
        changes: dict[str, Any] = {"output_length": int(osl[number])}
        if shares_nothing:
            changes |= {"input_length": int(isl[number]), "hash_ids": (number,)}
        requests.append(structs.replace(request, ends="length", **changes))
    block_size = OWN_BLOCK if shares_nothing else workload.block_size
    return replace(workload, requests=requests, block_size=block_size)
