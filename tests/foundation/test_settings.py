import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest
from msgspec import Meta

from foundation.settings import Count, NotNegative, Positive, Share, Whole, changed, check_settings, short_value


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    count: Count = 1
    whole: Whole = 0
    limit: Count | None = None
    rate: Positive = 1.0
    delay: NotNegative = 0.0
    share: Share = 0.5
    watermark: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    policy: Literal["fcfs", "priority"] = "fcfs"
    ratio: Positive | Literal["none"] = 1.0
    name: str = ""
    file: Path = Path()
    is_on: bool = True
    files: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        check_settings(self)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("count", 0, "count must be at least 1, not 0"),
        ("count", 1.5, "count must be a whole number of at least 1, not 1.5"),
        ("count", True, "count must be a whole number of at least 1, not True"),
        ("whole", -1, "whole must be at least 0, not -1"),
        ("limit", 0, "limit must be at least 1, not 0"),
        ("rate", 0.0, "rate must be greater than 0, not 0.0"),
        ("rate", math.nan, "rate must be greater than 0, not nan"),
        ("rate", math.inf, "rate must be greater than 0, not inf"),
        ("delay", -0.1, "delay must be at least 0, not -0.1"),
        ("share", 1.1, "share must be from 0 to 1, not 1.1"),
        ("watermark", 1.0, "watermark must be at least 0 and less than 1, not 1.0"),
        ("policy", "lifo", "policy must be one of fcfs, priority, not 'lifo'"),
        ("ratio", "some", "ratio must be a number greater than 0 or none, not 'some'"),
        ("name", 3, "name must be text, not 3"),
        ("file", 3, "file must be a path, not 3"),
        ("is_on", "yes", "is_on must be true or false, not 'yes'"),
    ],
)
def test_a_value_that_its_annotation_excludes_is_refused_with_what_was_expected(name, value, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Settings(**{name: value})


@dataclass(frozen=True, slots=True, kw_only=True)
class Narrower(Settings):
    """Settings that hold settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    inner: Settings = Settings()
    others: tuple[Settings, ...] = ()
    maybe: Settings | None = None

    def __post_init__(self) -> None:
        check_settings(self)


def test_settings_may_hold_settings_also_of_a_subclass():
    inner = Narrower(count=2)
    assert Outer(inner=inner, others=(inner,), maybe=inner).inner.count == 2


def test_values_within_their_annotations_are_kept_as_they_are():
    settings = Settings(limit=None, rate=2, share=1, ratio="none", files=(Path("a"),))
    assert (settings.limit, settings.rate, settings.share, settings.ratio) == (None, 2, 1, "none")
    assert settings.files == (Path("a"),)


def test_what_was_changed_is_what_is_not_at_its_default():
    assert changed(Settings()) == {}
    assert changed(Settings(count=2, delay=0.0, files=(Path("a"),))) == {"count": 2, "files": (Path("a"),)}


def test_a_setting_is_shown_in_few_digits():
    assert [short_value(value) for value in (0.1 + 0.2, 16.0, 16, "kv", True)] == ["0.3", "16", "16", "kv", "True"]
