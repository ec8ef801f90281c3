"""vLLM's own client and ours choose the same data-parallel rank for each request."""

import random
from collections import Counter
from types import SimpleNamespace

import pytest

from serving.stand_in.balance import Balance
from serving.worker.engine import EngineLoad

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]  # vLLM's imports warn


class Theirs:
    """vLLM's client without its processes."""

    def __init__(self, num_ranks):
        from vllm.v1.engine.core_client import DPLBAsyncMPClient

        self._client = client = DPLBAsyncMPClient.__new__(DPLBAsyncMPClient)
        client.core_engines = list(range(num_ranks))
        client.lb_engines = [[0, 0, 0.0] for _ in range(num_ranks)]
        client.client_count, client.eng_start_index = 1, 0
        client.reqs_in_flight, client.engine_inflight = {}, Counter()

    def send(self, number):
        request = SimpleNamespace(request_id=str(number), data_parallel_rank=None, pooling_params=None)
        return self._client.get_core_engine_for_request(request)

    def end(self, number):
        self._client.engine_inflight[self._client.reqs_in_flight.pop(str(number))] -= 1

    def hear(self, reports):
        self._client.lb_engines = [
            [each.num_waiting, each.num_running, each.kv_active_blocks / each.kv_total_blocks] for each in reports
        ]


@pytest.mark.parametrize("seed", range(30))
def test_both_clients_choose_the_same_ranks(seed):
    rng = random.Random(seed)
    num_ranks = rng.choice([2, 3, 4, 8])
    theirs, ours = Theirs(num_ranks), Balance(num_ranks)
    open_requests = {}
    for number in range(400):
        match rng.choice(["send", "send", "end", "hear"]):
            case "send":
                rank = ours.choose()
                ours.begin(rank)
                assert theirs.send(number) == rank
                open_requests[number] = rank
            case "end" if open_requests:
                done = rng.choice(list(open_requests))
                theirs.end(done)
                ours.end(open_requests.pop(done))
            case "hear":
                usage = rng.choice([0.1, 0.5, 0.7, 1.0])
                reports = [_load(rng, usage) for _ in range(num_ranks)]
                theirs.hear(reports)
                ours.hear(reports)


def _load(rng, usage):
    return EngineLoad(
        num_waiting=rng.randrange(6),
        num_running=rng.randrange(9),
        kv_active_blocks=int(1e6 * usage * rng.random()),
        kv_total_blocks=1_000_000,
    )
