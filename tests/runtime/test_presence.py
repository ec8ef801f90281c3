"""Which processes of a cluster live, as one of them sees their Leases and EndpointSlices."""

import msgspec
import pytest

from serving.runtime.kubernetes.ages import Ages
from serving.runtime.kubernetes.objects import EndpointSlice, Lease
from serving.runtime.kubernetes.presence import Presence


def lease(renewed, ttl_s=10):
    metadata = {"name": "x", "ownerReferences": [{"kind": "Pod", "name": "x", "uid": "pod"}]}
    spec = {"leaseDurationSeconds": ttl_s, "renewTime": f"{renewed}"}
    return msgspec.convert({"metadata": metadata, "spec": spec}, Lease)


def versioned(name, version):
    return msgspec.convert({"metadata": {"name": name, "resourceVersion": version}}, Lease)


def slices(*conditions):
    endpoints = [{"conditions": each, "targetRef": {"kind": "Pod", "uid": "pod"}} for each in conditions]
    return msgspec.convert({"metadata": {"name": "s"}, "endpoints": endpoints}, EndpointSlice)


def watched():
    """Return what process `me` sees, with another one."""
    seen = Presence("me")
    seen.on_lease(0.0, "me", lease(0))
    seen.on_lease(0.0, "you", lease(0))
    return seen


def test_who_does_not_renew_its_lease_is_dead_once_it_has_run_out():
    seen = watched()
    for now in (3.0, 6.0, 9.0):
        seen.on_lease(now, "me", lease(now))
    assert seen.living() == ["me", "you"]
    seen.on_lease(12.0, "me", lease(12))
    assert seen.living() == ["me"]
    seen.on_lease(13.0, "you", lease(13))  # it hung
    assert seen.living() == ["me", "you"]


def test_a_lease_that_is_seen_again_as_it_was_is_not_renewed():
    seen = watched()
    for now in (4.0, 8.0, 12.0):
        seen.on_lease(now, "me", lease(now))
        seen.on_lease(now, "you", lease(0))
    assert seen.living() == ["me"]


def test_nobody_dies_while_we_see_nothing_and_all_get_a_leases_time_afterwards():
    seen = watched()
    assert seen.living() == ["me", "you"]  # however late it is
    seen.on_lease(100.0, "me", lease(100))
    assert seen.living() == ["me", "you"]
    for now in (104.0, 108.0, 111.0):
        seen.on_lease(now, "me", lease(now))
    assert seen.living() == ["me"]


def test_who_was_dead_before_we_saw_nothing_stays_so():
    seen = watched()
    for now in (3.0, 6.0, 9.0, 12.0):
        seen.on_lease(now, "me", lease(now))
    assert seen.living() == ["me"]
    seen.on_lease(100.0, "me", lease(100))
    assert seen.living() == ["me"]


def test_clocks_of_others_do_not_matter():
    seen = watched()
    seen.on_lease(4.0, "me", lease(4))
    seen.on_lease(4.0, "you", lease(-99999))
    seen.on_lease(8.0, "me", lease(8))
    seen.on_lease(12.0, "me", lease(12))
    assert seen.living() == ["me", "you"]


def test_each_lease_lasts_as_long_as_it_says():
    seen = watched()
    seen.on_lease(0.0, "you", lease(1, ttl_s=2))
    seen.on_lease(3.0, "me", lease(3))
    assert seen.living() == ["me"]


@pytest.mark.parametrize("duration_s", ["1" + "0" * 400, "-1", "1.5"])
def test_a_lease_with_a_duration_that_no_lease_can_have_is_malformed(duration_s):
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(f'{{"metadata":{{}},"spec":{{"leaseDurationSeconds":{duration_s}}}}}', type=Lease)


def test_a_lease_is_as_old_as_we_have_seen_it_unchanged():
    ages, first, second = Ages(), versioned("x", "1"), versioned("x", "2")
    assert [ages.observe(now, first) for now in (100.0, 103.0)] == [0.0, 3.0]
    assert [ages.observe(now, second) for now in (104.0, 106.0)] == [0.0, 2.0]
    assert ages.observe(107.0, versioned("y", "2")) == 0.0


def test_a_pod_is_ready_if_any_slice_says_so_or_none_says_anything():
    seen = watched()
    seen.on_slice("a", slices({"ready": False, "serving": False}))
    assert seen.living() == []
    seen.on_slice("b", slices({"ready": False, "serving": True}))
    assert seen.living() == ["me", "you"]
    seen.on_slice("b", slices({"ready": False}))
    assert seen.living() == []
    seen.on_slice("b", slices({"ready": None, "serving": None}))
    assert seen.living() == ["me", "you"]
    seen.on_slices({})
    assert seen.living() == ["me", "you"]
