"""Trouble that lasts is logged once, again if it changes, and once more when it is over."""

import logging

from serving.runtime.alarm import Alarm


def test_trouble_is_logged_when_it_begins_changes_and_ends(caplog):
    caplog.set_level("INFO")
    alarm = Alarm(logging.getLogger("a.door"), "the door is shut again")
    for trouble in ("", "the door is open", "the door is open", "the door is gone", "", ""):
        alarm.update(trouble)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "the door is open"),
        ("WARNING", "the door is gone"),
        ("INFO", "the door is shut again"),
    ]
