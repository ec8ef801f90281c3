"""How many planted bugs do rehearsals find, and after how many seeds?

    python benchmarks/mutations.py                          # all of them, each until it is found, at most 200 seeds
    python benchmarks/mutations.py --only lost-release --seeds 20
    python benchmarks/mutations.py --list blind --seeds 1000

The two lists are `MUTATIONS` here, and the twenty of `blind_mutations.toml`, chosen without a look at the invariants. A mutation replaces one place in the source of `serving/`, in a process of its own. Nothing on disk changes.
"""

import argparse
import contextlib
import importlib.abc
import importlib.machinery
import json
import logging
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # whoever hunts plants a bug before anything of `serving` is imported
    from dynabench.deployment.description import Deployment

LEVELS = ("medium", "harsh")
"""How much goes wrong, seed by seed in turn."""
NUM_QUESTIONS = 60
RATE_S = 12.0
"""Requests in a second."""


class Mutation(NamedTuple):
    """A planted bug."""

    name: str
    what: str
    module: str
    old: str
    """Is in the module's source once."""
    new: str
    where: tuple[str, ...] = ("aggregated",)
    """The deployments that it is looked for in, seed by seed in turn (see `deployments`)."""


MUTATIONS = [
    Mutation(
        "lost-release",
        "a request that is given up stays booked at its router",
        "serving.life.flight",
        "return (*effects, *RELEASE_BOTH)",
        "return tuple(effects)",
    ),
    Mutation(
        "double-send",
        "after a migration a request is sent to its new worker twice",
        "serving.frontend.generation.attempt",
        "                        self.decode.send(is_refusable=self._is_refusable)\n",
        "                        self.decode.send(is_refusable=self._is_refusable)\n"
        "                        if self.flight.num_migrations:\n"
        "                            self.decode.send(is_refusable=self._is_refusable)\n",
    ),
    Mutation(
        "forgotten-event",
        "the index takes only the first event of a message",
        "serving.router.follower",
        "        for event in events:\n",
        "        for event in events[:1]:\n",
    ),
    Mutation(
        "no-removals",
        "the index does not apply removals",
        "serving.router.follower",
        "index.evict(slot, hashes)",
        "pass",
    ),
    Mutation(
        "unnoticed-gap",
        "a gap among KV events is not noticed",
        "serving.router.follower",
        "number == place.next:\n            place.next += 1",
        "number >= place.next:\n            place.next = number + 1",
    ),
    Mutation(
        "deaf-to-heartbeats",
        "heartbeats never lead to a snapshot, so that the loss of the last events stays unknown",
        "serving.router.follower",
        "if place.behind != (place.epoch, place.next):",
        "if True:",
    ),
    Mutation(
        "unsealed-snapshot",
        "a snapshot includes events that are sent again after it",
        "serving.worker.kv_events",
        "        self._seal()\n        return self.epoch, self.number + len(self._sealed), self.ledger.dump()",
        "        return self.epoch, self.number, self.ledger.dump()",
    ),
    Mutation(
        "stale-ledger",
        "snapshots include blocks that were removed",
        "serving.worker.kv_events",
        "                self._parents.pop(block, None)\n",
        "                pass\n",
    ),
    Mutation(
        "stale-slot",
        "a worker that joins inherits the index of one that left",
        "serving.router.router",
        "            self._caches.drop(slot)\n        self._polled.pop",
        "            pass\n        self._polled.pop",
    ),
    Mutation(
        "unrenewed-lease",
        "workers do not renew their leases in discovery",
        "serving.runtime.memory.discovery",
        "            await asyncio.sleep(self._ttl_s / 4)\n",
        "            await asyncio.sleep(1e6)\n",
    ),
    Mutation(
        "open-door",
        "a frontend admits any number of requests",
        "serving.frontend.admission",
        "num_open >= self._limit",
        "num_open >= 1 << 30",
    ),
    Mutation(
        "room-never-freed",
        "a request that is over still counts against the limit of its frontend",
        "serving.frontend.guard",
        "            answering.num_open -= 1\n",
        "            pass\n",
    ),
    Mutation(
        "double-end",
        "a streamed answer ends twice",
        "serving.frontend.answers.sending",
        "await self._write(send, end + self._answer.end(), more=False)",
        "await self._write(send, end + self._answer.end() + self._answer.end(), more=False)",
    ),
    Mutation(
        "short-by-one",
        "after a migration an answer is a token too short",
        "serving.frontend.generation.call",
        "max_tokens=None if limit is None else limit - len(tokens),",
        "max_tokens=None if limit is None else limit - len(tokens) - 1,",
    ),
    Mutation(
        "miscounted-usage",
        "after a migration the usage has a token too many",
        "serving.frontend.generation.choice",
        "return self._text.num_tokens if self._num_counted is None else self._num_counted",
        "return self._text.num_tokens + self.attempts.flight.num_migrations",
    ),
    Mutation(
        "repeated-token",
        "after a migration the last token comes again",
        "serving.frontend.generation.attempt",
        "self._request.after(call.tokens)",
        "self._request.after(call.tokens[:-1])",
    ),
    Mutation(
        "wrong-continuation",
        "a new worker takes what was generated for a part of the prompt",
        "serving.frontend.generation.call",
        "num_generated=self.num_generated + len(tokens)",
        "num_generated=self.num_generated",
    ),
    Mutation(
        "deaf-engine",
        "a worker does not pass an abort on to its engine",
        "serving.engines.mock.intake",
        "stream.on_cancel = lambda: self._rank.engine.abort(live.sequence)",
        "stream.on_cancel = lambda: None",
    ),
    Mutation(
        "unsent-cancel",
        "a frontend does not cancel calls whose client has left",
        "serving.runtime.connection",
        "self._send(Cancel(id))",
        "pass",
    ),
    Mutation(
        "missed-deletes",
        "a watch misses keys whose lease ran out",
        "serving.runtime.etcd_watch",
        "        else:\n            self._look(key)\n",
        "        else:\n            pass\n",
    ),
    Mutation(
        "same-worker-again",
        "a request that was refused looks for a worker without regard to who refused it",
        "serving.frontend.generation.attempt",
        "avoid=self.flight.failed_at,",
        "avoid=(),",
    ),
    Mutation(
        "unheard-loss",
        "the readers of calls are not woken when a connection breaks",
        "serving.runtime.connection",
        '"the process that served this is gone", "lost")\n            stream.wake()',
        '"the process that served this is gone", "lost")',
    ),
    Mutation(
        "no-redial",
        "a connection that broke is not made again",
        "serving.runtime.client",
        "            self._dial(key, instance, after_s=REDIAL_S)\n",
        "            pass\n",
    ),
    Mutation(
        "endless-patience",
        "a process that does not answer is never given up",
        "serving.runtime.connection",
        "            if self._silent_s > SILENT_S:\n",
        "            if self._silent_s > 1e9:\n",
    ),
    Mutation(
        "booked-forever",
        "a router keeps what another router has booked if the message of its end was lost",
        "serving.routing.peers",
        "for request in theirs.difference(requests):",
        "for request in ():",
    ),
    Mutation(
        "growing-list",
        "a router's list of its open requests only grows",
        "serving.routing.peers",
        "        self._open.discard(request)\n",
        "",
    ),
]

