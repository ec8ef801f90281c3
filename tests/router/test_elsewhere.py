"""Where router modes exist outside dynabench."""

import pytest

from serving.router import ROUTER_MODES, RouterConfig
from serving.router.elsewhere import ELSEWHERE, name_elsewhere


def test_what_exists_elsewhere_is_a_mode_here():
    assert set(ELSEWHERE) <= set(ROUTER_MODES)


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("p2c", "--router-mode power-of-two"),
        ("least-loaded", "AIBrix routing-strategy: least-request"),
        ("session", "--routing-logic session --session-key HEADER"),
        ("chwbl", "KubeAI strategy: PrefixHash"),
        ("prodstack-loadaware", "vLLM production-stack --routing-logic loadaware"),
        ("preble-e2", "AIBrix routing-strategy: prefix-cache-preble"),
        ("llumnix", "Llumnix --enable-cache-aware-scheduling"),
        ("dynamo-kv-p8", "NVIDIA Dynamo --router-mode kv --router-prefill-load-scale 8"),
        ("kv+stale(200)", "NVIDIA Dynamo --router-mode kv"),
        ("kv+temp(0.5)", "NVIDIA Dynamo --router-mode kv --router-temperature 0.5"),
        ("kv+stale(200)+temp(0.5)", "NVIDIA Dynamo --router-mode kv --router-temperature 0.5"),
        ("llumnix+temp(0)", "Llumnix"),
    ],
)
def test_a_mode_is_named_with_its_flags(mode, said):
    assert said in name_elsewhere(mode)


@pytest.mark.parametrize(
    "mode",
    [
        "llumnix+temp(0.5)",
        "marginal-all",
        "dynamo-lmetric",
        "lmetric-new",
        "kv+late(8192)",
        "kv+eps(5)",
        "own.py:Mine",
        "own.py",
    ],
)
def test_a_mode_that_no_other_router_has_in_a_release_has_no_name(mode):
    assert name_elsewhere(mode) is None


def test_settings_of_the_router_are_flags_of_dynamo_alone():
    config = RouterConfig(kv_overlap_score_weight=4.0, use_kv_events=False)
    assert name_elsewhere("kv", config) == (
        "NVIDIA Dynamo --router-mode kv --router-prefill-load-scale 4 --no-router-kv-events"
    )
    assert "Dynamo --router-mode random," in name_elsewhere("random", config)
    assert name_elsewhere("random", config) == name_elsewhere("random")


def test_a_temperature_that_is_added_replaces_that_of_the_settings_and_only_dynamo_has_one():
    config = RouterConfig(router_temperature=0.25)
    assert name_elsewhere("kv", config).endswith(" --router-temperature 0.25")
    assert name_elsewhere("kv+temp(0.5)", config).endswith(" --router-temperature 0.5")
    assert name_elsewhere("kv+temp(0)", config) == "NVIDIA Dynamo --router-mode kv"
    assert name_elsewhere("sgl-cache-aware", config) is None
