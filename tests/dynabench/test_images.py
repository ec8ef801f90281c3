"""A workload's media as images in data URLs."""

import base64
import json
import struct
import zlib

import pytest

from dynabench.arm import ClientConfig, Run, Settings
from dynabench.images import ImageSize, data_url, mosaic
from dynabench.live.bodies import Bodies, MeasuredServer
from dynabench.live.run import measure
from tests.support.strange_server import answers, strange_server
from workloads import Request, Workload
from workloads.request import Media

URL = "http://127.0.0.1:1"
MEDIA = (Media(2, 3, "cat"), Media(5, 2, "dog"), Media(9, 3, "cat"))
SHOWN = Request(0.0, 12, 2, (0, 1, 2), media=MEDIA)


def pixels(image):
    """Return width, height and rows of an image."""
    parts, place = {}, 8
    while place < len(image):
        (length,) = struct.unpack(">I", image[place : place + 4])
        kind, data = image[place + 4 : place + 8], image[place + 8 : place + 8 + length]
        assert struct.unpack(">I", image[place + 8 + length : place + 12 + length]) == (zlib.crc32(kind + data),)
        parts[kind], place = data, place + 12 + length
    width, height = struct.unpack(">II", parts[b"IHDR"][:8])
    rows = zlib.decompress(parts[b"IDAT"])
    return width, height, [rows[start : start + 1 + 3 * width] for start in range(0, len(rows), 1 + 3 * width)]


@pytest.mark.parametrize(("width", "height"), [(512, 512), (1, 1), (33, 7)])
def test_an_image_has_its_size_and_a_colour_for_each_pixel(width, height):
    found = pixels(mosaic("a", ImageSize(width, height)))
    assert found[:2] == (width, height)
    assert len(found[2]) == height
    assert all(len(row) == 1 + 3 * width for row in found[2])


def test_images_are_equal_for_equal_names_only():
    size = ImageSize.parse("64x32")
    assert data_url("a", size) == data_url("a", size) != data_url("b", size)
    assert base64.b64decode(data_url("a", size).removeprefix("data:image/png;base64,")) == mosaic("a", size)


@pytest.mark.parametrize("text", ["512", "0x5", "5x", "9000x10", "axb", "5x5x5", "-1x5"])
def test_a_size_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match=f"image_size is '{text}'; expected WIDTHxHEIGHT"):
        ClientConfig(url=URL, api="chat", image_size=text)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"url": URL}, "image_size is '8x8', but only chat, responses, messages have images"),
        ({"api": "chat"}, "image_size applies to another server"),
        ({"url": URL, "api": "chat", "history": "server"}, "turns with images cannot repeat answers"),
    ],
)
def test_images_need_an_api_that_has_them(settings, problem):
    with pytest.raises(ValueError, match=problem):
        ClientConfig(image_size="8x8", **settings)


def parts_of(api, salt=""):
    target = MeasuredServer(URL, "m", api=api, image_size=ImageSize(8, 8))
    body = json.loads(Bodies(target, 4, salt).of(SHOWN))
    [message] = body["input" if api == "responses" else "messages"]
    return message["content"]


def test_media_are_images_between_the_words_of_the_prompt():
    parts = parts_of("chat")
    assert [part["type"] for part in parts] == ["text", "image_url", "image_url", "text", "image_url"]
    assert [len(part["text"].split()) for part in parts if part["type"] == "text"] == [2, 2]
    images = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
    assert images[0] == images[2] != images[1]
    assert images[0] != parts_of("chat", salt="another run")[1]["image_url"]["url"]


@pytest.mark.parametrize(
    ("api", "kinds"), [("responses", {"input_text", "input_image"}), ("messages", {"text", "image"})]
)
def test_media_are_images_in_every_api_that_has_them(api, kinds):
    assert {part["type"] for part in parts_of(api)} == kinds


def test_a_workload_with_media_is_sent_as_images():
    with strange_server(answers, seen := []) as url:
        client = ClientConfig(url=url, api="chat", image_size="8x8")
        measure(Run.alone(Settings(client=client)), Workload("w", 4, [SHOWN]))
    assert sum(part["type"] == "image_url" for part in seen[0]["messages"][0]["content"]) == 3
