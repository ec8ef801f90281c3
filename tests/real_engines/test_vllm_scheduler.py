"""vLLM's own scheduler and ours, driven in step through random scenarios: whatever the one does, the other does.

Some scenarios are of an engine that computes prompts for others, or loads what they computed. There vLLM's scheduler has its
NIXL connector, and random numbers decide when a transfer ends and whether it fails. In others it speculates, has adapters,
several stages or an encoder; random numbers say how many drafts there are, and how many of them are accepted.
"""

import random
import traceback
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from math import lcm

import pytest

from dynabench.fidelity.vllm.sequences import content_ids
from mocker import AllBlocksCleared, BlockChain, BlockRemoved, BlockStored, EngineConfig, Sequence
from mocker.events import GroupRemoved, GroupStored
from mocker.media import MediaItem
from mocker.models.kv_groups import KvLayout, LayerKv, layout_of
from mocker.sequence import LOADED, LOADING
from mocker.speculation.drafter import Drafter
from mocker.vllm.core import VllmCore
from mocker.vllm.speculation import Speculation
from tests.real_engines.serving_vllm import installed_version

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]  # vLLM's imports warn
NUM_SCENARIOS = 60
END = 2
QUEUES = ("running", "waiting", "holding", "loading")
ALWAYS = ("preempted", "stop", "length", "reset", "aborted running", "aborted waiting")
WHILE_RUNNING = (*ALWAYS, "reset while running")
LOADED_HERE = ("loads", "error", "aborted loading")
RARE = {
    (None, False): WHILE_RUNNING,
    (None, True): WHILE_RUNNING,
    ("kv_consumer", False): (*WHILE_RUNNING, *LOADED_HERE),
    ("kv_consumer", True): (*ALWAYS, *LOADED_HERE, "fenced"),
    ("kv_producer", False): (*WHILE_RUNNING, "sends"),
    ("kv_producer", True): (*WHILE_RUNNING, "sends", "dropped"),
    ("kv_both", False): (*WHILE_RUNNING, *LOADED_HERE, "sends"),
    ("kv_both", True): (*ALWAYS, *LOADED_HERE, "sends", "fenced"),
}
"""What has to happen in some scenario."""
DRAFTED = ("drafts", "accepted", "preempted", "stop", "length")
VARIANTS = [
    # method, asynchronous, part in disaggregation, stages; and what has to happen
    ("ngram", False, None, 1, (*DRAFTED, "padded")),
    ("ngram", False, "kv_consumer", 1, (*DRAFTED, *LOADED_HERE, "padded")),
    ("eagle", False, None, 1, DRAFTED),
    ("eagle", True, None, 1, (*DRAFTED, "reset while running")),
    ("mtp", True, "kv_consumer", 1, (*DRAFTED, *LOADED_HERE, "padded", "fenced")),
    ("draft_model", False, "kv_consumer", 1, (*DRAFTED, *LOADED_HERE, "padded")),
    ("draft_model", True, None, 1, (*DRAFTED, "padded")),
    ("eagle3", True, "kv_producer", 1, (*DRAFTED, "sends", "dropped")),
    ("eagle3", True, None, 2, DRAFTED),
    (None, False, "kv_consumer", 1, (*WHILE_RUNNING, *LOADED_HERE)),
    (None, True, "kv_consumer", 1, (*ALWAYS, *LOADED_HERE, "fenced")),
    (None, False, None, 2, ALWAYS),
    (None, False, None, 4, ALWAYS),
    (None, False, "kv_consumer", 3, (*ALWAYS, *LOADED_HERE, "fenced")),
    (None, True, None, 2, ALWAYS),
    (None, True, None, 4, ALWAYS),
    (None, True, "kv_producer", 3, (*ALWAYS, "sends", "dropped")),
]
FOUND = {(None, True, "kv_producer", 3): [6024]}
"""Scenarios, by variant, in which something was found that is rare."""
REMOTE = {
    "remote_engine_id": "other",
    "remote_host": "there",
    "remote_port": 1,
    "tp_size": 1,
    "remote_block_ids": ([1],),
}


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
    is_loaded: bool
    """Whether its prompt's KV comes from another engine."""
    is_sent: bool
    """Whether that goes to another engine."""
    adapter: int
    """The number of its adapter, 0 if it has none."""
    media: tuple[MediaItem, ...] = ()


@dataclass
class Variant:
    """What an engine has beside its settings."""

    num_stages: int = 1
    max_loras: int | None = None
    layout: KvLayout | None = None
    """Groups of layers, if they do not all keep all tokens."""


PLAIN = Variant()


@dataclass
class Output:
    """What the workers report with a step's output: of transfers, and of drafts by the numbers of requests."""

    came: list[tuple[int, int | None]]
    """Requests whose KV was loaded, and how many blocks are valid where not all are."""
    sent: list[int]
    accepted: dict[int, int] = field(default_factory=dict)
    drafts: dict[int, int] = field(default_factory=dict)
    """How many there are for the next step."""


