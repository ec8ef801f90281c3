"""Our schedulers behind the pipes of installed ones: what `dynabench/installed/*_program.py` are for vLLM's and SGLang's.

`python_with` makes a "Python" that runs it. Its version is a word of its own, and one rule of it may be the other way.
"""

import os
import shlex
import sys
from dataclasses import fields
from pathlib import Path

import msgspec

from mocker import BlockChain, BlockRemoved, BlockStored, EngineConfig, Sequence, SglangConfig
from mocker.config import NEWEST
from mocker.installed.scheduler import Asked
from mocker.sglang.core import SglangCore
from mocker.vllm.core import VllmCore
from mocker.vllm.flipped import with_rule_flipped


def python_with(folder, *, version="0.32.0", flipped="", fails_at=0):
    """Write a program that is started as the Python of an environment."""
    script = folder / f"python {version} {flipped}"
    words = [sys.executable, "-m", "tests.installed.ours", version, flipped or "-", str(fails_at)]
    script.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{Path.cwd()}" exec {shlex.join(words)} "$2" "$3"\n')
    script.chmod(0o755)
    return str(script)


class Engine:
    def __init__(self, given, version, flipped):
        names = {field.name for field in fields(EngineConfig)} - {"max_loras"}
        settings = {name: value for name, value in given.items() if name in names} | {
            "engine_version": "0.32" if version.startswith("0.32") else NEWEST
        }
        config = EngineConfig(**settings)
        config = with_rule_flipped(config, flipped) if flipped else config
        self.core = VllmCore(config, given["num_gpu_blocks"], kv_events=given["kv_events"])
        self.sequences, self.flights = {}, []

    def add(self, argument):
        asked = Asked(*argument)
        chain = BlockChain(asked.names, asked.num_named, blocks_per_id=asked.per_name)
        self.sequences[asked.number] = sequence = Sequence(
            asked.number,
            num_prompt=asked.num_prompt,
            max_tokens=asked.max_tokens,
            stop_after=asked.stop_after,
            chain=chain,
            priority=asked.priority,
            arrival=asked.arrival,
        )
        self.core.add(sequence)
        return sequence.num_limit - sequence.num_prompt

    def abort(self, number):
        self.core.abort(self.sequences[number])
        return self.core.num_free_blocks

    def schedule(self, _):
        core, batch = self.core, self.core.schedule()
        if batch is None:
            return [[], [], [], [], core.num_free_blocks, False]
        self.flights.append(batch)
        counts = dict(core.num_new_tokens(batch))
        partial = [one for one, _ in batch.chunks if one not in batch.sampled]
        tokens = [(one.id, count, one in partial) for one, count in counts.items()]
        chunks = dict(batch.chunks)
        started = [(one.id, one.num_computed - chunks[one]) for one in (*batch.admitted, *batch.resumed)]
        return [tokens, started, [one.id for one in batch.preempted], [], core.num_free_blocks, True]

    def update(self, _):
        core, batch = self.core, self.flights.pop(0)
        speaking = [one for one in batch.decodes if core.is_delivered(one)]
        sampled, finished = core.update(batch)
        core.publish()
        events = [event for each in core.outbox.take_events() for event in described(each)]
        tokens = [(one.id, 1) for one in (*speaking, *sampled)]
        return [tokens, [one.id for one in finished], events, core.num_free_blocks]

    def reset(self, _):
        return self.core.reset_prefix_cache()


class SglangEngine:
    def __init__(self, given):
        names = {field.name for field in fields(SglangConfig)}
        config = SglangConfig(
            **{name: value for name, value in given.items() if name in names},
            disable_overlap_schedule=not given["overlap"],
            new_token_ratio_decay_steps=given["decay_steps"],
            clip_max_new_tokens_estimation=given["clip"],
        )
        num_pages = given["max_total_tokens"] // given["page_size"]
        self.core = SglangCore(config, num_pages, kv_events=given["kv_events"])
        self.sequences, self.flights, self.computing = {}, [], set()

    def add(self, argument):
        asked = Asked(*argument)
        self.sequences[asked.number] = sequence = Sequence(
            asked.number,
            num_prompt=asked.num_prompt,
            max_tokens=asked.max_tokens,
            stop_after=asked.stop_after,
            chain=BlockChain(asked.names, asked.num_named, blocks_per_id=asked.per_name),
            priority=asked.priority,
        )
        sequence.ignores_eos = asked.ignores_eos
        self.core.add(sequence)
        return sequence.num_limit - sequence.num_prompt

    def abort(self, number):
        self.core.abort(self.sequences[number])
        self.ended()
        return self.core.num_free_blocks

    def schedule(self, _):
        core, batch = self.core, self.core.schedule()
        ended = self.ended()
        if batch is None:
            return [[], [], [], [], core.num_free_blocks, False, ended]
        self.flights.append(batch)
        tokens = [(one.id, count, one not in batch.sampled) for one, count in batch.chunks]
        tokens += [(one.id, 1, False) for one in batch.decodes]
        self.computing -= set(batch.preempted)
        started = [(one.id, one.num_computed - count) for one, count in batch.chunks if one not in self.computing]
        self.computing |= dict(batch.chunks).keys()
        return [tokens, started, [one.id for one in batch.preempted], [], core.num_free_blocks, True, ended]

    def update(self, _):
        core, batch = self.core, self.flights.pop(0)
        there = [one for one in (*dict(batch.chunks), *batch.decodes) if core.has(one)]
        known = {one: core.num_tokens(one) for one in there}
        core.update(batch)
        core.publish()
        events = [event for each in core.outbox.take_events() for event in described(each)]
        tokens = [(one.id, 1) for one in there if core.num_tokens(one) > known[one]]
        return [tokens, self.ended(), events, core.num_free_blocks]

    def reset(self, _):
        return self.core.reset_prefix_cache()

    def ended(self):
        """Return the requests that have ended since this was asked last."""
        numbers = [number for number, sequence in self.sequences.items() if not self.core.has(sequence)]
        for number in numbers:
            del self.sequences[number]
        return numbers


def described(event):
    kind = {BlockStored: "stored", BlockRemoved: "removed"}[type(event)]
    names = [key if isinstance(key, tuple) else (key, 0) for key in event.keys()]  # noqa: SIM118 (an event, not a dict)
    blocks = [(name, place) for name, place in names if isinstance(name, int)]
    return [(kind, blocks)] if blocks else []


def serve(version, flipped, fails_at, read_fd, write_fd):
    engines, num_asked = [], 0
    with os.fdopen(read_fd, "rb") as asked, os.fdopen(write_fd, "wb") as answers:
        while len(head := asked.read(4)) == 4:
            name, engine, argument = msgspec.msgpack.decode(asked.read(int.from_bytes(head, "little")))
            num_asked += 1
            if fails_at and num_asked > fails_at:
                answer = {"error": "AssertionError: no more"}
            elif name == "version":
                answer = [version, f"digest of {version} {flipped}"]
            elif name == "new":
                is_sglang = "page_size" in argument
                engines.append(SglangEngine(argument) if is_sglang else Engine(argument, version, flipped))
                answer = len(engines) - 1
            elif name == "forget":
                engines.clear()
                answer = True
            else:
                answer = getattr(engines[engine], name)(argument)
            frame = msgspec.msgpack.encode(answer)
            answers.write(len(frame).to_bytes(4, "little") + frame)
            answers.flush()


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2].strip("-"), *map(int, sys.argv[3:]))