BLIND = [
    Mutation(
        name, what=each["what"], module=each["module"], old=each["old"], new=each["new"], where=tuple(each["where"])
    )
    for name, each in tomllib.loads(
        Path(__file__).with_name("blind_mutations.toml").read_text(encoding="utf-8")
    ).items()
]
LISTS = {"first": MUTATIONS, "blind": BLIND}


class Planting(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from a changed source."""

    def __init__(self, mutation: Mutation) -> None:
        """Prepare to change a module that is not imported yet."""
        self._mutation = mutation

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a spec of the module, None for others."""
        if fullname != self._mutation.module:
            return None
        found = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        assert found is not None
        return importlib.machinery.ModuleSpec(fullname, self, origin=found.origin)

    def exec_module(self, module: ModuleType) -> None:
        """Run the changed source.

        Raises:
            ValueError: what is to be changed is not there once.
        """
        spec = module.__spec__
        assert spec is not None and spec.origin is not None
        source = Path(spec.origin).read_text(encoding="utf-8")
        if source.count(self._mutation.old) != 1:
            raise ValueError(f"{self._mutation.name}: {spec.origin} does not have {self._mutation.old!r} once")
        changed = source.replace(self._mutation.old, self._mutation.new)
        exec(compile(changed, spec.origin, "exec"), module.__dict__)


def hunt(mutation: Mutation | None, seeds: range) -> dict[str, object]:
    """Rehearse seeds until a violation is found; return it. It has to be the first in this process to import `serving`."""
    if mutation is not None:
        sys.meta_path.insert(0, Planting(mutation))
    from dynabench.rehearsal.all_seeds import Plan, carry_out

    logging.disable(logging.WARNING)
    names = ("aggregated",) if mutation is None else mutation.where
    found = deployments()
    began_s = time.process_time()
    for seed in seeds:
        name, level = names[seed % len(names)], LEVELS[seed // len(names) % len(LEVELS)]
        _, outcome = carry_out(Plan(found[name], level, NUM_QUESTIONS, RATE_S), seed)
        if outcome.violations:
            said = {
                "violation": str(outcome.violations[0])[:300],
                "all": sorted({each.invariant for each in outcome.violations}),
            }
            return said | {"seed": seed, "level": level, "where": name, "s": spent(began_s)}
    return {"seed": None, "level": "", "where": "", "violation": "", "all": [], "s": spent(began_s)}


def deployments() -> "dict[str, Deployment]":
    """Return what bugs are looked for in, by name.

    Caches and limits are small, so that blocks are evicted and requests refused. What comes late from a store is not awaited. Two frontends tell each other what they book.
    """
    from dynabench.deployment.description import Deployment, Pool
    from dynabench.deployment.kv_store import KvStoreConfig
    from mocker import EngineConfig

    small = EngineConfig(num_gpu_blocks=40)
    workers = Pool(replicas=4, mocker=small)
    halves = tuple(
        Pool(name=role, role=role, replicas=2, mocker=EngineConfig(num_gpu_blocks=80)) for role in ("prefill", "decode")
    )
    tiered = EngineConfig(
        num_gpu_blocks=160, num_host_blocks=96, block_size=16, kv_prefetch_policy="timeout", kv_prefetch_timeout_s=0.02
    )
    frontend = replace(Deployment().frontend, http_workers=2, max_inflight_requests=48)
    plain = Deployment(router_mode="kv", pools=(workers,), frontend=frontend)
    return {
        "aggregated": plain,
        "prefill-decode": replace(plain, pools=halves, transfer=replace(plain.transfer, bandwidth_gb_s=2.0)),
        "router": replace(plain, standalone_router=True),
        "store": replace(plain, pools=(Pool(replicas=4, mocker=tiered),), kv_store=KvStoreConfig(kv_store_size=0.5)),
    }


def numbers(seeds: str) -> range:
    """Return the seeds of a number, from 0 on, or of a range."""
    first, _, last = seeds.rpartition("..")
    return range(int(first or 0), int(last))


def spent(since_s: float) -> float:
    """Return the CPU time since then (s)."""
    return round(time.process_time() - since_s, 1)


def in_process(list_name: str, name: str, seeds: str) -> dict[str, object]:
    """Hunt one mutation in a process of its own."""
    command = [sys.executable, __file__, "--list", list_name, "--hunt", name, "--seeds", seeds]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    with contextlib.suppress(IndexError, ValueError):
        found = json.loads(done.stdout.splitlines()[-1])
        assert isinstance(found, dict)
        return found
    raise SystemExit(f"{name}: {done.stderr[-2000:]}")


def main() -> None:
    """Hunt mutations, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--seeds", default="200", help="try so many seeds with each, or a range such as 60..1000 (default: 200)"
    )
    parser.add_argument("--list", choices=LISTS, default="first", help="hunt those of this list (default: first)")
    parser.add_argument("--only", nargs="+", help="hunt only these")
    parser.add_argument("--jobs", type=int, default=2, help="processes at once (default: 2)")
    parser.add_argument("--hunt", help="hunt this one in this process, and print JSON; none: nothing is planted")
    asked = parser.parse_args()
    by_name = {each.name: each for each in LISTS[asked.list]}
    if asked.hunt:
        print(json.dumps(hunt(None if asked.hunt == "none" else by_name[asked.hunt], numbers(asked.seeds))))
        return
    names = asked.only or list(by_name)
    if unknown := set(names) - by_name.keys():
        parser.error(f"not in the list {asked.list}: {', '.join(sorted(unknown))}")
    with ThreadPoolExecutor(asked.jobs) as pool:
        found = list(pool.map(lambda name: in_process(asked.list, name, asked.seeds), names))
    print("| planted bug | found with seed | CPU s | by | what was said |\n|---|---|---|---|---|")
    for name, each in zip(names, found, strict=True):
        seed = "not found" if each["seed"] is None else f"{each['seed']} ({each['where']}, {each['level']})"
        by, said = ", ".join(map(str, each["all"] or [])), str(each["violation"]).replace("|", "/")  # type: ignore[call-overload]
        print(f"| {name}: {by_name[name].what} | {seed} | {each['s']} | {by} | {said} |")
    print(f"{sum(each['seed'] is not None for each in found)} of {len(found)} found")


if __name__ == "__main__":
    main()
