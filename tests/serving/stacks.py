"""Real stacks of processes, for the tests."""

import asyncio
import contextlib
import json
import threading

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from dynabench.live.stack import LocalStack
from mocker import EngineConfig
from mocker.timing.config import TimingConfig, divide
from serving.frontend.config import FrontendConfig
from serving.router import RouterConfig
from serving.worker.config import WorkerConfig
from tests.waiting import PATIENCE_S

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = [
    "once upon a time there was a small server that served many tokens to many people",
    "the quick brown fox jumps over the lazy dog while the router counts cached blocks",
    "what is the capital of south africa and how many people live there today",
] * 20


@contextlib.contextmanager
def running(num_workers=2, frontend=None, router=None, worker=None, engine=None, **options):
    """Run a stack in the background; give it."""
    settings = {"num_gpu_blocks": 2000, "block_size": 16, "speedup_ratio": 20.0} | (engine or {})
    dials, times = divide(settings)
    stack = LocalStack(
        frontend=FrontendConfig(**({"http_port": 0, "router_mode": "kv", "drain_s": 5.0} | (frontend or {}))),
        router=RouterConfig(**(router or {})),
        worker=WorkerConfig(**({"migration_limit": 3, "drain_s": 5.0} | (worker or {}))),
        engine=EngineConfig(**dials),
        timing=TimingConfig(**times),
        num_workers=num_workers,
        **options,
    )
    stack._start_timeout_s = PATIENCE_S
    with in_background(stack):
        yield stack


@contextlib.contextmanager
def in_background(stack):
    """Run a stack in a thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def do(coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(300)

    try:
        do(stack.__aenter__())
        try:
            yield
        finally:
            do(stack.stop())
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def write_model(folder):
    """Write a small model's files: a byte-level BPE tokenizer, a template, a configuration."""
    folder.mkdir()
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id("<|im_end|>")
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 4096, "eos_token_id": end}))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": TEMPLATE, "eos_token": "<|im_end|>", "bos_token": None})
    )
    return folder
