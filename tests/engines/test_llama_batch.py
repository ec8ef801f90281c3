"""The thread that runs llama.cpp, on a stand-in of its package: what fails there is known outside."""

import ctypes
import queue

from serving.engines.llamacpp.batch import LlamaBatcher, LlamaJob


class Batch:
    def __init__(self, capacity):
        self.token, self.pos, self.n_seq_id, self.logits = ([0] * capacity for _ in range(4))
        self.seq_id = [[0] for _ in range(capacity)]
        self.n_tokens = 0


class BrokenLlama:
    """The functions of llama_cpp that a batch needs; the first batch finds no memory."""

    llama_get_memory = llama_get_model = llama_model_get_vocab = staticmethod(lambda of: of)
    llama_vocab_n_tokens = staticmethod(lambda vocab: 32)
    llama_n_batch = staticmethod(lambda context: 8)
    llama_batch_init = staticmethod(lambda capacity, *_: Batch(capacity))
    llama_batch_free = llama_sampler_free = staticmethod(lambda _: None)
    llama_memory_seq_rm = staticmethod(lambda *_: True)
    llama_sampler_chain_default_params = staticmethod(lambda: None)
    llama_sampler_chain_init = staticmethod(lambda _: object())
    llama_sampler_chain_add = staticmethod(lambda *_: None)
    llama_sampler_init_temp = llama_sampler_init_greedy = staticmethod(lambda *_: object())
    llama_sampler_init_dist = staticmethod(lambda seed: object())

    @staticmethod
    def llama_decode(context, batch):
        raise MemoryError("no memory for this batch")


def test_a_batch_that_fails_is_the_failure_of_the_engine():
    batcher = LlamaBatcher(BrokenLlama(), ctypes.c_void_p(1), num_slots=1, block_size=4, post=lambda *_: None)
    sent = queue.Queue()
    batcher.submit(LlamaJob([1, 2, 3], max_tokens=4, min_tokens=0, ends=frozenset(), sampling={}, send=sent.put))
    assert str(batcher.failure.result(60)) == "no memory for this batch"
    batcher.close()
