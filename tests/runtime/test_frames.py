"""Frames on a channel, and bytes that are none."""

import pytest

from serving.runtime.messages import Cancel, End, FrameError, Frames, frame

END = frame(End(7, "why", "engine"))


def framed(data):
    return len(data).to_bytes(4, "little") + data


@pytest.mark.parametrize(
    "data",
    [b"", b"\xc1", b"\x90", END[4:-1], END[4:].replace(b"why", b"wh\xff")],
    ids=["no", "what", "[]", "cut", "text"],
)
def test_bytes_that_are_no_frame_are_refused(data):
    with pytest.raises(FrameError):
        Frames(End).feed(framed(data))


def test_frames_come_whole_however_they_are_cut():
    frames = Frames(Cancel)
    assert [frames.feed(bytes([byte])) for byte in frame(Cancel(3))][-1] == [Cancel(3)]
