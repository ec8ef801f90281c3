"""What workers report, under the names that the frontend gives it."""

from types import SimpleNamespace

from serving.frontend.pool_metrics import pool_gauges
from serving.routing.placement import RankAddress
from serving.worker.engine import RankDrafts
from serving.worker.load_reports import LoadReport


def test_drafts_have_the_counters_of_vllm():
    drafts = RankDrafts(num_drafts=10, num_draft_tokens=30, num_accepted=(8, 5, 2), num_batches=4)
    report = LoadReport(7, 0, 0, 0, 0, 0, 0, 0, 0, drafts=drafts)
    card = SimpleNamespace(name="m", role="aggregated")
    pool = SimpleNamespace(card=card, loads=lambda: {RankAddress(7, 0): report}, books=list)
    models = SimpleNamespace(pools=lambda: [pool], num_workers=dict)
    counted = {
        (sample.name, sample.labels.get("position")): sample.value
        for metric in pool_gauges(models)
        for sample in metric.samples
        if "spec_decode" in sample.name
    }
    name = "dynamo_component_spec_decode_num_"
    assert counted == {
        (f"{name}drafts_total", None): 10,
        (f"{name}draft_tokens_total", None): 30,
        (f"{name}batches_total", None): 4,
        (f"{name}accepted_tokens_total", None): 15,
        (f"{name}accepted_tokens_per_pos_total", "0"): 8,
        (f"{name}accepted_tokens_per_pos_total", "1"): 5,
        (f"{name}accepted_tokens_per_pos_total", "2"): 2,
    }
