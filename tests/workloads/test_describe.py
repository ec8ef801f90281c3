"""What `workload inspect` says of a workload."""

from workloads import Request, Workload
from workloads.describe import describe_workload
from workloads.request import Media

CAT, DOG = (Media(offset, 100, name) for offset, name in ((0, "cat"), (100, "dog")))


def test_adapters_and_media_are_counted():
    requests = [
        Request(0.0, 256, 1, (1,), adapter="poems", media=(CAT, DOG)),
        Request(1.0, 256, 1, (2,), adapter="code"),
        Request(2.0, 256, 1, (3,), adapter="code", media=(CAT,)),
        Request(3.0, 256, 1, (4,)),
    ]
    found = describe_workload(Workload("w", 256, requests))
    assert list(found.adapters.items()) == [("code", 2), ("poems", 1)]
    assert found.media == {"requests": 2, "items": 3, "distinct": 2, "tokens": 300}
    found = describe_workload(Workload("w", 256, requests[3:]))
    assert found.adapters == found.media == {}
