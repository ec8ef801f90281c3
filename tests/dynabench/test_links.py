"""Links that transfers share, held against published times and a plain simulation."""

import copy
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynabench.virtual.overlap import hidden_bytes
from mocker.models.catalog import find_model
from mocker.network.config import TransferConfig
from mocker.network.links import Links
from mocker.timing.kv_size import kv_size

GB = 1e9
QWEN_8B, QWEN_235B = "Qwen/Qwen3-8B", "Qwen/Qwen3-235B-A22B"


def linked(*num_gpus, **settings):
    links = Links(TransferConfig(**{"bandwidth_gb_s": 50.0, "latency_ms": 0.0} | settings))
    for gpus in num_gpus:
        links.add_rank(gpus)
    return links


def ends(links):
    """Run until nothing is under way; return when each transfer ended."""
    found = {}
    while (now := links.next_s()) is not None:
        found |= dict.fromkeys(links.advance(now), now)
    return found


def duration(links, num_bytes, **more):
    links.start(0, 0.0, source=0, target=1, num_bytes=num_bytes, **more)
    return ends(links)[0]


@pytest.mark.parametrize(
    ("model", "num_gpus", "bandwidth", "latency_ms", "measured_ms"),
    [
        (QWEN_8B, 8, 146.1, 0.378, {128: 0.54, 1024: 1.50, 8192: 8.84, 32768: 31.65}),
        (QWEN_235B, 8, 171.0, 1.84, {128: 2.07, 1024: 3.96, 8192: 20.31, 32768: 76.78}),
    ],
)
def test_transfers_take_the_time_that_mooncake_measured_over_rdma(model, num_gpus, bandwidth, latency_ms, measured_ms):
    size = kv_size(find_model(model), block_size=16, tensor_parallel_size=num_gpus)
    for num_tokens, expected in measured_ms.items():
        links = linked(num_gpus, num_gpus, bandwidth_gb_s=bandwidth / num_gpus, latency_ms=latency_ms)
        took = duration(links, size.of(num_tokens // 16 + 1))
        assert took * 1000 == pytest.approx(expected, rel=0.07)


def test_a_transfer_takes_the_time_that_dynamos_mocker_gives_it():
    links = linked(1, 1, bandwidth_gb_s=64.0)
    assert duration(links, 1000 * 131_072) == pytest.approx(2.048e-3, rel=1e-12)


def test_two_transfers_from_one_port_share_it_while_both_last():
    links = linked(1, 1, 1)
    links.start(1, 0.0, source=0, target=1, num_bytes=GB)
    links.start(2, 0.010, source=0, target=2, num_bytes=GB)
    assert ends(links) == pytest.approx({1: 0.030, 2: 0.040}, rel=1e-12)
    assert links.utilisation(0.040).ranks[0] == pytest.approx((1.0, 0.0))
    assert [tuple(use) for use in links.utilisation(0.080).ranks] == [(0.5, 0.0), (0.0, 0.25), (0.0, 0.25)]


def test_the_first_of_two_transfers_is_not_held_up_by_one_that_has_not_begun():
    links = linked(1, 1, 1, latency_ms=10.0)
    links.start(1, 0.0, source=0, target=1, num_bytes=GB)
    links.start(2, 0.010, source=0, target=2, num_bytes=GB)
    assert ends(links) == pytest.approx({1: 0.040, 2: 0.050})


def test_a_rank_has_the_links_of_its_gpus():
    assert duration(linked(4, 1), GB) == pytest.approx(0.020)
    assert duration(linked(4, 4), GB) == pytest.approx(0.005)


def test_blocks_are_posted_before_the_first_byte():
    links = linked(1, 1, latency_ms=1.0, block_us=10.0)
    assert duration(links, GB, num_blocks=400) == pytest.approx(0.001 + 0.004 + 0.020)


def test_links_without_a_limit_take_only_the_latency():
    links = linked(1, 1, 1, 1, bandwidth_gb_s=0.0, latency_ms=2.0)
    for key, (source, target) in enumerate([(0, 1), (0, 2), (3, 2), (3, 1)]):
        links.start(key, 0.0, source=source, target=target, num_bytes=GB)
    assert ends(links) == dict.fromkeys(range(4), 0.002)
    assert links.utilisation(1.0).ranks[0] == (0.0, 0.0)


def test_nothing_to_send_takes_only_the_latency():
    assert duration(linked(1, 1, latency_ms=2.0), 0) == 0.002


def test_a_dropped_transfer_leaves_its_share_to_others_and_counts_as_far_as_it_came():
    links = linked(1, 1, 1)
    links.start(1, 0.0, source=0, target=1, num_bytes=GB)
    links.start(2, 0.0, source=0, target=2, num_bytes=GB)
    links.drop(1, 0.010)
    assert ends(links) == pytest.approx({2: 0.025})
    assert links.utilisation(0.1).ranks[1].ingress == pytest.approx(0.05)
    links.start(1, 0.1, source=0, target=1, num_bytes=GB)
    links.drop(1, 0.1 + 0.021)
    assert links.advance(1.0) == []


def test_a_transfer_that_is_dropped_before_its_first_byte_may_start_again():
    links = linked(1, 1, latency_ms=10.0)
    links.start(1, 0.0, source=0, target=1, num_bytes=GB)
    links.drop(1, 0.005)
    links.start(1, 0.006, source=0, target=1, num_bytes=GB / 2)
    assert ends(links) == pytest.approx({1: 0.026})


def test_transfers_that_end_at_one_instant_end_in_the_order_of_their_starts():
    links = linked(1, 1, 1, 1)
    for key, target in ((7, 2), (3, 1), (5, 3)):
        links.start(key, 0.0, source=0, target=target, num_bytes=GB)
    assert links.advance(1.0) == [7, 3, 5]


def test_a_driver_that_comes_late_learns_of_ends_in_their_order():
    links = linked(1, 1, 1, 1)
    links.start(1, 0.0, source=0, target=1, num_bytes=GB)
    links.start(2, 0.0, source=2, target=3, num_bytes=GB / 2)
    links.start(3, 0.1, source=0, target=1, num_bytes=GB)
    assert ends(links) == pytest.approx({2: 0.010, 1: 0.020, 3: 0.120})


def test_transfers_between_nodes_share_the_links_of_nodes():
    nodes = {"gpus_per_node": 2, "node_bandwidth_gb_s": 25.0}
    links = linked(1, 1, 1, 1, **nodes)
    links.start(1, 0.0, source=0, target=2, num_bytes=GB)
    links.start(2, 0.0, source=1, target=3, num_bytes=GB)
    assert ends(links) == pytest.approx({1: 0.080, 2: 0.080})
    assert links.utilisation(0.080).nodes == [(1.0, 0.0), (0.0, 1.0)]
    assert duration(linked(1, 1, 1, 1, **nodes), GB) == pytest.approx(0.020)  # inside of a node
    assert duration(linked(1, 2, **nodes), GB) == pytest.approx(0.040)  # which does not fit beside the first
    assert duration(linked(4, 4, **nodes), GB) == pytest.approx(0.020)  # two nodes each


def test_transfers_between_racks_share_the_links_of_racks():
    links = linked(*[1] * 6, nodes_per_rack=2, rack_bandwidth_gb_s=10.0)
    links.start(1, 0.0, source=0, target=1, num_bytes=GB)
    links.start(2, 0.0, source=1, target=2, num_bytes=GB)
    links.start(3, 0.0, source=0, target=4, num_bytes=GB)
    assert ends(links) == pytest.approx({1: 1 / 45, 2: 0.2, 3: 0.2})
    assert links.bandwidth(0, 1) == 50 * GB
    assert links.bandwidth(1, 2) == 10 * GB


def test_chunks_are_sent_one_after_the_other():
    links = linked(1, 1, latency_ms=1.0)
    links.start(1, 0.0, source=0, target=1, num_bytes=GB, is_last=False)
    links.extend(1, 0.010, num_bytes=GB)
    assert links.advance(0.100) == []
    links.extend(1, 0.100, num_bytes=GB, is_last=True)
    assert ends(links) == pytest.approx({1: 0.121})


def test_chunks_queue_on_a_slow_link():
    links = linked(1, 1)
    links.start(1, 0.0, source=0, target=1, num_bytes=GB, is_last=False)
    links.extend(1, 0.005, num_bytes=GB)
    links.extend(1, 0.010, num_bytes=GB, is_last=True)
    assert ends(links) == pytest.approx({1: 0.060})


def test_a_last_chunk_without_blocks_does_not_overtake_those_that_are_posted():
    links = linked(1, 1, block_us=10.0)
    links.start(1, 0.0, source=0, target=1, num_bytes=GB, num_blocks=1000, is_last=False)
    links.extend(1, 0.001, num_bytes=0, is_last=True)
    assert ends(links) == pytest.approx({1: 0.030})


@given(
    num_layers=st.integers(1, 80),
    transfer_s=st.floats(1e-4, 1.0),
    prefill_s=st.floats(0.0, 1.0),
)
def test_layers_are_hidden_as_if_each_was_sent_when_it_is_computed(num_layers, transfer_s, prefill_s):
    bandwidth = 50 * GB
    num_bytes = transfer_s * bandwidth
    hidden = hidden_bytes(num_bytes, bandwidth=bandwidth, prefill_s=prefill_s, num_layers=num_layers)
    sent_s = 0.0
    for layer in range(1, num_layers + 1):
        sent_s = max(sent_s, prefill_s * layer / num_layers) + transfer_s / num_layers
    assert (num_bytes - hidden) / bandwidth == pytest.approx(sent_s - prefill_s, rel=1e-9, abs=1e-9)
    assert 0 <= hidden < num_bytes


def test_what_went_ahead_is_used_capacity_but_takes_no_time():
    links = linked(1, 1)
    assert duration(links, GB, num_bytes_ahead=GB) == pytest.approx(0.020)
    assert links.utilisation(0.080).ranks[0].egress == pytest.approx(0.5)


def test_links_are_copied_with_all_that_is_under_way():
    links = linked(*[1] * 16)
    for key in range(30):
        links.start(key, 0.001 * key, source=key % 16, target=(key + 1 + key // 16) % 16, num_bytes=GB)
    copied = copy.deepcopy(links)
    assert ends(copied) == ends(links)


# Random networks: every one is held against rates that are raised in small, plain steps of their own.


@st.composite
def networks(draw):
    """Return (settings, GPUs of ranks, transfers as rows of start, source, target, bytes)."""
    gpus = draw(st.lists(st.sampled_from([1, 1, 2, 4]), min_size=2, max_size=6))
    settings = {"latency_ms": draw(st.sampled_from([0.0, 0.4, 7.0]))}
    if draw(st.booleans()):
        settings |= {
            "gpus_per_node": draw(st.sampled_from([2, 4])),
            "node_bandwidth_gb_s": draw(st.sampled_from([20.0, 75.0])),
        }
    if draw(st.booleans()):
        settings |= {"nodes_per_rack": draw(st.sampled_from([1, 2])), "rack_bandwidth_gb_s": 30.0}
    rank = st.integers(0, len(gpus) - 1)
    row = st.tuples(st.integers(0, 40), rank, rank, st.integers(1, 400)).filter(lambda row: row[1] != row[2])
    rows = sorted(draw(st.lists(row, min_size=1, max_size=12)))
    return settings, gpus, [(at / 1000, source, target, size * 5e6) for at, source, target, size in rows]


def caps(settings, gpus):
    """Return what limits a network: [(bytes/s, (source, target) -> whether a transfer is limited by it)]."""
    node_of, rack_of, left = [], [], 0
    for count in gpus:
        size = settings.get("gpus_per_node", count)
        whole = -(-count // size) * size
        if count > left:
            node_of.append(node_of[-1] + 1 if node_of else 0)
            left = whole
        else:
            node_of.append(node_of[-1])
        left -= count
    rack_of = [node // settings.get("nodes_per_rack", 10**9) for node in node_of]
    found = []
    for rank, count in enumerate(gpus):
        found.append((50 * GB * count, lambda s, t, w=rank: s == w))
        found.append((50 * GB * count, lambda s, t, w=rank: t == w))
    if "node_bandwidth_gb_s" in settings:
        for node in set(node_of):
            most = max(count for rank, count in enumerate(gpus) if node_of[rank] == node)
            cap = settings["node_bandwidth_gb_s"] * GB * max(1, -(-most // settings["gpus_per_node"]))
            found.append((cap, lambda s, t, n=node: node_of[s] == n != node_of[t]))
            found.append((cap, lambda s, t, n=node: node_of[t] == n != node_of[s]))
    if "rack_bandwidth_gb_s" in settings:
        for rack in set(rack_of):
            found.append((30 * GB, lambda s, t, r=rack: rack_of[s] == r != rack_of[t]))
            found.append((30 * GB, lambda s, t, r=rack: rack_of[t] == r != rack_of[s]))
    return found


def plain_rates(limits, paths):
    """Raise all rates together; stop those whose limit is reached."""
    rates, growing = [0.0] * len(paths), set(range(len(paths)))
    uses = [[n for n, path in enumerate(paths) if limited(*path)] for _, limited in limits]
    while growing:
        step = min(
            (cap - sum(rates[n] for n in used)) / len(growing.intersection(used))
            for (cap, _), used in zip(limits, uses, strict=True)
            if growing.intersection(used)
        )
        for n in growing:
            rates[n] += step
        full = [
            set(used)
            for (cap, _), used in zip(limits, uses, strict=True)
            if sum(rates[n] for n in used) >= cap * (1 - 1e-9)
        ]
        growing -= set().union(*full)
    return rates


def plain_ends(settings, gpus, rows):
    """Simulate one event at a time, with all rates found again at each."""
    limits, latency = caps(settings, gpus), settings["latency_ms"] / 1000
    left = {n: row[3] for n, row in enumerate(rows)}
    begins = [row[0] + latency for row in rows]
    now, found = 0.0, {}
    while left:
        moving = [n for n in left if begins[n] <= now]
        rates = dict(zip(moving, plain_rates(limits, [rows[n][1:3] for n in moving]), strict=True))
        coming = [begin for begin in begins if begin > now]
        then = min([now + left[n] / rates[n] for n in moving] + coming)
        for n in moving:
            left[n] -= rates[n] * (then - now)
            if left[n] < 1:  # a byte
                found[n] = then
                del left[n]
        now = then
    return found


def begun(network):
    settings, gpus, rows = network
    links = linked(*gpus, **settings)
    for key, (now, source, target, num_bytes) in enumerate(rows):
        yield links, now
        links.start(key, now, source=source, target=target, num_bytes=num_bytes)
    yield links, math.inf


def ends_of(network):
    """Drive links as a clock would."""
    found = {}
    for links, until in begun(network):
        while (now := links.next_s()) is not None and now <= until:
            found |= dict.fromkeys(links.advance(now), now)
    return found, links


@given(networks())
def test_transfers_end_as_in_a_plain_simulation(network):
    assert ends_of(network)[0] == pytest.approx(plain_ends(*network), rel=1e-7)


@given(networks())
def test_every_byte_is_sent_and_received_once(network):
    _, gpus, rows = network
    found, links = ends_of(network)
    end = max(found.values())
    for rank, use in enumerate(links.utilisation(end).ranks):
        could = 50 * GB * gpus[rank] * end
        assert use.egress * could == pytest.approx(sum(row[3] for row in rows if row[1] == rank), rel=1e-9)
        assert use.ingress * could == pytest.approx(sum(row[3] for row in rows if row[2] == rank), rel=1e-9)


@given(networks(), st.floats(0.0, 0.1))
def test_no_rate_can_rise_without_one_falling_that_is_as_low_or_lower(network, at):
    settings, gpus, rows = network
    links = linked(*gpus, **settings)
    for key, (now, source, target, num_bytes) in enumerate(rows):
        if now <= at:
            links.start(key, now, source=source, target=target, num_bytes=num_bytes)
    links.advance(at)
    rates = {flow.key: flow.path.rate for flow in links._flows.values() if flow.is_moving}
    full = []
    for cap, limited in caps(settings, gpus):
        used = {key: rate for key, rate in rates.items() if limited(*rows[key][1:3])}
        assert sum(used.values()) <= cap * (1 + 1e-9)
        if sum(used.values()) >= cap * (1 - 1e-9):
            full.append(used)
    for key, rate in rates.items():
        assert any(key in used and rate >= max(used.values()) * (1 - 1e-9) for used in full)


@given(networks(), st.lists(st.floats(0.0, 1.0), min_size=1, max_size=4))
def test_how_a_transfer_is_cut_into_chunks_that_are_there_at_once_changes_nothing(network, shares):
    settings, gpus, rows = network
    links = linked(*gpus, **settings)
    for key, (now, source, target, num_bytes) in enumerate(rows):
        links.start(key, now, source=source, target=target, num_bytes=0, is_last=False)
        for share in shares:
            links.extend(key, now, num_bytes=num_bytes * share / (2 * sum(shares) or 1))
        rest = num_bytes / 2 if any(shares) else num_bytes
        links.extend(key, now, num_bytes=rest, is_last=True)
    assert ends(links) == pytest.approx(ends_of(network)[0], rel=1e-7)