def config_of(rng, is_async, kv_role):
    budget = rng.choice([4, 5, 8, 9, 12, 16, 16, 32])
    size = rng.choice([1, 2, 4, 4, 4, 8])
    config = EngineConfig(
        engine_version=installed_version(),
        block_size=size,
        num_gpu_blocks=1 + rng.choice([28, 32, 36, 44, 52, 76, 156]) // size,
        max_num_seqs=(seats := min(rng.choice([1, 2, 3, 4, 8]), budget)),
        max_num_active_seqs=rng.choice([None, None, None, rng.randint(1, seats)]),
        max_num_batched_tokens=budget,
        max_model_len=rng.choice([None, None, 24, 20]),
        scheduling_policy=rng.choice(["fcfs", "priority"]),
        long_prefill_token_threshold=rng.choice([0, 1, 2, 3]),
        long_prefill_token_threshold_adaptive=rng.random() < 0.5,
        watermark=rng.choice([0.0, 0.0, 0.1]),
        scheduler_reserve_full_isl=rng.random() < 0.5,
        enable_prefix_caching=rng.random() < 0.75,
        async_scheduling=is_async,
        kv_role=kv_role,
        kv_load_failure_policy=rng.choice(["fail", "recompute"]),
    )
    if config.rules.holds_prefills and rng.random() < 0.3:
        config = replace(config, prefill_schedule_interval=rng.choice([2, 3, 6]))
    if budget >= 12 and rng.random() < 0.2:
        return replace(config, enable_chunked_prefill=False, max_model_len=min(budget, 24))
    return config


def variant_of(rng, config, method, num_stages):
    """Return settings with speculation, and what else an engine has."""
    variant = Variant(num_stages, rng.choice([None, None, 1, 2]))
    if method is None:
        return config, variant
    num_drafts = rng.choice([1, 2, 3, 5])
    budget = max(config.max_num_batched_tokens, num_drafts + 2)
    drafts = {"num_speculative_tokens": num_drafts, "speculative_method": method}
    threshold = config.long_prefill_token_threshold and config.long_prefill_token_threshold + num_drafts
    limits = {"max_num_batched_tokens": budget, "long_prefill_token_threshold": threshold}
    return replace(config, **drafts, **limits), variant


def with_groups(rng, config):
    """Return settings for a model whose layers keep windows, chunks or states beside all tokens, and its groups."""
    size = config.block_size
    layers = [LayerKv(8.0)] * rng.choice([0, 1, 1, 1])
    layers += [LayerKv(8.0, window=rng.randint(1, 5 * size)) for _ in range(rng.choice([0, 1, 1, 2]))]
    if not Speculation(config).drops_last_hit:  # vLLM refuses chunks beside EAGLE and MTP
        layers += [LayerKv(8.0, window=rng.randint(1, 6 * size), is_chunked=True)] * rng.choice([0, 0, 1])
    layers += [LayerKv(4.0, window=rng.choice([0, rng.randint(2, 5 * size)]))] * rng.choice([0, 0, 1])
    layers = layers or [LayerKv(8.0, window=rng.randint(1, 5 * size))]
    layers += [LayerKv(0.0, state=4.0 * size)] * rng.choice([0, 0, 1])
    if len({layer.token for layer in layers if layer.token}) > 1:  # vLLM refuses chunks beside blocks of several sizes
        layers = [layer for layer in layers if not layer.is_chunked]
    rng.shuffle(layers)
    longest = config.max_model_len or 4096
    layout = layout_of(layers, size, state_block_size=None if config.enable_prefix_caching else longest)
    num_blocks = config.num_gpu_blocks * len(layout.groups) + (6 + rng.choice([0, 2, 6])) * len(layout.groups)
    has_others = any(not layer.is_full and not layer.is_chunked for layer in layers)
    interval = (
        rng.choice([0, 0, None, lcm(*[group.block_size for group in layout.groups]) * rng.randint(1, 3)])
        if has_others
        else 0
    )
    config = replace(config, num_gpu_blocks=num_blocks, prefix_cache_retention_interval=interval, max_model_len=longest)
    return config, Variant(layout=layout)


def requests_of(rng, config, max_loras, num_groups=1):
    """Return prompts of their own and prompts that go on after another's answer, while that is still being made or later."""
    room = (
        (config.num_gpu_blocks - 1) // num_groups - 2 * (num_groups > 1)
    ) * config.block_size - 2 * config.num_speculative_tokens
    if config.num_speculative_tokens and config.is_kv_consumer:
        room -= config.block_size  # for a load, places to decode are counted by themselves
    num_adapters = 0 if max_loras is None else rng.randint(1, 4)
    longest = min(room, config.max_model_len or room) - 2
    asked, span, risk = [], rng.choice([0, 25, 25, 60]), rng.choice([0.1, 0.2, 0.5])
    for number in range(rng.choice([rng.randint(5, 16), 30])):
        earlier = rng.choice(asked) if asked and rng.random() < 0.5 else None
        prompt = [] if earlier is None else earlier.prompt + earlier.answer[: rng.randint(0, len(earlier.answer))]
        prompt = (prompt + rng.choices(range(100, 900), k=rng.randint(0 if prompt else 1, 24)))[:longest]
        is_remote = config.kv_role is not None and rng.random() < 0.7
        is_loaded = is_remote and config.is_kv_consumer and (not config.is_kv_producer or rng.random() < 0.5)
        is_sent = is_remote and not is_loaded
        most = 1 if is_sent and rng.random() < 0.7 else 30
        answer = rng.choices(range(100, 900), k=max(min(rng.randint(1, most), room - len(prompt)), 1))
        stop_after = rng.randint(1, len(answer)) if rng.random() < 0.5 else None
        if stop_after is not None:
            answer[stop_after - 1] = END
        arrives = rng.randint(0, span)
        aborted = arrives + rng.choice([rng.randint(0, 8), rng.randint(0, 40)]) if rng.random() < risk else None
        adapter = rng.randint(0, num_adapters)
        asked.append(
            Asked(number, prompt, answer, stop_after, rng.randrange(3), arrives, aborted, is_loaded, is_sent, adapter)
        )
    return sorted(asked, key=lambda one: one.arrives)


