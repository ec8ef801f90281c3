import msgspec
import pytest

from serving.runtime.address import EndpointAddress, Instance


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("dyn://a.b.c", ("a", "b", "c")),
        ("dyn://test", ("dynamo", "test", "generate")),
        ("a/b", ("a", "b", "generate")),
        ("dyn://", ("dynamo", "backend", "generate")),
        ("dyn://a.b.c.d", ("a", "b", "c_d")),
        (" dyn://Llama 3.1/x ", ("llama_3", "1", "x")),
    ],
)
def test_missing_parts_of_an_address_get_defaults(text, expected):
    assert EndpointAddress.parse(text) == expected


def test_an_instances_key_lies_below_its_endpoints_prefix():
    instance = Instance("a", "b", "c", 255, "unix:/x")
    assert instance.key == "v1/instances/a/b/c/ff"
    assert instance.key.startswith(EndpointAddress("a", "b", "c").prefix)


@pytest.mark.parametrize("transport", ["unix:/x", "tcp:127.0.0.1:80", "tcp:::1:80", "nats:dyn.process.1"])
def test_an_instance_is_read_from_its_own_key(transport):
    instance = Instance("a", "b", "c", 255, transport)
    assert Instance.parse(instance.key, msgspec.json.encode(instance)) == instance
    with pytest.raises(ValueError, match="it belongs under the key v1/instances/a/b/c/ff"):
        Instance.parse("v1/instances/a/b/c/fe", msgspec.json.encode(instance))


@pytest.mark.parametrize(
    "transport", ["", "unix:", "ftp:x", "tcp:x", "tcp::1", "tcp:x:0", "tcp:x:65536", "tcp:x:²", "unix:\0"]
)
def test_an_instance_that_nobody_could_call_is_refused(transport):
    instance = Instance("a", "b", "c", 255, transport)
    with pytest.raises(ValueError, match="expected unix:PATH, tcp:HOST:PORT or nats:SUBJECT"):
        Instance.parse(instance.key, msgspec.json.encode(instance))
