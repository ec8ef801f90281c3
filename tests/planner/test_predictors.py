import math
import sys

import pytest

from serving.planner.config import PlannerConfig
from serving.planner.predictors import PREDICTORS


def predictor(name: str, *values: float, step_s: float = 60.0, **settings):
    made = PREDICTORS[name](PlannerConfig(**settings), step_s)
    for value in values:
        made.add(value)
    return made


@pytest.mark.parametrize(("values", "forecast"), [((10, 12, 14, 16, 18), 19.9896), ((10, 10, 10, 10, 30), 30.2331)])
def test_kalman_predicts_what_dynamo_predicts(values, forecast):
    """C13."""
    assert predictor("kalman", *values).predict() == pytest.approx(forecast, abs=5e-5)


def test_a_second_prediction_is_the_same():
    made = predictor("kalman", 10, 12, 14, 16, 18)
    assert made.predict() == made.predict()


def test_a_trend_goes_on():
    made = predictor("kalman", *range(10, 200, 2))
    assert made.predict(10) == pytest.approx(198 + 20, abs=0.1)


def test_no_prediction_is_negative():
    assert predictor("kalman", 50, 40, 30, 20, 10, 0).predict(5) == 0


@pytest.mark.parametrize("name", ["constant", "seasonal", "kalman"])
def test_too_few_values_predict_the_last_one(name):
    assert predictor(name).predict() == 0
    assert predictor(name, 3, 7).predict(4) == 7


def test_zeros_before_the_first_request_are_left_out():
    assert predictor("constant", 0, 0, 5, 0).values == [5, 0]


def test_a_value_that_is_not_a_number_counts_as_zero():
    assert predictor("constant", 5, math.nan).predict() == 0


def test_a_season_repeats_at_the_level_of_now():
    made = predictor("seasonal", *(10, 20, 40, 20, 10, 5), *(20, 40, 80), season_s=6, step_s=1)
    assert made.predict(1) == 2 * 20
    assert made.predict(3) == 2 * 5
    assert made.predict(5) == 2 * 40


@pytest.mark.parametrize(("name", "package"), [("arima", "statsmodels"), ("prophet", "prophet")])
def test_a_package_that_is_not_installed_is_named_with_the_way_out(name, package, monkeypatch):
    for module in [each for each in sys.modules if each.split(".")[0] == package] + [package]:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        ValueError, match=rf"load_predictor {name} needs {package}: install it with pip install 'prophet"
    ):
        predictor(name)


def test_arima_follows_a_trend():
    pytest.importorskip("statsmodels")
    made = predictor("arima", *(100 + 5 * i + (-1) ** i for i in range(30)))
    assert made.predict() == pytest.approx(250, abs=15)
    made.add(250)
    assert made.predict() == pytest.approx(255, abs=15)


def test_arima_of_equal_values_is_that_value():
    pytest.importorskip("statsmodels")
    assert predictor("arima", *[7] * 10).predict() == 7


def test_prophet_follows_a_trend():
    pytest.importorskip("prophet")
    assert predictor("prophet", *range(100, 200, 5)).predict() == pytest.approx(200, rel=0.2)
