import pytest

from serving.engines.mock.engine import EngineConfig
from serving.stand_in.config import ApiConfig, KvEventsConfig, LoraConfig, RanksConfig, StandInConfig
from serving.stand_in.faults.config import FaultConfig


def test_a_stand_in_is_served_under_its_models_name_if_it_has_no_other():
    assert StandInConfig(model="org/model").served_model_names == ("org/model",)
    assert StandInConfig(model="org/model", served_model_names=("a", "b")).served_model_names == ("a", "b")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ApiConfig(enable_auto_tool_choice=True), "expected --tool-call-parser"),
        (lambda: ApiConfig(tool_call_parser="nonsense"), "nonsense"),
        (lambda: LoraConfig(max_loras=0), "max_loras must be at least 1"),
        (lambda: StandInConfig(engine=EngineConfig(dp_size=2), ranks=RanksConfig(size=3, first=2)), "more than"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "settings", [{}, {"kv_events": KvEventsConfig(), "engine": EngineConfig(enable_prefix_caching=False)}]
)
def test_faults_of_kv_events_need_kv_events(settings):
    with pytest.raises(
        ValueError, match="--fault kv_events_swap: no KV events are published; expected --kv-events-config"
    ):
        StandInConfig(model="m", faults=FaultConfig(kv_events_swap=0.1), **settings)
