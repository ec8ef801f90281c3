"""A stack whose etcd or NATS is away: /health and /metrics say so, and what can be answered is."""

import httpx
import pytest

from serving.runtime.config import RuntimeConfig
from tests.support.servers import Etcd, Nats
from tests.support.stacks import running
from tests.support.waiting import until, wait_for

REQUEST = {"model": "mock", "prompt": "hello", "max_tokens": 3}


def health(stack):
    answer = httpx.get(f"{stack.url}/health")
    body = answer.json()
    return answer.status_code, body["status"], body.get("away", [])


def ask(stack):
    return httpx.post(f"{stack.url}/v1/completions", json=REQUEST, timeout=60)


def figures(stack, name):
    """Return a metric's value for each server."""
    lines = httpx.get(f"{stack.url}/metrics", timeout=60).text.splitlines()
    found = [line.split() for line in lines if line.startswith(f"dynamo_frontend_{name}{{")]
    return {labels.split('"')[1]: float(value) for labels, value in found}


@pytest.fixture(scope="module")
def servers():
    with Etcd() as etcd, Nats() as nats:
        yield {"etcd": etcd, "nats": nats}


def test_health_and_metrics_name_what_is_away_and_what_cannot_be_sent_gets_503(servers):
    etcd, nats = servers["etcd"], servers["nats"]
    runtime = RuntimeConfig(etcd_endpoints=etcd.url, nats_server=nats.url, nats_timeout_s=0.5)
    with running(2, runtime=runtime) as stack:
        wait_for(stack.url, 2)
        assert health(stack) == (200, "healthy", [])
        assert figures(stack, "server_up") == {"etcd": 1, "nats": 1}
        etcd.stop()
        until(lambda: health(stack) == (200, "degraded", ["etcd"]))
        assert ask(stack).status_code == 200
        nats.stop()
        until(lambda: health(stack) == (503, "degraded", ["etcd", "nats"]))
        refused = ask(stack)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert f"NATS at {nats.url} has not answered for" in refused.json()["error"]["message"]
        assert figures(stack, "server_up") == {"etcd": 0, "nats": 0}
        assert figures(stack, "server_outages_total") == {"etcd": 1, "nats": 1}
        assert figures(stack, "server_calls_given_up_total") == {"etcd": 0, "nats": 1}
        nats.start()
        etcd.start()
        until(lambda: health(stack) == (200, "healthy", []))
        assert ask(stack).status_code == 200
        assert figures(stack, "server_up") == {"etcd": 1, "nats": 1}


def test_no_request_is_refused_while_workers_answer_although_etcd_loses_all_leases(servers):
    with running(2, runtime=RuntimeConfig(etcd_endpoints=servers["etcd"].url, nats_server="")) as stack:
        wait_for(stack.url, 2)
        with httpx.Client(base_url=servers["etcd"].url) as etcd:

            def leases():
                return {lease["ID"] for lease in etcd.post("/v3/lease/leases", json={}).json().get("leases", [])}

            lost = leases()
            for lease in lost:
                etcd.post("/v3/lease/revoke", json={"ID": lease}).raise_for_status()
            statuses = set()
            while len(leases() - lost) < len(lost):  # until all have registered again
                statuses.add(ask(stack).status_code)
        assert statuses == {200}
