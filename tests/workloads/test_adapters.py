"""Requests that ask for LoRA adapters: read, written and made; KV is shared only by those with the same one."""

from collections import Counter

import msgspec
import numpy as np
import pytest

from workloads import Request, Workload, WorkloadError, formats
from workloads.anonymise import anonymise
from workloads.fit import fit_workload
from workloads.reuse import reuse_of
from workloads.synthesize import SynthConfig, synthesize


def workload(*adapters):
    return Workload("w", 16, [Request(float(n), 32, 4, (7, 8), adapter=name) for n, name in enumerate(adapters)])


def test_the_same_prompt_with_another_adapter_has_other_kv():
    assert reuse_of(workload("", "a", "a", "b", "")).endless_hits().tolist() == [0, 0, 32, 0, 32]
    assert reuse_of(workload("", "", "", "", "")).endless_hits().tolist() == [0, 32, 32, 32, 32]


def test_without_adapters_the_ids_of_kv_are_the_workloads_own():
    columns = workload("", "").columns
    assert columns.kv_ids is columns.ids
    assert columns.adapters == []


def test_ids_of_kv_are_apart_whatever_the_ids_are():
    requests = [Request(0.0, 32, 1, (1 << 70, -3), adapter=name) for name in ("x", "y", "", "x")]
    columns = Workload("w", 16, requests).columns
    assert columns.adapters == ["x", "y"]
    rows = [tuple(columns.kv_ids[start : start + 2].tolist()) for start in columns.starts[:-1]]
    assert rows[0] == rows[3]
    assert len({*rows[0], *rows[1], *rows[2]}) == 6


@pytest.mark.parametrize("name", ["dynabench", "mooncake", "mooncake-sessions"])
def test_formats_that_keep_adapters_give_them_back(tmp_path, name):
    path = tmp_path / "w.jsonl"
    before = Workload("w", 512, [Request(float(n), 512, 4, (n,), f"s{n}", adapter=a) for n, a in enumerate(["", "a"])])
    assert "adapters" not in formats.lost(before, name)
    with path.open("wb") as file:
        formats.FORMATS[name].write(before, file)
    assert [request.adapter for request in formats.read(path)] == ["", "a"]


def test_formats_without_adapters_say_that_they_are_lost():
    assert "adapters" in formats.lost(workload("", "a"), "bailian")
    assert "adapters" not in formats.lost(workload("", ""), "bailian")


def test_a_log_of_any_kind_may_have_a_column_of_adapters(tmp_path):
    (tmp_path / "log.csv").write_text("t,i,o,model\n0,10,5,poems\n1,10,5,\n")
    found = formats.read(tmp_path / "log.csv", columns="arrival=t:s,input=i,output=o,adapter=model")
    assert [request.adapter for request in found] == ["poems", ""]


def test_adapters_are_drawn_for_whole_sessions_and_change_nothing_else():
    settings = {"requests": 4000, "turns": 2}
    plain, made = synthesize(SynthConfig(**settings)), synthesize(SynthConfig(**settings, adapters=4))
    assert [msgspec.structs.replace(request, adapter="") for request in made] == plain
    shares = np.array([count for _, count in sorted(Counter(request.adapter for request in made).items())]) / 4000
    assert shares == pytest.approx([0.48, 0.24, 0.16, 0.12], abs=0.03)  # 1, 1/2, 1/3 and 1/4 of their sum


def test_without_skew_all_adapters_are_alike():
    made = synthesize(SynthConfig(requests=4000, adapters=4, adapter_skew=0))
    assert Counter(request.adapter for request in made).most_common()[-1][1] > 900


def test_names_of_adapters_are_not_in_an_anonymous_workload():
    assert [request.adapter for request in anonymise(workload("secret", "", "other", "secret"))] == [
        "adapter-0",
        "",
        "adapter-1",
        "adapter-0",
    ]


def test_a_fit_of_a_workload_with_adapters_is_refused():
    with pytest.raises(WorkloadError, match="ask for 1 adapters, which a fit would lose"):
        fit_workload(workload(*["a"] * 30))