class Workers:
    """What moves KV, and says when it has."""

    def __init__(self, rng):
        self._rng = rng
        self._speed = rng.choice([0.03, 0.1, 0.3, 0.9])
        self._failures = rng.choice([0.0, 0.2, 0.5])
        self._loading = []  # with the blocks of each, and those among them that were here
        self._sending = []

    def report(self, loads, sends):
        """Go on with the transfers that a step began, and those before it."""
        self._loading += loads
        self._sending += sends
        came = [load for load in self._loading if self._rng.random() < self._speed]
        sent = [number for number in self._sending if self._rng.random() < self._speed]
        self._loading = [load for load in self._loading if load not in came]
        self._sending = [number for number in self._sending if number not in sent]
        return Output([(number, self._num_valid(total, here)) for number, total, here in came], sent)

    def _num_valid(self, total, here):
        if self._rng.random() >= self._failures:
            return None
        return self._rng.choice([0, self._rng.randrange(here, total)])


class VLLM:
    """vLLM's scheduler, with the tokens that its requests make given beforehand."""

    def __init__(self, config, model, variant):
        import torch
        from vllm.config import (
            CacheConfig,
            DeviceConfig,
            KVTransferConfig,
            LoRAConfig,
            ModelConfig,
            SchedulerConfig,
            SpeculativeConfig,
            VllmConfig,
        )
        from vllm.config.kv_events import KVEventsConfig
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler as PlainScheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        longest, size = config.max_model_len or 4096, config.block_size
        self._has_groups = variant.layout is not None
        transfer = None
        if config.kv_role is not None:
            transfer = KVTransferConfig(
                kv_connector="NixlConnector",
                kv_role=config.kv_role,
                kv_load_failure_policy=config.kv_load_failure_policy,
            )
        settings = VllmConfig(
            model_config=ModelConfig(
                model=str(model), skip_tokenizer_init=True, dtype="float32", max_model_len=longest
            ),
            scheduler_config=SchedulerConfig(
                max_num_seqs=config.max_num_seqs,
                max_num_active_seqs=config.max_num_active_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_model_len=longest,
                enable_chunked_prefill=config.enable_chunked_prefill,
                is_encoder_decoder=False,
                policy=config.scheduling_policy,
                long_prefill_token_threshold=config.long_prefill_token_threshold,
                watermark=config.watermark,
                scheduler_reserve_full_isl=config.scheduler_reserve_full_isl,
                prefill_schedule_interval=config.prefill_schedule_interval,
            ),
            cache_config=CacheConfig(block_size=size, enable_prefix_caching=config.enable_prefix_caching),
            device_config=DeviceConfig("cpu"),
            kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
            kv_transfer_config=transfer,
        )
        # What the CPU's platform corrects for its kernels' sake, which take no part here.
        settings.scheduler_config.async_scheduling = config.async_scheduling
        settings.scheduler_config.enable_chunked_prefill = config.enable_chunked_prefill
        settings.scheduler_config.max_num_batched_tokens = config.max_num_batched_tokens
        settings.cache_config.block_size = size
        settings.cache_config.enable_prefix_caching = config.enable_prefix_caching
        settings.cache_config.num_gpu_blocks = config.num_gpu_blocks
        settings.parallel_config.pipeline_parallel_size = variant.num_stages
        if config.num_speculative_tokens:
            settings.speculative_config = SpeculativeConfig(
                method="ngram", num_speculative_tokens=config.num_speculative_tokens, prompt_lookup_max=2
            )
            settings.speculative_config.method = config.speculative_method  # only now: it would load a drafter
        if variant.max_loras is not None:
            settings.lora_config = LoRAConfig(max_loras=variant.max_loras)
        attention = FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=1, dtype=torch.float32)
        groups, aligned = [KVCacheGroupSpec(["layer"], attention)], size
        if variant.layout is not None:
            groups = groups_of(variant.layout, config)
            aligned = lcm(*[group.block_size for group in variant.layout.groups])
            settings.cache_config.mamba_cache_mode = "align" if config.enable_prefix_caching else "none"
            settings.cache_config.prefix_cache_retention_interval = config.prefix_cache_retention_interval
        kind = AsyncScheduler if config.async_scheduling else PlainScheduler
        self.scheduler = kind(
            vllm_config=settings,
            kv_cache_config=KVCacheConfig(
                config.num_gpu_blocks,
                [],
                groups,
                prefix_cache_retention_interval=config.prefix_cache_retention_interval,
            ),
            block_size=aligned,
            hash_block_size=size if config.enable_prefix_caching else aligned,
            log_stats=False,
            structured_output_manager=StructuredOutputManager(settings),
        )
        self.scheduler.use_v2_model_runner = variant.num_stages > 1
        self.scheduler.adaptive_long_prefill_threshold = config.long_prefill_token_threshold_adaptive
        self.published = []
        self.scheduler.kv_event_publisher.publish = lambda batch: self.published.extend(batch.events)
        init_none_hash(sha256)
        ahead = [1] if getattr(settings, "num_hash_lookahead_tokens", 0) else []
        self._hasher = get_request_block_hasher(size, sha256, *ahead) if config.enable_prefix_caching else None
        self._asked = {}
        self._requests = {}
        if config.has_encoder:
            self._add_encoder(settings.scheduler_config, config)

    def _add_encoder(self, settings, config):
        from vllm.v1.core.encoder_cache_manager import EncoderCacheManager, compute_mm_encoder_budget

        settings.max_num_encoder_input_tokens = settings.encoder_cache_size = config.max_num_batched_tokens
        settings.disable_chunked_mm_input = config.disable_chunked_mm_input
        budget, size = compute_mm_encoder_budget(settings, {"image": config.max_tokens_per_mm_item})
        self.scheduler.max_num_encoder_input_tokens = budget
        self.scheduler.encoder_cache_manager = EncoderCacheManager(size)

    def add(self, asked):
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        id = str(asked.number)
        transfer = None
        if asked.is_loaded or asked.is_sent:
            transfer = {"do_remote_prefill": asked.is_loaded, "do_remote_decode": asked.is_sent}
            transfer |= REMOTE | {"remote_request_id": id} if asked.is_loaded else {}
        extra = {"kv_transfer_params": transfer}
        parameters = SamplingParams(max_tokens=len(asked.answer), stop_token_ids=[END], temperature=0, extra_args=extra)
        request = Request(
            id,
            list(asked.prompt),
            parameters,
            None,
            arrival_time=float(asked.arrives) + asked.number / 1e6,
            priority=asked.priority,
            block_hasher=self._hasher,
            lora_request=LoRARequest(f"adapter {asked.adapter}", asked.adapter, "none") if asked.adapter else None,
            mm_features=features_of(asked),
        )
        self._asked[id], self._requests[id] = asked, request
        self.scheduler.add_request(request)

    def ended(self, id):
        request = self._requests[id]
        return {"num_preemptions": request.num_preemptions, "status": request.status.name}

    def abort(self, asked):
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(str(asked.number), RequestStatus.FINISHED_ABORTED)

    def schedule(self):
        output = self.scheduler.schedule()
        sampled = [id for id in output.num_scheduled_tokens if not self._requests[id].is_prefill_chunk]
        preempted = sorted(int(id) for id in output.preempted_req_ids or ())
        facts = {int(id): count for id, count in output.num_scheduled_tokens.items()}
        loads, sends = self._transfers_of(output)
        facts = {"scheduled": list(facts.items()), "preempted": preempted, "loads": loads, "sends": set(sends)}
        facts["drafts"] = {int(id): len(drafts) for id, drafts in output.scheduled_spec_decode_tokens.items()}
        facts["encoded"] = sum(
            self._requests[id].mm_features[place].mm_position.length
            for id, places in output.scheduled_encoder_inputs.items()
            for place in places
        )
        return (output, sampled, loads, sends), facts | self.state()

    def padded(self, flight):
        """Return the requests of a step that have drafts and have just started: nobody proposed these drafts."""
        output, cached = flight[0], flight[0].scheduled_cached_reqs
        started = {one.req_id for one in output.scheduled_new_reqs} | set(cached.resumed_req_ids)
        return {int(id) for id in output.scheduled_spec_decode_tokens if id in started}

    def _transfers_of(self, output):
        """Return the requests that a step begins to load, with all their blocks and those that were here, and to hand over."""
        if (transfers := output.kv_connector_metadata) is None:
            return [], []
        loads = []
        for id, one in transfers.reqs_to_recv.items():
            if one.awaiting_kvs:
                total, missing = len(self._blocks_of(id)), len(one.local_block_ids[0])
                loads.append((int(id), total, total - missing))
        return loads, [int(id) for id in transfers.reqs_to_send]

    def _blocks_of(self, id):
        return self.scheduler.kv_cache_manager.get_block_ids(id)[0]

    def update(self, flight, transferred):
        from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput

        output, sampling, *_ = flight
        ids = list(output.num_scheduled_tokens)
        sampled = {}
        for id in sampling:
            place, asked = self._requests[id].num_output_tokens, self._asked[id]
            stop = place + 1 + transferred.accepted.get(int(id), 0)
            sampled[id] = [asked.answer[min(each, len(asked.answer) - 1)] for each in range(place, stop)]
        bad = [(str(number), num_valid) for number, num_valid in transferred.came if num_valid is not None]
        moved = KVConnectorOutput(
            finished_recving=[str(number) for number, _ in transferred.came],  # a set, whose order is chance, in vLLM
            finished_sending=[str(number) for number in transferred.sent],
            invalid_block_ids={
                block for id, num_valid in bad if num_valid for block in self._blocks_of(id)[num_valid:]
            },
            failed_recving={id for id, num_valid in bad if not num_valid},
        )
        made = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={id: place for place, id in enumerate(ids)},
            sampled_token_ids=[sampled.get(id, []) for id in ids],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
            kv_connector_output=moved if transferred.came or transferred.sent else None,
        )
        outputs = [one for each in self.scheduler.update_from_output(output, made).values() for one in each.outputs]
        finished = {int(one.request_id): str(one.finish_reason) for one in outputs if one.finish_reason is not None}
        speaking = {int(one.request_id): len(one.new_token_ids) for one in outputs if one.new_token_ids}
        if transferred.drafts:
            drafted = [str(number) for number in transferred.drafts]
            drafts = [[1] * count for count in transferred.drafts.values()]
            self.scheduler.update_draft_token_ids(DraftTokenIds(drafted, drafts))
        return {"finished": finished, "speaking": speaking} | self.state()

    def state(self):
        from vllm.v1.request import RequestStatus

        scheduler = self.scheduler
        queues = (scheduler.running, scheduler.waiting, scheduler.kv_holding_waiting)
        running, waiting, holding = ([int(one.request_id) for one in queue] for queue in queues)
        loading = {
            one.request_id for queue in queues for one in queue if one.status == RequestStatus.WAITING_FOR_REMOTE_KVS
        }
        return {
            "running": running,
            "waiting": waiting,
            "holding": holding,
            "loading": {int(id) for id in loading},
            "held": {int(id) for id in scheduler.requests} - {*running, *waiting, *holding},
            "fenced": [len(blocks) for _, blocks in scheduler.deferred_frees],
            # Only loads heed these, which there are not with groups.
            "reserved": 0 if self._has_groups else scheduler._inflight_prefill_reserved_blocks(),
            "free": scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
            "encoder": self._encoder_state(),
        }

    def _encoder_state(self):
        cache = self.scheduler.encoder_cache_manager
        users = {id: len(users) for id, users in cache.cached.items()}
        return users, list(cache.freeable), cache.num_free_slots if users else None

    def events(self):
        """Return the blocks of each event, a removal a block."""
        rows = []
        for event in self.published:
            blocks = list(getattr(event, "block_hashes", ()))
            kind = type(event).__name__
            rows += [(kind, [block]) for block in blocks] if kind == "BlockRemoved" else [(kind, blocks)]
        self.published.clear()
        return rows


