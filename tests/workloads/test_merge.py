from workloads import Request, Workload
from workloads.describe import describe_workload
from workloads.merge import merge_workloads


def test_merged_workloads_share_only_if_they_are_parts_of_one(workload):
    parts = [Workload("a", 512, workload.requests[:700]), Workload("b", 512, workload.requests[700:])]
    apart, together = merge_workloads(parts), merge_workloads(parts, is_shared=True)
    assert [request.hash_ids for request in together] == [request.hash_ids for request in workload]
    assert describe_workload(apart).endless_cache_hit_share < describe_workload(together).endless_cache_hit_share
    assert [request.arrival_s for request in apart] == sorted(request.arrival_s for request in workload)


def test_merging_renumbers_what_requests_wait_for():
    one = Workload("a", 64, [Request(0.0, 1, 1, (0,), "s"), Request(2.0, 1, 1, (1,), "s", (0,))])
    merged = merge_workloads([one, Workload("b", 128, [Request(1.0, 100, 1, (0,))])])
    assert [request.after for request in merged] == [(), (), (0,)]
    assert merged.block_size == 64


def test_parts_of_one_share_what_has_the_same_start():
    parts = [Workload("a", 64, [Request(0.0, 128, 1, ids)]) for ids in ((1, 2), (3, 2), (1, 2))]
    one, two, three = (request.hash_ids for request in merge_workloads(parts, is_shared=True))
    assert one == three
    assert not set(one) & set(two)
