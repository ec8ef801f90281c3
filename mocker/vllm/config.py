"""Every setting of one engine's scheduler and cache, named as in vLLM."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from msgspec import Meta

from foundation.settings import Count, Whole
from mocker.contract import KvRole
from mocker.tiers.config import OffloadConfig
from mocker.vllm.kv_transfer_config import settings_of
from mocker.vllm.versions import NEWEST, RULES, EngineVersion, Rules

OF_LORA = ("lora_modules", "max_loras", "max_cpu_loras", "max_lora_rank", "lora_load_ms", "lora_read_ms")
"""Settings that have an effect only with adapters."""

Milliseconds = Annotated[float, Meta(ge=0, le=1_000_000)]
"""Up to a quarter of an hour, which no step takes."""

SpeculativeMethod = Literal["ngram", "ngram_gpu", "draft_model", "eagle", "eagle3", "mtp"]
SPECULATIVE_METHODS: tuple[SpeculativeMethod, ...] = get_args(SpeculativeMethod)
AcceptanceMode = Literal["thinking_on", "thinking_off"]

OF_ENCODER = ("disable_chunked_mm_input", "encoding_ms_per_1000_tokens")
"""Settings that need max_tokens_per_mm_item."""

OF_SPECULATION = (
    "speculative_method",
    "draft_model",
    "acceptance_length",
    "acceptance_drafts",
    "acceptance_rates",
    "acceptance_file",
    "acceptance_mode",
    "drafting_ms",
)
"""Settings that need num_speculative_tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(OffloadConfig):
    """Settings of one engine, including its host memory."""

    engine_version: EngineVersion | None = None
    """Version of vLLM whose scheduling rules apply (default: of the engine that --timing-file was measured on, else 0.33,
    the newest whose rules are known)."""

    block_size: Count = 64
    """Tokens in a KV block."""

    num_gpu_blocks: Annotated[int, Meta(ge=2)] | None = None
    """KV blocks of one engine, counted as in vLLM: one is the null block, which is never used (default: as many as fit
    on --gpu beside --model, else 16384)."""

    max_num_seqs: Count = 256
    """Most sequences that may run at once."""

    max_num_active_seqs: Count | None = None
    """Tighter limit on running sequences, as in vLLM."""

    max_num_batched_tokens: Count = 8192
    """Most tokens that one step may compute; prefill chunks and decodes share this budget."""

    max_model_len: Count | None = None
    """Most tokens of a sequence, prompt and output together (default: the context length of --model, else no limit)."""

    enable_prefix_caching: bool = True
    """Reuse the KV blocks of identical prefixes."""

    prefix_cache_retention_interval: Whole | None = 0
    """Tokens between the places at which later prefix hits may end in layers that keep windows or states, beside the ends
    of prompts (0: only there; none: after every block). Other layers keep all."""

    enable_chunked_prefill: bool = True
    """Allow a prompt to be computed over several steps."""

    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    """Order of admission and, reversed, of preemption."""

    async_scheduling: bool | None = None
    """Schedule a step while the one before it runs, as vLLM does: host work overlaps with the GPU's, and the result of
    a step is known one step later (default: as on the engine that --timing-file was measured on, else on)."""

    watermark: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """Share of the blocks to keep free when admitting a sequence while others run."""

    scheduler_reserve_full_isl: bool = True
    """Admit a sequence only if the blocks of its whole prompt are free."""

    long_prefill_token_threshold: Whole = 0
    """Longest prefill chunk while other requests are present (0: no limit)."""

    long_prefill_token_threshold_adaptive: bool = False
    """Raise that threshold to an equal share of the budget when few requests are present."""

    prefill_schedule_interval: Count = 1
    """Steps from one that computes prompts to the next that may, while others decode and no one waits for room (1: no
    such distance)."""

    enable_lora: bool = False
    """Serve LoRA adapters: requests may name one."""

    lora_modules: str = ""
    """Live: names of the adapters that clients may ask for, as models, with commas between them (in virtual time: those that
    requests name)."""

    max_loras: Count = 1
    """Most adapters in one step, each in a slot on the GPU. Requests with another one wait; those behind them may pass."""

    max_cpu_loras: Count | None = None
    """Most adapters in host memory, those on the GPU included (default: max_loras, as in vLLM)."""

    max_lora_rank: Literal[1, 8, 16, 32, 64, 128, 256, 320, 512] = 16
    """Rank of the adapters, from which their size follows, one that vLLM has kernels for."""

    lora_load_ms: Milliseconds | None = None
    """Time to copy an adapter from host memory to the GPU; the step that needs it waits (ms; default: its bytes at
    host_bandwidth_gb_s; without --model, those of an adapter for Llama 3.1 8B)."""

    lora_read_ms: Milliseconds = 100.0
    """Time to read an adapter from disk that is not in host memory; the step waits, too (ms)."""

    num_speculative_tokens: Whole = 0
    """Most drafts of a sequence that one step verifies, beside the token that it computes anyway (0: no speculation)."""

    speculative_method: SpeculativeMethod = "eagle3"
    """What proposes drafts: look-ups in the sequence's own tokens (ngram, which needs synchronous scheduling, or ngram_gpu,
    which does not), a smaller model (draft_model), or layers on top of the model itself (eagle, eagle3, mtp)."""

    draft_model: str | None = None
    """The smaller model of speculative_method draft_model: its Hugging Face id, or a folder or file with a config.json."""

    acceptance_length: Annotated[float, Meta(ge=1)] | None = None
    """Mean tokens of a step that verifies drafts, the model's own included, as an engine measured it with
    acceptance_drafts drafts. Each draft that is reached is then accepted at the same rate."""

    acceptance_drafts: Count | None = None
    """Drafts with which acceptance_length was measured (default: num_speculative_tokens)."""

    acceptance_rates: str | None = None
    """How often each draft is accepted, by position, in place of acceptance_length: such as 0.8,0.5,0.3."""

    acceptance_file: str | None = None
    """File that says the same: one of InferenceX's golden_al_distribution (.yaml), rates by position (.json), or the saved
    metrics of a vLLM server or of our frontend."""

    acceptance_mode: AcceptanceMode = "thinking_on"
    """Which of the curves of a golden_al_distribution to use."""

    drafting_ms: Milliseconds | None = None
    """Time that drafting adds to each step (ms; default: computed for the model on its GPU, and 0 for ngram)."""

    max_tokens_per_mm_item: Count | None = None
    """Tokens of the largest image, or other item, that the model's encoder makes: 576 for LLaVA 1.5, 16384 for Qwen2.5-VL.
    As in vLLM, a step encodes as many tokens as max_num_batched_tokens, or this if it is more, and so many are cached (none:
    a model of text; requests with media are refused)."""

    disable_chunked_mm_input: bool = False
    """Compute the tokens of an item in one step; with models such as Gemma 3, vLLM always does."""

    encoding_ms_per_1000_tokens: Milliseconds = 0.0
    """Time that the encoder adds to a step for each 1,000 tokens that it makes (ms; 0: it takes no time)."""

    kv_role: KvRole | None = None
    """Part in disaggregation: kv_producer computes prompts whose KV other engines read; kv_consumer reads it; kv_both
    does either, request by request (none: neither)."""

    kv_load_failure_policy: Literal["fail", "recompute"] = "fail"
    """What happens to a request whose KV could not be read: it fails, or this engine computes the rest of its
    prompt."""

    kv_transfer_config: str | dict[str, Any] | None = None
    """Host memory as in vLLM's --kv-transfer-config (JSON). It fills in the settings of host memory that are left at their
    defaults."""

    dp_size: Annotated[int, Meta(ge=1, le=1024)] = 1
    """Data-parallel ranks of a worker; each has its own scheduler and cache, and the router chooses between them."""

    @property
    def rules(self) -> Rules:
        """The rules of that version; read them when an engine is made."""
        return RULES[self.engine_version or NEWEST]

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """The adapters that clients may ask for."""
        return tuple(name.strip() for name in self.lora_modules.split(",") if name.strip()) if self.enable_lora else ()

    @property
    def chunk_size(self) -> int | None:
        """Most prompt tokens in one step, if prompts are cut."""
        return self.max_num_batched_tokens if self.enable_chunked_prefill else None

    @property
    def is_async(self) -> bool:
        """Whether a step is scheduled ahead."""
        return self.async_scheduling is not False and not self.has_ngram_drafts

    @property
    def has_drafter(self) -> bool:
        """Whether a model or a layer drafts, with weights and KV of its own; n-grams are only looked up."""
        return self.num_speculative_tokens > 0 and self.speculative_method not in ("ngram", "ngram_gpu")

    @property
    def drafts_from_states(self) -> bool:
        """Whether the drafter reads hidden states that the model computes: EAGLE and MTP do."""
        return self.num_speculative_tokens > 0 and self.speculative_method in ("eagle", "eagle3", "mtp")

    @property
    def has_encoder(self) -> bool:
        """Whether the model takes images or other media."""
        return self.max_tokens_per_mm_item is not None

    @property
    def has_ngram_drafts(self) -> bool:
        """Whether drafts are known only when the step before them is: asynchronous scheduling does not work with them."""
        return self.num_speculative_tokens > 0 and self.speculative_method == "ngram"

    @property
    def max_running(self) -> int:
        """The tighter of both limits on running sequences."""
        return min(self.max_num_active_seqs or self.max_num_seqs, self.max_num_seqs)

    @property
    def is_kv_producer(self) -> bool:
        """Whether other engines may read KV from this one."""
        return self.kv_role in ("kv_producer", "kv_both")

    @property
    def is_kv_consumer(self) -> bool:
        """Whether this engine may read KV from others."""
        return self.kv_role in ("kv_consumer", "kv_both")

    def why_not_encoded(self, num_tokens: int) -> str | None:
        """Return why the encoder takes no item of this many tokens, or None if it does."""
        most = self.max_tokens_per_mm_item
        if most is not None and num_tokens <= most:
            return None
        said = "is not set" if most is None else f"is {most}"
        return (
            f"it has {num_tokens} tokens, and max_tokens_per_mm_item {said}; expected the tokens of the largest item that the "
            f"model's encoder makes, at least {num_tokens}"
        )

    def __post_init__(self) -> None:
        """Refuse values that no engine can run with."""
        self._take_apart()
        OffloadConfig.__post_init__(self)
        for name, off, rule in (
            ("prefill_schedule_interval", 1, self.rules.holds_prefills),
            ("sync_load_budget_bytes", 0, self.rules.loads_within_step),
        ):
            if getattr(self, name) != off and not rule:
                raise ValueError(
                    f"{name} is {getattr(self, name)}, and engine_version is {self.engine_version}, which does not have it; "
                    f"expected {off}, or engine_version {NEWEST}"
                )
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ValueError(
                f"max_cpu_loras is {self.max_cpu_loras}, and max_loras is {self.max_loras}; expected at least as many: those "
                "on the GPU are in host memory, too"
            )
        if self.prefill_schedule_interval > 1 and self.dp_size > 1:
            raise ValueError(
                f"prefill_schedule_interval is {self.prefill_schedule_interval}, and dp_size is {self.dp_size}; expected 1 of "
                "either: how ranks agree on steps with prefills is not simulated"
            )
        self._check_speculation()
        self._check_encoder()
        if self.num_speculative_tokens and self.acceptance_length is not None and self.acceptance_drafts is None:
            object.__setattr__(self, "acceptance_drafts", self.num_speculative_tokens)  # stays if that is varied
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): each running sequence needs one token of the budget"
            )

    def _check_speculation(self) -> None:
        """Refuse values with which vLLM does not start a sequence whose prompt is cached, or fails when it does."""
        needed, threshold = self.num_speculative_tokens + 1, self.long_prefill_token_threshold
        if needed == 1:
            return
        if self.has_ngram_drafts and self.async_scheduling:
            raise ValueError(
                "async_scheduling is true, and speculative_method is ngram; expected async_scheduling false, or another "
                "method: vLLM looks n-grams up in tokens that are known"
            )
        if self.max_num_batched_tokens <= needed:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, and num_speculative_tokens "
                f"{self.num_speculative_tokens}; expected a budget of at least {needed + 1}, for a sequence with all drafts"
            )
        if 0 < threshold < needed:
            raise ValueError(
                f"long_prefill_token_threshold is {threshold}, and num_speculative_tokens {self.num_speculative_tokens}; "
                f"expected 0 or at least {needed}, for a sequence with all drafts"
            )

    def _check_encoder(self) -> None:
        """Refuse values with which an item would never be computed."""
        if self.max_tokens_per_mm_item is None or not self.disable_chunked_mm_input:
            return
        # A draft model takes a token of the budget. One on top of the model sees an item a token early, so that the chunk before
        # the item ends there.
        needed = self.max_tokens_per_mm_item + self.has_drafter
        limits = {"max_num_batched_tokens": self.max_num_batched_tokens}
        if self.long_prefill_token_threshold and (self.rules.holds_whole_items or self.has_drafter):
            limits["long_prefill_token_threshold"] = self.long_prefill_token_threshold
        for name, limit in limits.items():
            if limit < needed:
                because = " and a token for the drafter" if self.has_drafter else ""
                raise ValueError(
                    f"{name} is {limit}, and disable_chunked_mm_input is true; expected at least {needed}, for an item of "
                    f"max_tokens_per_mm_item{because}, or it would never be computed"
                )

    def _take_apart(self) -> None:
        """Replace `kv_transfer_config` by the settings it implies, so that later code reads only those."""
        if self.kv_transfer_config is None:
            return
        fields = EngineConfig.__dataclass_fields__
        for name, value in settings_of(self.kv_transfer_config, block_size=self.block_size).items():
            if getattr(self, name) == fields[name].default:
                object.__setattr__(self, name, value)
        object.__setattr__(self, "kv_transfer_config", None)