def features_of(asked):
    """Return the media of a request as vLLM describes them."""
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    return [
        MultiModalFeatureSpec(
            data=None,
            modality="image",
            identifier=item.id,
            mm_position=PlaceholderRange(offset=item.offset, length=item.num_tokens),
        )
        for item in asked.media
    ]


def groups_of(layout, config):
    """Return vLLM's description of groups of layers."""
    import torch
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        KVCacheGroupSpec,
        MambaSpec,
        SlidingWindowSpec,
    )

    specs = []
    for group in layout.groups:
        layer, size = group.layer, group.block_size
        heads = {"block_size": size, "num_kv_heads": 1, "head_size": int(layer.token), "dtype": torch.float32}
        if layer.is_full:
            specs.append(FullAttentionSpec(**heads))
        elif not layer.token:
            mode = "align" if config.enable_prefix_caching else "none"
            drafts = config.num_speculative_tokens
            state = {"shapes": ((1,),), "dtypes": (torch.float32,), "num_speculative_blocks": drafts}
            specs.append(MambaSpec(block_size=size, mamba_cache_mode=mode, **state))
        elif layer.is_chunked:
            specs.append(ChunkedLocalAttentionSpec(attention_chunk_size=layer.window, **heads))
        else:
            specs.append(SlidingWindowSpec(sliding_window=layer.window, **heads))
    groups = [KVCacheGroupSpec([f"layer {number}"], spec) for number, spec in enumerate(specs)]
    if config.speculative_method == "mtp":  # vLLM marks the group of the drafter's layer, which keeps everything
        for group in [group for group in groups if isinstance(group.kv_cache_spec, FullAttentionSpec)][:1]:
            group.is_eagle_group = True
    return groups


