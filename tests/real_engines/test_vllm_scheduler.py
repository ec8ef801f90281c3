"""vLLM's own scheduler and ours, driven in step through random scenarios: whatever the one does, the other does."""

import random
from collections import deque
from dataclasses import dataclass

import pytest

from dynabench.fidelity.recordings import content_ids
from mocker import AllBlocksCleared, BlockChain, BlockRemoved, BlockStored, EngineConfig, Sequence
from mocker.scheduler import Scheduler
from mocker.sequence import OVER

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]  # vLLM's imports warn
NUM_SCENARIOS = 80
SIZE, END = 4, 2


@dataclass
class Asked:
    """A request, all tokens of its answer, and what happens to it."""

    number: int
    prompt: list[int]
    answer: list[int]
    stop_after: int | None
    priority: int
    arrives: int
    aborted: int | None


def config_of(rng, is_async):
    budget = rng.choice([4, 5, 8, 9, 12, 16])
    return EngineConfig(
        block_size=SIZE,
        num_gpu_blocks=rng.choice([8, 9, 10, 12, 14, 20, 40]),
        max_num_seqs=min(rng.choice([2, 3, 4, 8]), budget),
        max_num_batched_tokens=budget,
        max_model_len=rng.choice([None, None, 24, 20]),
        scheduling_policy=rng.choice(["fcfs", "priority"]),
        long_prefill_token_threshold=rng.choice([0, 1, 2, 3]),
        long_prefill_token_threshold_adaptive=rng.random() < 0.5,
        watermark=rng.choice([0.0, 0.0, 0.1]),
        scheduler_reserve_full_isl=rng.random() < 0.5,
        enable_prefix_caching=rng.random() < 0.75,
        async_scheduling=is_async,
    )


def requests_of(rng, config):
    """Return prompts of their own and prompts that go on after another's answer, while that is still being made or later."""
    room = (config.num_gpu_blocks - 1) * SIZE
    longest = min(room, config.max_model_len or room) - 2
    asked = []
    for number in range(rng.randint(5, 16)):
        earlier = rng.choice(asked) if asked and rng.random() < 0.5 else None
        prompt = [] if earlier is None else earlier.prompt + earlier.answer[: rng.randint(0, len(earlier.answer))]
        prompt = (prompt + rng.choices(range(100, 900), k=rng.randint(0 if prompt else 1, 24)))[:longest]
        answer = rng.choices(range(100, 900), k=max(min(rng.randint(1, 30), room - len(prompt)), 1))
        stop_after = rng.randint(1, len(answer)) if rng.random() < 0.5 else None
        if stop_after is not None:
            answer[stop_after - 1] = END
        aborted = rng.randint(1, 40) if rng.random() < 0.15 else None
        asked.append(Asked(number, prompt, answer, stop_after, rng.randrange(3), rng.randint(0, 25), aborted))
    return sorted(asked, key=lambda one: one.arrives)


