"""Keys from files and variables, and a proxy between the client and the server."""

import json
import ssl

import pytest
import trustme

from dynabench.arm import ClientConfig
from dynabench.live.run import server_at
from dynabench.proxy import Proxy
from tests.dynabench.test_load import send, workload
from tests.support.commands import dynabench
from tests.support.http_proxy import http_proxy
from tests.support.strange_server import answers, strange_server

URL = "http://127.0.0.1:1"
SECRET = "sk-hunter2-hunter2"


def test_a_key_comes_from_a_file_or_a_variable_or_the_usual_one(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "usual")
    monkeypatch.setenv("MY_KEY", " mine\n")
    file = tmp_path / "key"
    file.write_text("filed\n")
    assert ClientConfig(url=URL).api_key == "usual"
    assert ClientConfig(url=URL, api_key_file="env:MY_KEY").api_key == "mine"
    client = ClientConfig(url=URL, api_key_file=str(file))
    assert client.api_key == "filed"
    assert server_at(URL, "m", client).headers["authorization"] == "Bearer filed"
    assert "filed" not in json.dumps(client.shown)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"url": URL, "api_key_file": "/no/such"}, "api_key_file /no/such cannot be read: No such file"),
        ({"url": URL, "api_key_file": "env:NOT_SET"}, "the environment variable NOT_SET, which is not set"),
        ({"api_key_file": "env:MY_KEY"}, "api_key_file applies to another server; give its --url"),
        ({"proxy": "http://p:1"}, "proxy applies to another server; give its --url"),
        ({"url": URL, "proxy": "socks5://p:1"}, "proxy is not understood; expected http://host:port"),
        ({"url": URL, "proxy": "p:1"}, "proxy is not understood"),
        ({"url": URL, "proxy": "http://p:1/path"}, "proxy is not understood"),
    ],
)
def test_a_wrong_key_or_proxy_is_refused(settings, problem):
    with pytest.raises(ValueError, match=problem):
        ClientConfig(**settings)


@pytest.mark.parametrize("text", ["", "two words", f"{SECRET}\nmore"])
def test_a_file_that_is_no_key_is_refused_without_showing_it(tmp_path, text):
    (tmp_path / "key").write_text(text)
    with pytest.raises(ValueError, match="must hold one word") as caught:
        ClientConfig(url=URL, api_key_file=str(tmp_path / "key"))
    assert SECRET not in str(caught.value)


def test_a_proxy_is_asked_with_its_password():
    assert Proxy.at("http://user:p%40ss@h:3128") == Proxy("h", 3128, "Basic dXNlcjpwQHNz")
    assert Proxy.at("http://h") == Proxy("h", 80)
    assert Proxy("h", 80).connect("::1", 443) == b"CONNECT [::1]:443 HTTP/1.1\r\nhost: [::1]:443\r\n\r\n"


def test_requests_go_through_the_proxy_as_a_whole():
    with strange_server(answers, heads=(heads := [])) as url, http_proxy(asked := []) as proxy:
        columns = send(f"{url}/below", workload(2), proxy=f"http://u:p@{proxy}").requests
    assert columns.error.tolist() == ["", ""]
    assert all(head.startswith(f"POST {url}/below/v1/completions HTTP/1.1\r\n") for head in asked)
    assert all("proxy-authorization: Basic dTpw\r\n" in head for head in asked)
    assert [head["host"] for head in heads] == [url.removeprefix("http://")] * 2


@pytest.fixture
def certified(tmp_path):
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    return context, str(tmp_path / "ca.pem")


def test_encrypted_requests_go_through_a_tunnel_and_the_proxy_sees_nothing_of_them(certified):
    context, file = certified
    with strange_server(answers, heads=(heads := []), tls=context) as url, http_proxy(asked := []) as proxy:
        place = url.removeprefix("https://")
        columns = send(url, workload(2), proxy=f"http://u:p@{proxy}", ca_file=file, api_key=SECRET).requests
        refused = send(url, workload(1), proxy=f"http://{proxy}").requests
    assert columns.error.tolist() == ["", ""]
    assert asked[:2] == [f"CONNECT {place} HTTP/1.1\r\nhost: {place}\r\nproxy-authorization: Basic dTpw\r\n\r\n"] * 2
    assert all("proxy-authorization" not in head for head in heads)
    assert "certificate verify failed" in refused.error[0]


@pytest.mark.parametrize(
    ("refusal", "problem"),
    [
        (b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n", "the proxy refuses: 407 Proxy Authentication Required"),
        (b"SSH-2.0-x\r\n\r\n", "the proxy does not answer as one: SSH-2.0-x"),
        (b"HTTP/1.1 200", "the proxy does not answer as one"),
    ],
)
def test_a_proxy_that_refuses_a_tunnel_is_named_before_anything_is_sent(tmp_path, refusal, problem):
    words = ["--url", "https://127.0.0.1:1", "--max-requests", "2", "--out", tmp_path / "x"]
    with http_proxy([], refusal=refusal) as proxy:
        done = dynabench("run", *words, "--proxy", f"http://user:{SECRET}@{proxy}")
        columns = send("https://127.0.0.1:1", workload(1), proxy=f"http://{proxy}").requests
    assert (done.returncode, done.stdout) == (2, "")
    assert f"through the proxy http://***@{proxy} ({problem}" in done.stderr
    assert SECRET not in done.stderr
    assert columns.error[0].startswith(f"cannot connect to 127.0.0.1:1: {problem}")


def test_a_run_names_its_proxy_and_shows_no_password_and_ignores_the_environment_s(tmp_path):
    with strange_server(answers) as url, http_proxy(asked := []) as proxy:
        words = ["run", "--url", url, "--max-requests", "2", "--rate-scale", "200"]
        env = {"HTTP_PROXY": f"http://{proxy}", "http_proxy": f"http://{proxy}", "ALL_PROXY": f"http://{proxy}"}
        dynabench(*words, "--out", tmp_path / "without", env=env)
        assert asked == []
        done = dynabench(*words, "--ends", "stop", "--out", tmp_path / "x", "--proxy", f"http://user:{SECRET}@{proxy}")
    assert any(head.startswith(f"GET {url}/v1/models") for head in asked)  # for --ends stop
    assert "(through a proxy)" in " ".join(done.stdout.split()), done.stderr
    said = json.loads((tmp_path / "x" / "experiment.json").read_text())
    assert said["client"]["proxy"] == f"http://***@{proxy}"
    written = [file for file in (tmp_path / "x").rglob("*") if file.is_file()]
    assert not any(SECRET.encode() in file.read_bytes() for file in written)