class Drawn(Drafter):
    """Answers with what was drawn for a step."""

    output = None

    def proposed(self, sequence):
        return self.output.drafts[sequence.id]

    def accepted(self, sequence, num_drafts):
        return self.output.accepted[sequence.id]


class Ours:
    """The mocker's scheduler, asked the same."""

    def __init__(self, config, variant):
        self._drafter = Drawn()
        if variant.max_loras is not None:
            config = replace(config, enable_lora=True, max_loras=variant.max_loras)
        self.scheduler = VllmCore(
            config,
            config.num_gpu_blocks,
            None,
            variant.layout,
            drafter=self._drafter,
            num_stages=variant.num_stages,
        )
        self._config = config
        self._sequences = {}
        self._handed_over = []  # since the last step was scheduled

    def add(self, asked):
        tokens = asked.prompt + asked.answer[: asked.stop_after]
        adapter = str(asked.adapter or "")
        self._sequences[asked.number] = sequence = Sequence(
            asked.number,
            num_prompt=len(asked.prompt),
            max_tokens=len(asked.answer),
            stop_after=asked.stop_after,
            chain=BlockChain(
                content_ids(
                    tokens,
                    self._config.block_size,
                    adapter=adapter,
                    num_ahead=self.scheduler.num_named_ahead,
                    media=asked.media,
                )
            ),
            adapter=adapter,
            media=asked.media,
            is_remote_prefill=asked.is_loaded,
            is_remote_decode=asked.is_sent,
            priority=asked.priority,
            arrival=float(asked.arrives) + asked.number / 1e6,
        )
        self.scheduler.add(sequence)

    def abort(self, asked):
        self.scheduler.abort(self._sequences[asked.number])

    def schedule(self):
        scheduler = self.scheduler
        batch = scheduler.schedule()
        loads = [(one.id, one.num_blocks, one.num_cached_blocks) for one in scheduler.outbox.take_loads()]
        sends = {one.id for one in self._handed_over}
        facts = {"scheduled": [], "preempted": [], "loads": loads, "sends": sends, "drafts": {}, "encoded": 0}
        self._handed_over = []
        if batch is not None:
            facts["scheduled"] = [(sequence.id, count) for sequence, count in scheduler.num_new_tokens(batch)]
            facts["preempted"] = sorted(one.id for one in batch.preempted)
            if scheduler.is_counted:
                facts["drafts"] = {one.id: count for one, count in batch.drafts.items()}
                facts["encoded"] = batch.num_encoder_tokens
        return batch, facts | self.state()

    def update(self, batch, transferred):
        scheduler, speaking, finished = self.scheduler, {}, []
        self._drafter.output = transferred
        if batch is not None:
            speaking = {one.id: 1 for one in batch.decodes if scheduler.is_delivered(one)}
            sampled, finished = scheduler.update(batch)
            speaking |= {one.id: 1 for one in sampled}
            if scheduler.is_counted:
                speaking |= {one.id: count for one, count in batch.emitted}
            self._handed_over += [one for one in finished if one in scheduler.retention.kept]
        failed = [
            sequence
            for number, num_valid in transferred.came
            if scheduler.end_load(sequence := self._sequences[number], num_valid)
        ]
        for number in transferred.sent:
            scheduler.retention.release(self._sequences[number])
        reasons = {one.id: one.finish_reason for one in (*finished, *failed)}
        return {"finished": reasons, "speaking": speaking} | self.state()

    def state(self):
        scheduler = self.scheduler
        queues = (scheduler.running, scheduler.queued(), scheduler.holding)
        running, waiting, holding = ([one.id for one in queue] for queue in queues)
        return {
            "running": running,
            "waiting": waiting,
            "holding": holding,
            "loading": {one.id for one in scheduler.holding if one.state in (LOADING, LOADED)},
            "held": {one.id for one in scheduler.retention.kept},
            "fenced": [one.num_blocks for _, one in scheduler.retention.fenced],
            "reserved": scheduler.num_reserved_blocks(),
            "free": scheduler.pool.num_free,
            "encoder": self._encoder_state(),
        }

    def _encoder_state(self):
        encoder = self.scheduler.encoder
        if encoder is None:
            return {}, [], None
        return encoder.users, encoder.freeable, encoder.num_free if encoder.users else None

    def events(self):
        rows = []
        for event in self.scheduler.pool.events:
            if isinstance(event, (BlockRemoved, GroupRemoved)):
                rows += [("BlockRemoved", [key]) for key in event.keys()]  # noqa: SIM118 (an event, not a dict)
            elif isinstance(event, (BlockStored, GroupStored)):
                rows.append(("BlockStored", event.keys()))
            else:
                assert isinstance(event, AllBlocksCleared)
                rows.append(("AllBlocksCleared", []))
        self.scheduler.pool.events = []
        return rows


