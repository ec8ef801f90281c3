"""How many planted bugs do rehearsals find, and after how many seeds?

    python benchmarks/mutations.py                          # all of them, each until it is found, at most 200 seeds
    python benchmarks/mutations.py --only lost-release --seeds 20

A mutation replaces one place in the source of `serving/`, in a process of its own. Nothing on disk changes.
"""

import argparse
import importlib.abc
import importlib.machinery
import json
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
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
