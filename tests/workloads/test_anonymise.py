from workloads import Request, Workload
from workloads.anonymise import anonymise


def test_an_anonymous_trace_tells_lengths_times_and_sharing_only():
    secret = Workload(
        "w", 4, [Request(0.0, 4, 1, (7000,), "alice", (), 0.0, "text"), Request(1.0, 4, 2, (7000,), "bob")]
    )
    one, two = anonymise(secret)
    assert (one.hash_ids, two.hash_ids, one.session, two.session, one.content) == ((0,), (0,), "0", "1", None)