class Pair:
    """Both, asked the same and compared."""

    def __init__(self, config, model, variant, rng):
        self._theirs, self._ours = VLLM(config, model, variant), Ours(config, variant)
        self._config = config
        self._rng = rng
        self._flights = deque()
        self._names = {}  # vLLM's hash -> our name of that content
        self._depth = variant.num_stages + int(config.async_scheduling)
        self.seen = Counter()

    @property
    def encoder(self):
        return self._ours.scheduler.encoder

    @property
    def has_work(self):
        """Whether vLLM's loop goes on."""
        return bool(self._flights) or self._theirs.scheduler.has_requests()

    def add(self, asked):
        self._theirs.add(asked)
        self._ours.add(asked)

    def abort(self, asked):
        before = self._ours.state()
        self._theirs.abort(asked)
        self._ours.abort(asked)
        assert self._ours.state() == self._theirs.state()
        self.seen += Counter({f"aborted {where}": asked.number in before[where] for where in before if where in QUEUES})

    def reset(self, *, preempts_running):
        num_running = len(self._ours.scheduler.running)
        try:
            is_reset = self._ours.scheduler.reset_prefix_cache(preempts_running=preempts_running)
        except RuntimeError:
            with pytest.raises(RuntimeError):
                self._theirs.scheduler.reset_prefix_cache(reset_running_requests=True)
            is_reset = False
        else:
            assert self._theirs.scheduler.reset_prefix_cache(reset_running_requests=preempts_running) is is_reset
        assert self._ours.state() == self._theirs.state()
        self.seen["reset"] += is_reset
        self.seen["reset while running"] += preempts_running and num_running

    def schedule(self):
        """Schedule a step, if vLLM's loop would; return whether it would schedule another before one is known."""
        if not self._theirs.scheduler.has_requests():
            return False
        (their_flight, theirs), (our_flight, ours) = self._theirs.schedule(), self._ours.schedule()
        assert ours == theirs
        self._flights.append((their_flight, our_flight))
        self.seen += Counter({what: len(ours[what]) for what in ("preempted", "loads", "sends", "fenced")})
        self.seen["encoded"] += ours["encoded"]
        return len(self._flights) < self._depth

    def update(self, workers):
        """End the oldest step, with what the workers report."""
        if not self._flights:
            return
        their_flight, our_flight = self._flights.popleft()
        transferred = workers.report(*their_flight[2:])
        self._draw(their_flight, transferred)
        num_dropped = len(self._ours.scheduler.dropped)
        theirs, ours = self._theirs.update(their_flight, transferred), self._ours.update(our_flight, transferred)
        assert ours == theirs
        self.seen += Counter(ours["finished"].values()) + Counter(dropped=num_dropped)
        self._compare_events()

    def _draw(self, flight, output):
        """Draw what becomes of the drafts of a step that ends, and how many there are for the next."""
        most, padded = self._config.num_speculative_tokens, self._theirs.padded(flight)
        for id, drafts in flight[0].scheduled_spec_decode_tokens.items():
            count = 0 if int(id) in padded else self._rng.choice([0, len(drafts), self._rng.randint(0, len(drafts))])
            output.accepted[int(id)] = count
            self.seen += Counter(drafts=len(drafts), accepted=count)
        self.seen["padded"] += len(padded)
        if most and not self._config.async_scheduling:
            least = 0 if self._config.speculative_method == "ngram" else most
            output.drafts |= {int(id): self._rng.randint(least, most) for id in flight[1]}

    def _compare_events(self):
        theirs, ours = self._theirs.events(), self._ours.events()
        assert [(kind, len(keys)) for kind, keys in ours] == [(kind, len(keys)) for kind, keys in theirs]
        for (_, keys), (_, hashes) in zip(ours, theirs, strict=True):
            for key, block in zip(keys, hashes, strict=True):
                assert self._names.setdefault(block, key) == key