class VLLM:
    """vLLM's scheduler, with the tokens that its requests make given beforehand."""

    def __init__(self, config, model):
        import torch
        from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
        from vllm.config.kv_events import KVEventsConfig
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler as PlainScheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        longest = config.max_model_len or 4096
        settings = VllmConfig(
            model_config=ModelConfig(
                model=str(model), skip_tokenizer_init=True, dtype="float32", max_model_len=longest
            ),
            scheduler_config=SchedulerConfig(
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_model_len=longest,
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
                policy=config.scheduling_policy,
                long_prefill_token_threshold=config.long_prefill_token_threshold,
                watermark=config.watermark,
                scheduler_reserve_full_isl=config.scheduler_reserve_full_isl,
            ),
            cache_config=CacheConfig(block_size=SIZE, enable_prefix_caching=config.enable_prefix_caching),
            device_config=DeviceConfig("cpu"),
            kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
        )
        # What the CPU's platform corrects for its kernels' sake, which take no part here.
        settings.scheduler_config.async_scheduling = config.async_scheduling
        settings.scheduler_config.max_num_batched_tokens = config.max_num_batched_tokens
        settings.cache_config.block_size = SIZE
        settings.cache_config.enable_prefix_caching = config.enable_prefix_caching
        settings.cache_config.num_gpu_blocks = config.num_gpu_blocks
        attention = FullAttentionSpec(block_size=SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
        kind = AsyncScheduler if config.async_scheduling else PlainScheduler
        self.scheduler = kind(
            vllm_config=settings,
            kv_cache_config=KVCacheConfig(config.num_gpu_blocks, [], [KVCacheGroupSpec(["layer"], attention)]),
            block_size=SIZE,
            log_stats=False,
            structured_output_manager=StructuredOutputManager(settings),
        )
        self.scheduler.adaptive_long_prefill_threshold = config.long_prefill_token_threshold_adaptive
        self.published = []
        self.scheduler.kv_event_publisher.publish = lambda batch: self.published.extend(batch.events)
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(SIZE, sha256) if config.enable_prefix_caching else None
        self._asked = {}
        self._requests = {}

    def add(self, asked):
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        parameters = SamplingParams(max_tokens=len(asked.answer), stop_token_ids=[END], temperature=0)
        id = str(asked.number)
        request = Request(
            id,
            list(asked.prompt),
            parameters,
            None,
            arrival_time=float(asked.arrives) + asked.number / 1e6,
            priority=asked.priority,
            block_hasher=self._hasher,
        )
        self._asked[id], self._requests[id] = asked, request
        self.scheduler.add_request(request)

    def abort(self, asked):
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(str(asked.number), RequestStatus.FINISHED_ABORTED)

    def schedule(self):
        output = self.scheduler.schedule()
        sampled = {}
        for id in output.num_scheduled_tokens:
            request, asked = self._requests[id], self._asked[id]
            if request.num_computed_tokens >= request.num_tokens:
                place = request.num_computed_tokens - len(asked.prompt)
                sampled[id] = [asked.answer[min(place, len(asked.answer) - 1)]]
        preempted = sorted(int(id) for id in output.preempted_req_ids or ())
        facts = {int(id): count for id, count in output.num_scheduled_tokens.items()}
        return (output, sampled), {"scheduled": list(facts.items()), "preempted": preempted} | self.state()

    def update(self, flight):
        from vllm.v1.outputs import ModelRunnerOutput

        output, sampled = flight
        ids = list(output.num_scheduled_tokens)
        made = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={id: place for place, id in enumerate(ids)},
            sampled_token_ids=[sampled.get(id, []) for id in ids],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        outputs = [one for each in self.scheduler.update_from_output(output, made).values() for one in each.outputs]
        finished = {int(one.request_id): str(one.finish_reason) for one in outputs if one.finish_reason is not None}
        speaking = {int(one.request_id) for one in outputs if one.new_token_ids}
        return {"finished": finished, "speaking": speaking} | self.state()

    def state(self):
        running, waiting = (
            [int(one.request_id) for one in queue] for queue in (self.scheduler.running, self.scheduler.waiting)
        )
        free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return {"running": running, "waiting": waiting, "free": free}

    def events(self):
        """Return the blocks of each event, a removal a block."""
        rows = []
        for event in self.published:
            blocks = list(getattr(event, "block_hashes", ()))
            kind = type(event).__name__
            rows += [(kind, [block]) for block in blocks] if kind == "BlockRemoved" else [(kind, blocks)]
        self.published.clear()
        return rows


class Ours:
    """The mocker's scheduler, asked the same."""

    def __init__(self, config):
        self.scheduler = Scheduler(config, config.num_gpu_blocks)
        self._sequences = {}

    def add(self, asked):
        chain = BlockChain(content_ids(asked.prompt + asked.answer[: asked.stop_after], SIZE))
        self._sequences[asked.number] = sequence = Sequence(
            asked.number,
            num_prompt=len(asked.prompt),
            max_tokens=len(asked.answer),
            stop_after=asked.stop_after,
            chain=chain,
            priority=asked.priority,
            arrival=float(asked.arrives) + asked.number / 1e6,
        )
        self.scheduler.add(sequence)

    def abort(self, asked):
        self.scheduler.abort(self._sequences[asked.number])

    def schedule(self):
        batch = self.scheduler.schedule()
        if batch is None:
            return None, {"scheduled": [], "preempted": []} | self.state()
        scheduled = [(sequence.id, count) for sequence, count in self.scheduler.num_new_tokens(batch)]
        return batch, {"scheduled": scheduled, "preempted": sorted(one.id for one in batch.preempted)} | self.state()

    def update(self, batch):
        if batch is None:
            return {"finished": {}, "speaking": set()} | self.state()
        decoded = [one.id for one in batch.decodes if one.state != OVER]
        sampled, finished = self.scheduler.update(batch)
        speaking = {*decoded, *(one.id for one in sampled)}
        return {"finished": {one.id: one.finish_reason for one in finished}, "speaking": speaking} | self.state()

    def state(self):
        scheduler = self.scheduler
        running, waiting = ([one.id for one in queue] for queue in (scheduler.running, scheduler.waiting))
        return {"running": running, "waiting": waiting, "free": scheduler.pool.num_free}

    def events(self):
        rows = []
        for event in self.scheduler.pool.events:
            if isinstance(event, BlockRemoved):
                rows += [("BlockRemoved", [key]) for key in event.keys()]  # noqa: SIM118 (an event, not a dict)
            elif isinstance(event, BlockStored):
                rows.append(("BlockStored", event.keys()))
            else:
                assert isinstance(event, AllBlocksCleared)
                rows.append(("AllBlocksCleared", []))
        self.scheduler.pool.events = []
        return rows


def drive(rng, config, model):
    """Do the same to both, in the order of vLLM's loop; return how often something rare happened."""
    theirs, ours = VLLM(config, model), Ours(config)
    asked = deque(requests_of(rng, config))
    aborts = deque(sorted([one for one in asked if one.aborted is not None], key=lambda one: one.aborted))
    here, flights, names = set(), deque(), {}
    depth, turn, seen = 2 if config.async_scheduling else 1, 0, {"preempted": 0, "stopped": 0, "reset": 0}
    while asked or flights or ours.scheduler.running or ours.scheduler.waiting:
        turn += 1
        assert turn < 2000, "it does not end"
        while asked and asked[0].arrives <= turn:
            one = asked.popleft()
            here.add(one.number)
            theirs.add(one)
            ours.add(one)
        if rng.random() < 0.03:
            is_reset = ours.scheduler.reset_prefix_cache()
            assert theirs.scheduler.reset_prefix_cache() is is_reset
            seen["reset"] += is_reset
        if ours.scheduler.running or ours.scheduler.waiting:
            their_flight, their_facts = theirs.schedule()
            our_flight, our_facts = ours.schedule()
            assert our_facts == their_facts
            seen["preempted"] += len(our_facts["preempted"])
            flights.append((their_flight, our_flight))
            if our_facts["scheduled"] and len(flights) < depth:
                continue
        elif not flights:
            continue
        while aborts and aborts[0].aborted <= turn:
            one = aborts.popleft()
            if one.number in here:
                theirs.abort(one)
                ours.abort(one)
        their_flight, our_flight = flights.popleft()
        their_facts = theirs.update(their_flight)
        our_facts = ours.update(our_flight)
        assert our_facts == their_facts
        seen["stopped"] += list(our_facts["finished"].values()).count("stop")
        their_events, our_events = theirs.events(), ours.events()
        assert [(kind, len(keys)) for kind, keys in our_events] == [(kind, len(keys)) for kind, keys in their_events]
        for (_, keys), (_, hashes) in zip(our_events, their_events, strict=True):
            for key, block in zip(keys, hashes, strict=True):
                assert names.setdefault(block, key) == key
    return seen


@pytest.mark.parametrize("is_async", [True, False])
def test_both_schedulers_do_the_same(folder, is_async):
    happened = {"preempted": 0, "stopped": 0, "reset": 0}
    for seed in range(NUM_SCENARIOS):
        rng = random.Random(seed)
        config = config_of(rng, is_async)
        try:
            seen = drive(rng, config, folder)
        except Exception as error:
            error.add_note(f"scenario {seed}: {config}")
            raise
        happened = {what: count + seen[what] for what, count in happened.items()}
    assert min(happened.values()) > 0, happened
