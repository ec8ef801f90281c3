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