def with_encoder(rng, config):
    """Return settings for a model with an encoder, whose items are small or nearly as large as its cache."""
    budget = config.max_num_batched_tokens
    largest = rng.choice([rng.randint(1, 4), rng.randint(2, budget), budget + rng.randint(1, 8)])
    is_whole = rng.random() < 0.3
    if is_whole:
        largest = min(largest, budget - (config.num_speculative_tokens > 0))
        config = replace(config, long_prefill_token_threshold=0)
    return replace(config, max_tokens_per_mm_item=largest, disable_chunked_mm_input=is_whole)


def with_media(rng, asked, largest):
    """Return requests in whose prompts items, some of them the same ones, take the place of tokens.

    A prompt that goes on after another's often has its items, too.
    """
    sizes = [rng.randint(1, min(largest, 20)) for _ in range(rng.choice([2, 6, 30]))]
    density = rng.choice([0.4, 0.7, 0.95])
    found = []
    for one in asked:
        media, offset, prompt = [], rng.choice([0, 0, 1, 3]), list(one.prompt)
        shared, place = max(
            [(common(one.prompt, other.prompt), n) for n, other in enumerate(asked[: len(found)])] or [(0, 0)]
        )
        if shared and rng.random() < 0.8:
            media = [item for item in found[place].media if item.end <= shared]
            for item in media:
                prompt[item.offset : item.end] = [7] * item.num_tokens
                offset = item.end
        while rng.random() < density:
            fitting = [number for number, size in enumerate(sizes) if offset + size <= len(prompt)]
            if not fitting:
                break
            number = rng.choice(fitting)
            media.append(MediaItem(offset, sizes[number], f"item {number}"))
            prompt[offset : media[-1].end] = [7] * sizes[number]
            offset = media[-1].end + rng.choice([0, 0, 1, 5])
        found.append(replace(one, prompt=prompt, media=tuple(media)))
    return found


def common(prompt, other):
    """Return how many tokens two prompts begin with alike."""
    return next(
        (n for n, (a, b) in enumerate(zip(prompt, other, strict=False)) if a != b), min(len(prompt), len(other))
    )


class EndlessError(Exception):
    """Both do the same, forever."""


def drive(rng, config, model, variant=PLAIN):
    """Let both go through a scenario in the order of vLLM's loop; return how often something rare happened."""
    pair, workers = Pair(config, model, variant, rng), Workers(rng)
    num_groups = 1 if variant.layout is None else len(variant.layout.groups) + 1
    requests = requests_of(rng, config, variant.max_loras, num_groups)
    if config.has_encoder:
        requests = with_media(rng, requests, config.max_tokens_per_mm_item)
    asked = deque(requests)
    aborts = sorted([one for one in asked if one.aborted is not None], key=lambda one: one.aborted)
    # Else vLLM preempts and then fails, which ours refuses before.
    can_preempt_all = not (
        (config.async_scheduling or variant.num_stages > 1) and config.kv_role in ("kv_consumer", "kv_both")
    )
    turn = 0
    while asked or pair.has_work:
        turn += 1
        if turn >= 3000 * variant.num_stages:
            raise EndlessError
        while asked and asked[0].arrives <= turn:
            pair.add(asked.popleft())
        while aborts and aborts[0].aborted < turn:
            pair.abort(aborts.pop(0))
        if rng.random() < 0.03:
            pair.reset(preempts_running=can_preempt_all and rng.random() < 0.5)
        if pair.schedule():
            continue
        while aborts and aborts[0].aborted <= turn and rng.random() < 0.5:
            pair.abort(aborts.pop(0))
        pair.update(workers)
    if pair.encoder is not None:
        pair.seen["found"] += pair.encoder.counts.found
        pair.seen["evicted"] += pair.encoder.counts.computed - len(pair.encoder.users)
    return pair.seen


