"""What `workload inspect` says of a workload."""

from workloads import Request, Workload
from workloads.describe import describe_workload, lengths_of
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


def test_lengths_are_means_with_the_share_of_prompts_that_earlier_ones_have():
    requests = [Request(0.0, 1024, 10, (1, 2, 3, 4)), Request(1.0, 512, 30, (1, 2))]
    said = lengths_of(Workload("w", 256, requests))
    assert said == "mean ISL 768 tokens, 33% of them shared with earlier prompts; mean OSL 20 tokens"
    unknown = lengths_of(Workload("w", 256, requests, knows_prefixes=False))
    assert unknown == "mean ISL 768 tokens, how much of them is shared is not known; mean OSL 20 tokens"
    assert lengths_of(Workload("w", 256, [])) == ""
