"""Pauses, resets that preempt and aborts come between steps in any order, and no token is lost or delivered twice."""

import random

import pytest

from mocker import BlockChain, EngineConfig, Sequence, new_engine
from mocker.timing.choose import resolve

SIZE = 4

both = pytest.mark.parametrize("is_async", [False, True])


def engine(*, is_async, num_blocks=33, budget=8, policy="fcfs", has_adapters=False):
    config = EngineConfig(
        block_size=SIZE,
        num_gpu_blocks=num_blocks,
        max_num_batched_tokens=budget,
        max_num_seqs=4,
        async_scheduling=is_async,
        scheduling_policy=policy,
        enable_lora=has_adapters,
    )
    return new_engine(config, resolve(config).timing, num_blocks=num_blocks)


def sequence(id, num_prompt, max_tokens, **more):
    chain = BlockChain([(id, place) for place in range((num_prompt + max_tokens) // SIZE)])
    return Sequence(id, num_prompt=num_prompt, max_tokens=max_tokens, chain=chain, **more)


def drawn_sequence(rng, id):
    return sequence(
        id,
        rng.randint(1, 20),
        rng.randint(1, 10),
        stop_after=rng.choice([None, rng.randint(1, 6)]),
        priority=rng.randint(0, 2),
        adapter=rng.choice(["", "x", "y"]),
    )


class Reader:
    """Takes steps, and counts what each sequence got and how often it ended."""

    def __init__(self, made):
        self.engine = made
        self.tokens = {}
        self.ends = {}

    def step(self, during=()):
        """Take a step, in which these are aborted; return whether there was one."""
        made = self.engine
        if made.schedule(made.known_until_s) is None:
            return False
        for one in during:
            made.abort(one)
        decoded = made.decoded()
        output = made.complete()
        for one in (*decoded, *output.sampled):
            self.tokens[one.id] = self.tokens.get(one.id, 0) + 1
        for one in output.finished:
            self.ends[one.id] = self.ends.get(one.id, 0) + 1
        return True

    def finish(self):
        """Resume, and take steps until nothing is left."""
        self.engine.resume()
        while not self.engine.is_idle:
            self.step()


@both
def test_a_reset_of_a_paused_engine_computes_no_token_again(is_async):
    made = engine(is_async=is_async)
    reader = Reader(made)
    made.add(one := sequence("a", 20, 8))
    while reader.tokens.get("a", 0) < 3:
        reader.step()
    made.pause("all")
    while reader.step():
        pass
    known = made.num_known_tokens(one)
    made.reset_prefix_cache(preempts_running=True)
    assert made.num_known_tokens(one) == known == 20 + reader.tokens["a"]
    reader.finish()
    assert (reader.tokens, reader.ends) == ({"a": 8}, {"a": 1})


@both
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("seed", range(25))
def test_each_sequence_gets_all_its_tokens_and_ends_once_whatever_is_asked_of_the_engine(seed, policy, is_async):
    rng = random.Random(seed)
    made = engine(
        is_async=is_async,
        num_blocks=rng.choice([14, 33]),  # the small one preempts by itself, too
        budget=rng.choice([8, 64]),
        policy=policy,
        has_adapters=rng.choice([False, True]),
    )
    reader, sequences, aborted = Reader(made), [], set()
    for number in range(300):
        match rng.choice(["add", "add", "abort", "reset", "all", "new", "resume", "resume", *["step"] * 8]):
            case "add" if len(sequences) < 40:
                sequences.append(drawn_sequence(rng, number))
                made.add(sequences[-1])
            case "abort" if sequences and rng.random() < 0.3:
                aborted.add(one := rng.choice(sequences))
                if rng.random() < 0.5:
                    made.abort(one)
                else:
                    reader.step(during=[one])
            case "reset":
                made.reset_prefix_cache(preempts_running=True)
            case "all" | "new" as pause:
                made.pause(pause)
            case "resume":
                made.resume()
            case "step":
                reader.step()
        assert all(reader.tokens.get(one.id, 0) <= one.num_total - one.num_prompt for one in sequences)
    reader.finish()
    whole = {one.id: one.num_total - one.num_prompt for one in sequences if one not in aborted}
    assert {id: reader.tokens.get(id) for id in whole} == whole
    assert {id: reader.ends.get(id) for id in whole} == dict.fromkeys(whole, 1)
    assert made.num_free_blocks == made.num_blocks


@both
def test_a_sequence_that_is_aborted_during_a_step_no_longer_belongs_to_the_engine(is_async):
    made = engine(is_async=is_async)
    made.add(one := sequence("a", 4, 8))
    made.add(other := sequence("b", 4, 8))
    made.schedule(0.0)
    made.abort(one)
    assert made.sequences() == [other]
    made.complete()
    assert made.sequences() == [other]