@pytest.mark.parametrize("kv_role", [None, "kv_consumer", "kv_producer", "kv_both"])
@pytest.mark.parametrize("is_async", [True, False])
def test_both_schedulers_do_the_same(folder, is_async, kv_role):
    happened = Counter(dict.fromkeys(RARE[kv_role, is_async], 0))
    for seed in range(NUM_SCENARIOS):
        rng = random.Random(seed)
        config = config_of(rng, is_async, kv_role)
        try:
            happened += drive(rng, config, folder)
        except Exception as error:
            error.add_note(f"scenario {seed}: {config}")
            raise
    assert set(RARE[kv_role, is_async]) <= set(happened), happened


def has_too_many_adapters(error):
    """Return whether vLLM 0.32 failed itself: it gives the seat of a running request away if that has no token in a step."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return isinstance(error, AssertionError) and "scheduled_loras" in (last.line or "")


@pytest.mark.parametrize(("method", "is_async", "kv_role", "num_stages", "rare"), VARIANTS)
def test_both_do_the_same_with_speculation_adapters_and_stages(folder, method, is_async, kv_role, num_stages, rare):
    happened = Counter(dict.fromkeys(rare, 0))
    for seed in [*range(NUM_SCENARIOS), *FOUND.get((method, is_async, kv_role, num_stages), ())]:
        rng = random.Random(seed)
        config, variant = variant_of(rng, config_of(rng, is_async, kv_role), method, num_stages)
        try:
            happened += drive(rng, config, folder, variant)
        except Exception as error:
            if has_too_many_adapters(error):
                continue
            error.add_note(f"scenario {seed}: {config} {variant}")
            raise
    assert set(rare) <= set(happened), happened


GROUPED = [
    (None, False, ("preempted", "aborted running", "reset")),
    (None, True, ("preempted", "aborted running", "reset")),
    ("ngram", False, DRAFTED),
    ("eagle", True, DRAFTED),
    ("mtp", True, DRAFTED),
]
FOUND_WITH_GROUPS = {(None, True): [522], ("eagle", True): [96], ("mtp", True): [96]}
"""See `FOUND`."""


@pytest.mark.parametrize(("method", "is_async", "rare"), GROUPED)
def test_both_do_the_same_with_groups_of_layers(folder, method, is_async, rare):
    happened = Counter(dict.fromkeys(rare, 0))
    for seed in [*range(NUM_SCENARIOS), *FOUND_WITH_GROUPS.get((method, is_async), ())]:
        rng = random.Random(seed)
        config, _ = variant_of(rng, config_of(rng, is_async, None), method, 1)
        config, variant = with_groups(rng, config)
        try:
            happened += drive(rng, config, folder, variant)
        except Exception as error:
            error.add_note(f"scenario {seed}: {config} {variant}")
            raise
    assert set(rare) <= set(happened), happened


def is_locked(error, config, *, has_states):
    """Return whether vLLM itself never goes on, as it may: docs/media.md says when."""
    keeps_items = config.engine_version == "0.32" and config.speculative_method in ("eagle", "eagle3", "mtp")
    is_endless = isinstance(error, EndlessError)
    return is_endless and (
        (keeps_items and config.num_speculative_tokens) or (has_states and config.disable_chunked_mm_input)
    )


ENCODING = ("encoded", "found", "evicted", "preempted", "aborted running", "reset")
ENCODED = [
    (None, False, None, 1, False, ENCODING),
    (None, True, None, 1, False, ENCODING),
    (None, True, "kv_consumer", 1, False, (*ENCODING, *LOADED_HERE)),
    (None, False, "kv_producer", 1, False, (*ENCODING, "sends")),
    (None, True, None, 2, False, ENCODING),
    ("ngram", False, None, 1, False, (*ENCODING, *DRAFTED, "padded")),
    ("eagle", False, None, 1, False, (*ENCODING, *DRAFTED)),
    ("eagle3", True, None, 1, False, (*ENCODING, *DRAFTED)),
    ("mtp", True, "kv_consumer", 1, False, (*ENCODING, *DRAFTED, *LOADED_HERE)),
    ("draft_model", True, None, 1, False, (*ENCODING, *DRAFTED)),
    (None, True, None, 1, True, ENCODING),
    ("ngram", False, None, 1, True, ENCODING),
]


@pytest.mark.parametrize(("method", "is_async", "kv_role", "num_stages", "has_groups", "rare"), ENCODED)
def test_both_do_the_same_with_media(folder, method, is_async, kv_role, num_stages, has_groups, rare):
    happened = Counter(dict.fromkeys(rare, 0))
    for seed in range(NUM_SCENARIOS):
        rng = random.Random(seed)
        config, variant = variant_of(rng, config_of(rng, is_async, kv_role), method, num_stages)
        if has_groups:
            config, variant = with_groups(rng, config)
        config = with_encoder(rng, config)
        try:
            happened += drive(rng, config, folder, variant)
        except Exception as error:
            if has_too_many_adapters(error) or is_locked(error, config, has_states=has_groups):
                continue
            error.add_note(f"scenario {seed}: {config} {variant}")
            raise
    assert set(rare) <= set(happened), happened
