"""Predict a series of numbers, one for each interval.

A series starts with its first value that is not 0. No prediction is below 0.
"""

import math
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

from foundation.extras import install
from serving.planner.config import PlannerConfig


class Predictor:
    """A predictor of a series; this one repeats the last value."""

    description: ClassVar[str] = "the last value"
    min_points: ClassVar[int] = 1
    """With fewer values than this, the prediction is the last value."""

    def __init__(self, config: PlannerConfig, step_s: float) -> None:
        """Prepare for a series with a value every `step_s`."""
        self.values: list[float] = []

    def add(self, value: float) -> None:
        """Record the next value."""
        value = 0.0 if math.isnan(value) else value
        if value or self.values:
            self.values.append(value)
            self._note(value)

    def predict(self, steps: int = 1) -> float:
        """Predict the value `steps` intervals after the last."""
        if len(self.values) < self.min_points:
            return self.values[-1] if self.values else 0.0
        return max(0.0, self._predict(steps))

    def _note(self, value: float) -> None:
        """Follow a value."""

    def _predict(self, steps: int) -> float:
        return self.values[-1]


class Seasonal(Predictor):
    """The value one season earlier, scaled by the last few values over those one season earlier."""

    description: ClassVar[str] = (
        "the value a season before (season_s), times the last 5 values / those a season before them"
    )
    num_compared: ClassVar[int] = 5

    def __init__(self, config: PlannerConfig, step_s: float) -> None:
        super().__init__(config, step_s)
        self._period = max(1, round(config.season_s / step_s))

    def _predict(self, steps: int) -> float:
        place = len(self.values) - 1 + steps
        place -= self._period * math.ceil(steps / self._period)
        if place < 0:
            return self.values[-1]
        number = min(self.num_compared, len(self.values) - self._period)
        before = sum(self.values[-self._period - number :][:number])
        return self.values[place] * (sum(self.values[-number:]) / before if before and number else 1.0)


class Kalman(Predictor):
    """A level and a trend, followed by a Kalman filter, as in NVIDIA Dynamo: Q = diag(1, 0.1), R = 10, P0 = 1000 I."""

    description: ClassVar[str] = "level + trend of a Kalman filter (Dynamo's: Q 1 and 0.1, R 10), from 5 values on"
    min_points: ClassVar[int] = 5
    level_noise: ClassVar[float] = 1.0
    trend_noise: ClassVar[float] = 0.1
    noise: ClassVar[float] = 10.0

    def __init__(self, config: PlannerConfig, step_s: float) -> None:
        super().__init__(config, step_s)
        self._level, self._trend = 0.0, 0.0
        self._covariance = (1000.0, 0.0, 1000.0)
        """The covariances: level with level, level with trend, trend with trend."""

    def _note(self, value: float) -> None:
        if len(self.values) == 1:
            self._level = value
            return
        both, cross, trend = self._covariance
        both, cross, trend = both + 2 * cross + trend + self.level_noise, cross + trend, trend + self.trend_noise
        gain, gain_of_trend = both / (both + self.noise), cross / (both + self.noise)
        surprise = value - (self._level + self._trend)
        self._level += self._trend + gain * surprise
        self._trend += gain_of_trend * surprise
        self._covariance = ((1 - gain) * both, (1 - gain) * cross, trend - gain_of_trend * cross)

    def _predict(self, steps: int) -> float:
        return self._level + steps * self._trend


class Arima(Predictor):
    """The ARIMA model with the lowest AIC of p, q <= 2 and d <= 1, chosen once, of log(1 + y) if it has p = q = 0."""

    description: ClassVar[str] = "ARIMA, orders by AIC (p, q <= 2, d <= 1; log(1 + y) if p = q = 0), from 5 values on"
    min_points: ClassVar[int] = 5

    def __init__(self, config: PlannerConfig, step_s: float) -> None:
        super().__init__(config, step_s)
        self._model = _needed("arima", _statsmodels)
        self._fitted: Any = None
        self._is_log = False
        self._num_seen = 0

    def _predict(self, steps: int) -> float:
        if len(set(self.values)) == 1:
            return self.values[-1]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of fits that did not converge: others, or the last value, are better
            try:
                self._fit()
                forecast = float(self._fitted.forecast(steps)[-1])
            except (ValueError, ArithmeticError, IndexError):
                return self.values[-1]
        return math.expm1(min(forecast, 700.0)) if self._is_log else forecast

    def _fit(self) -> None:
        """Choose the orders, or follow the values since then."""
        if self._fitted is None:
            self._fitted = self._chosen(self.values)
            if self._fitted.model.order[0] == self._fitted.model.order[2] == 0:
                self._is_log = True
                self._fitted = self._chosen([math.log1p(value) for value in self.values])
        elif self._num_seen < len(self.values):
            new = self.values[self._num_seen :]
            self._fitted = self._fitted.append([math.log1p(each) for each in new] if self._is_log else new)
        self._num_seen = len(self.values)

    def _chosen(self, values: list[float]) -> Any:
        fits = []
        for order in ((p, d, q) for d in (0, 1) for p in range(3) for q in range(3)):
            try:
                fits.append(self._model(values, order=order, trend="n" if order[1] else "c").fit())
            except (ValueError, ArithmeticError, IndexError):
                continue
        return min(fits, key=lambda fit: (not fit.mle_retvals.get("converged", True), float(fit.aic)))


class Prophet(Predictor):
    """Meta's Prophet, fitted to the last 50 values each time."""

    description: ClassVar[str] = "Prophet, fitted to the last 50 values each time, from 5 values on"
    min_points: ClassVar[int] = 5
    window: ClassVar[int] = 50

    def __init__(self, config: PlannerConfig, step_s: float) -> None:
        super().__init__(config, step_s)
        self._make, self._table = _needed("prophet", _prophet)
        self._step_s = step_s

    def _predict(self, steps: int) -> float:
        first = max(0, len(self.values) - self.window)
        places = range(first, len(self.values))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = self._make()
            model.fit(self._table({"ds": [self._date(place) for place in places], "y": self.values[first:]}))
            forecast = model.predict(self._table({"ds": [self._date(len(self.values) - 1 + steps)]}))
        return float(forecast["yhat"].iloc[0])

    def _date(self, place: int) -> Any:
        import datetime

        return datetime.datetime(2024, 1, 1) + datetime.timedelta(seconds=place * self._step_s)


PREDICTORS: dict[str, type[Predictor]] = {
    "constant": Predictor,
    "seasonal": Seasonal,
    "kalman": Kalman,
    "arima": Arima,
    "prophet": Prophet,
}
"""Every predictor by name."""


def _needed(name: str, load: Callable[[], Any]) -> Any:
    """Load what a predictor needs.

    Raises:
        ValueError: it is not installed.
    """
    try:
        return load()
    except ImportError as error:
        raise ValueError(
            f"load_predictor {name} needs {(error.name or name).partition('.')[0]}: install it with {install('forecast')}"
        ) from error


def _statsmodels() -> Any:
    from statsmodels.tsa.arima.model import ARIMA

    return ARIMA


def _prophet() -> Any:
    import pandas
    import prophet

    return prophet.Prophet, pandas.DataFrame
