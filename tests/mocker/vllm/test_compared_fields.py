"""What a recording has is only called compared if it is read."""

from pathlib import Path

from dynabench.fidelity.recordings import rows_of
from dynabench.fidelity.vllm import traces
from dynabench.fidelity.vllm.fields import BY_ID, FIELDS, NESTED, not_compared_of_trace

GOLDEN = Path(__file__).parent.parent.parent / "golden"
RECORDINGS = (
    *("vllm-0.33/offload_dev2", "vllm-0.33/offsync33_dev2", "vllm-0.33/eagle33_dev3", "vllm-0.33/hspec_dev1"),
    *("vllm-0.33/lora_dev2", "vllm-0.32-more/pd_prefill_dev5", "vllm-0.32-more/pd_decode_dev5"),
    *("vllm-0.32-more/stop_dev5", "vllm-0.32-media/media_dev1"),
)
"""Together, they have nearly all fields."""
RARE = {"reset_prefix_cache.ok", "update.kv_out.failed_recving", "schedule.kv_meta.not_processed"}
"""Fields without a value in all of these recordings."""
SAID_TWICE = {
    *(
        "add.before_step",
        "abort.before_step",
        "reset_prefix_cache.before_step",
        "drafts.step",
    ),  # the order of rows says it
    "add.max_tokens",  # the scenario says it
}


class Watched(dict):
    """A row, or a part of one, that notes by name what is read of it."""

    def __init__(self, row, name, read):
        super().__init__({key: watched(value, key, f"{name}.{key}", read) for key, value in row.items()})
        self.name, self.read = name, read

    def __getitem__(self, key):
        self.read.add(f"{self.name}.{key}")
        return super().__getitem__(key)

    def get(self, key, default=None):
        self.read.add(f"{self.name}.{key}")
        return super().get(key, default)


def watched(value, key, name, read):
    if key in BY_ID and isinstance(value, dict):
        return {id: watched(part, None, name, read) for id, part in value.items()}
    if isinstance(value, list):
        return [watched(part, None, name, read) for part in value]
    if isinstance(value, dict) and (key is None or key in NESTED):
        return Watched(value, name, read)
    return value


def test_every_field_that_is_listed_as_compared_is_read(monkeypatch):
    monkeypatch.setattr(traces, "not_compared_of_trace", lambda rows: [])  # it reads all of them
    read, found = set(), []
    for name in RECORDINGS:
        path = GOLDEN / f"{name}.sched.jsonl.gz"
        meta, *rows = rows_of(path)
        found += rows
        traces.read_trace(path, [meta, *[Watched(row, row["op"], read) for row in rows]], None)
    listed = {f"{op}.{field}" for op, fields in FIELDS.items() for field in fields}
    monkeypatch.setattr("dynabench.fidelity.vllm.fields.FIELDS", dict.fromkeys(FIELDS, ()))
    monkeypatch.setattr("dynabench.fidelity.vllm.fields.OF_TABLES", ())
    present = set(not_compared_of_trace(found))
    assert listed - present == RARE
    assert (listed & present) - read == SAID_TWICE
