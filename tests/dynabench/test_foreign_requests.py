"""Requests to other servers: the fields of bodies, headers, and certificates."""

import json
import ssl

import pytest
import trustme

from dynabench.additions import masked_header, read_extra_body, read_headers
from dynabench.apis import Way
from dynabench.arm import ClientConfig, Run, Settings
from dynabench.experiment.manifest import unsent
from dynabench.experiment.settings import ExperimentConfig
from dynabench.experiment.store import identity_of
from dynabench.live.bodies import Bodies, MeasuredServer
from dynabench.live.run import measure
from reports.folder import read
from tests.dynabench.test_load import send, workload
from tests.support.commands import dynabench
from tests.support.strange_server import answers, strange_server
from workloads import Request, Workload

SECRET = "sk-hunter2-hunter2"
OURS = "applies to dynabench's own stack, but --url measures another server"
URL = "http://127.0.0.1:1"
CHAT = [{"role": "user", "content": "and in Rome"}]
FIELDS = {"tools": [{"type": "function", "function": {"name": "f"}}], "temperature": 0.2, "stop": ["\n"]}
BATCH = [
    {"model": "x", "max_tokens": 3, "messages": CHAT, "ignore_eos": False, "stream": False, **FIELDS},
    {"model": "x", "max_tokens": 3, "messages": CHAT, "response_format": {"type": "json_object"}},
]


@pytest.fixture
def batch(tmp_path):
    file = tmp_path / "batch.jsonl"
    file.write_text("".join(json.dumps({"custom_id": "1", "body": body}) + "\n" for body in BATCH))
    return file


def body(prompts="chat", *, fields=FIELDS, content=CHAT, ends="length", **target):
    request = Request(0.0, 4, 3, (0,), content=content, ends=ends, extra_body=fields)
    made = Bodies(MeasuredServer("http://x", "m", prompts, **target), 64, "").of(request)
    return json.loads(made)


OWN = {"model": "m", "stream": True, "stream_options": {"include_usage": True}}


@pytest.mark.parametrize("prompts", ["chat", "text"])
def test_the_fields_of_a_body_are_sent_with_its_text(prompts):
    assert body(prompts) == FIELDS | OWN | {"max_tokens": 3, "ignore_eos": True, "messages": CHAT}


def test_the_client_s_own_fields_win_over_those_of_a_file():
    strange = {"model": "x", "stream": False, "stream_options": None, "messages": [], "max_tokens": 99, "seed": 1}
    assert body(fields=strange, ends="stop") == OWN | {"seed": 1, "max_tokens": 6, "messages": CHAT}


def test_the_limit_has_the_name_that_the_file_gives_it():
    limited = body(fields={"max_completion_tokens": 99})
    assert limited == OWN | {"max_completion_tokens": 3, "ignore_eos": True, "messages": CHAT}


@pytest.mark.parametrize(("prompts", "content"), [("tokens", CHAT), ("chat", None), ("text", None)])
def test_a_body_without_its_text_has_none_of_its_fields(prompts, content):
    assert set(body(prompts, content=content)) <= {*OWN, "max_tokens", "ignore_eos", "messages", "prompt"}


def test_the_user_s_fields_are_in_every_body_and_win_over_those_of_a_file():
    extra = {"temperature": 0, "chat_template_kwargs": {"thinking": False}}
    assert body(extra_body=extra) == FIELDS | extra | OWN | {"max_tokens": 3, "ignore_eos": True, "messages": CHAT}
    assert body("tokens", content=None, extra_body=extra)["temperature"] == 0
    usages = {"continuous_usage_stats": True}
    assert body(extra_body={"stream_options": usages})["stream_options"] == usages | {"include_usage": True}


def test_the_user_s_nvext_does_not_replace_what_our_frontend_must_report():
    assert body(extra_body={"nvext": {"agent": 1}}, is_ours=True)["nvext"] == {
        "agent": 1,
        "extra_fields": ["routing", "timing", "num_tokens"],
    }


@pytest.mark.parametrize(("prompts", "is_left_out"), [("tokens", True), ("text", False), ("chat", False)])
def test_a_run_says_once_which_fields_it_leaves_out(tmp_path, batch, prompts, is_left_out):
    with strange_server(answers, seen := []) as url:
        done = dynabench("run", batch, "--url", url, "--model", "m", "--prompts", prompts, "--out", tmp_path / "x")
    note = (
        "left out of the bodies: response_format (1 request), stop (1 request), temperature (1 request), tools (1 "
        "request), because prompts are sent as token ids (--prompts chat sends them)"
    )
    wordless = "2 chats of batch.jsonl are sent as token ids of the same length; --prompts chat sends their words"
    assert [" ".join(done.stdout.split()).count(text) for text in (wordless, note)] == [is_left_out] * 2
    assert (wordless in (tmp_path / "x" / "report.html").read_text()) is is_left_out
    assert ("left out of the bodies" in (tmp_path / "x" / "report.html").read_text()) is is_left_out
    sent = [{name: body[name] for name in body if name in (*FIELDS, "response_format")} for body in seen]
    assert (FIELDS in sent) is not is_left_out
    assert ({"response_format": {"type": "json_object"}} in sent) is not is_left_out
    assert all(body["stream"] and body["ignore_eos"] for body in seen)


@pytest.mark.parametrize(
    ("way", "said"),
    [
        (Way(), "1 chat and 2 texts of w are sent as token ids of the same length; --prompts text sends their words"),
        (
            Way("text", "completions"),
            "1 chat of w is sent as other words of the same length; --prompts chat sends their words",
        ),
        (Way("text"), None),
        (Way("text", "chat"), None),
    ],
)
def test_prompts_that_are_sent_without_their_words_are_counted(way, said):
    requests = [Request(0.0, 4, 1, (1,), content=content) for content in (CHAT, "a", "b", None)]
    assert unsent(Workload("w", 4, requests), {way}) == [said] * bool(said)


def test_headers_reach_the_server_and_their_values_reach_nothing_else(tmp_path, batch):
    async def refuses(reader, writer):
        said = f"no such key: {SECRET}".encode()
        writer.write(b"HTTP/1.1 401 No\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(said), said))
        await writer.drain()

    words = ["--header", f"x-key: {SECRET}", "--header=Authorization: env:MY_KEY", "--header", "host: tenant.example"]
    words += ["--extra-body", '{"temperature": 0}', "--prompts", "chat", "--out", tmp_path / "x"]
    with strange_server(refuses, seen := [], heads=(heads := [])) as url:
        done = dynabench("run", batch, "--url", url, "--model", "m", *words, env={"MY_KEY": f"Bearer {SECRET}"})
    assert [head["x-key"] for head in heads] == [SECRET] * 2
    assert [head["authorization"] for head in heads] == [f"Bearer {SECRET}"] * 2
    assert [head["host"] for head in heads] == ["tenant.example"] * 2
    assert [body["temperature"] for body in seen] == [0, 0]
    written = [file for file in (tmp_path / "x").rglob("*") if file.is_file()]
    assert {"experiment.json", "report.html", "requests.parquet"} <= {file.name for file in written}
    assert not any(SECRET.encode() in file.read_bytes() for file in written)
    assert SECRET not in done.stdout + done.stderr
    assert "no such key: ***" in done.stdout
    said = json.loads((tmp_path / "x" / "experiment.json").read_text())
    assert said["client"]["header"] == ["x-key: ***", "Authorization: env:MY_KEY", "host: ***"]
    assert "--header 'x-key: ***' '--header=Authorization: env:MY_KEY' --header 'host: ***'" in said["command"]
    assert '(headers x-key, authorization, host; {"temperature": 0} in each body)' in said["subtitle"]


def test_several_clients_send_headers_too():
    with strange_server(answers, heads=(heads := [])) as url:
        columns = send(url, workload(4), clients=2, extra_headers={"x-tenant": "a"}).requests
    assert set(columns.error) == {""}
    assert [head["x-tenant"] for head in heads] == ["a"] * 4


def test_a_header_of_the_user_s_replaces_the_key():
    target = MeasuredServer("http://x", "m", api_key="k", extra_headers={"authorization": "Basic x"})
    assert target.headers["authorization"] == "Basic x"


def test_short_words_of_headers_do_not_garble_what_a_server_says():
    target = MeasuredServer(
        "http://x", "m", api_key=SECRET, extra_headers={"x-tenant": "a", "x-key": f"Bearer {SECRET}2"}
    )
    assert target.masked(f"a bad key {SECRET} or {SECRET}2") == "a bad key *** or ***"


@pytest.mark.parametrize(
    ("texts", "problem"),
    [
        ([SECRET], "header is not understood; expected 'NAME: VALUE'"),
        ([f"x y: {SECRET}"], "header is not understood"),
        ([f": {SECRET}"], "header is not understood"),
        ([f"x: {SECRET}\r\ny: z"], "header x must have a value of printable characters"),
        (["x:"], "header x must have a value of printable characters"),
        ([f"X: {SECRET}", f"x: {SECRET}"], "header x is given twice"),
        (["Content-Length: 3"], "header content-length is set by dynabench itself"),
        (["x: env:NOT_SET_HERE"], "header x is in the environment variable NOT_SET_HERE, which is not set"),
    ],
)
def test_a_wrong_header_is_refused_without_showing_its_value(texts, problem):
    with pytest.raises(ValueError, match=problem) as caught:
        read_headers(texts)
    assert SECRET not in str(caught.value)


def test_a_header_is_shown_without_its_value_and_read_with_it():
    assert read_headers(["X-Tenant:  a: b "]) == {"x-tenant": "a: b"}
    assert masked_header("X-Tenant: a: b") == "X-Tenant: ***"
    assert SECRET not in repr(ClientConfig(url=URL, header=(f"x: {SECRET}",)))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("temperature=0", r"extra_body is 'temperature=0'; expected a JSON object \(JSON is malformed"),
        ("[1]", r"extra_body is '\[1\]'; expected a JSON object"),
        ('{"stream": false}', "extra_body cannot set stream: use --no-stream"),
        ('{"model": "x"}', "extra_body cannot set model: use --model"),
        ('{"stream_options": {"include_usage": false}}', "expected an object without include_usage"),
        ('{"ignore_eos": false}', "extra_body cannot set ignore_eos: use --ends"),
    ],
)
def test_extra_fields_that_cannot_be_are_refused(text, problem):
    with pytest.raises(ValueError, match=problem):
        read_extra_body(text)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--header", f"x {SECRET}", "--url", URL], "header is not understood"),
        (["--tool-call-share", "1", "--url", URL], f"--tool-call-share {OURS}"),
        (["--tool-call-parser", "hermes", "--url", URL], f"--tool-call-parser {OURS}"),
        (["--router-mode", "kv", "--router-mode", "round-robin", "--url", URL], f"--router-mode {OURS}"),
        (["--workers", "3", "--url", URL], f"--workers {OURS}"),
        (["--kv-overlap-score-weight", "2", "--url", URL], f"--kv-overlap-score-weight {OURS}"),
        (["--engine", "vllm", "--url", URL], f"--engine vllm {OURS}"),
        (["--planner", "hpa", "--url", URL], f"--planner {OURS}"),
        (["--http-port", "8000", "--url", URL], f"--http-port {OURS}"),
        (["--api-key", SECRET, "--url", URL], f"--api-key {OURS}; its key is that of --api-key-file or OPENAI_API_KEY"),
        (["--header", "x: y"], "header applies to another server; give its --url"),
        (["--extra-body", "{", "--url", URL], "extra_body is '{'; expected a JSON object"),
        (["--insecure"], "insecure applies to certificates; give the --url of a server with https://"),
        (["--insecure", "--url", URL], "insecure applies to certificates"),
        (["--ca-file", "x.pem", "--url", URL], "ca_file applies to certificates"),
        (["--ca-file", "/no/such.pem", "--url", "https://127.0.0.1:1"], "--ca-file /no/such.pem: No such file"),
    ],
)
def test_a_command_with_a_wrong_option_ends_with_one_line(tmp_path, words, problem):
    done = dynabench("run", *words, "--out", tmp_path / "x")
    assert (done.returncode, done.stdout) == (2, "")
    assert problem in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert SECRET not in done.stderr
    assert not (tmp_path / "x").exists()


def test_what_was_sent_with_other_fields_or_headers_has_another_identity():
    def identity(**client):
        return identity_of((), ExperimentConfig(), Settings(client=ClientConfig(url=URL, **client)), {})

    made = identity(header=("x: a",), extra_body='{"seed": 1}')
    assert made == identity(header=("x: b",), extra_body='{"seed": 1}')  # a key may be renewed
    assert "client.header was x: *** and is y: ***" in identity(header=("y: a",), extra_body='{"seed": 1}').difference(
        made
    )
    assert "client.extra_body was" in identity(header=("x: a",), extra_body='{"seed": 2}').difference(made)


@pytest.fixture
def certified(tmp_path):
    """Return the context of a server whose certificate no system knows, and the file of its authority."""
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    return context, tmp_path / "ca.pem"


def test_a_certificate_that_nobody_vouches_for_is_refused_before_anything_is_sent(tmp_path, certified):
    with strange_server(answers, seen := [], tls=certified[0]) as url:
        done = dynabench("run", "--url", url, "--max-requests", "2", "--out", tmp_path / "x")
    assert (done.returncode, done.stdout, seen) == (2, "", [])
    assert f"the certificate of {url} is not accepted (" in done.stderr
    assert "--ca-file names the authority that signed it, --insecure accepts any" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("way", ["--insecure", "--ca-file", "SSL_CERT_FILE"])
@pytest.mark.parametrize("ends", ["length", "stop"])
def test_a_certificate_is_accepted_in_three_ways_and_the_result_names_the_insecure_one(tmp_path, certified, way, ends):
    context, file = certified
    words = {"--insecure": ["--insecure"], "--ca-file": ["--ca-file", file], "SSL_CERT_FILE": []}[way]
    env = {"SSL_CERT_FILE": str(file)} if not words else {}
    with strange_server(answers, tls=context) as url:
        words += ["--max-requests", "2", "--rate-scale", "200", "--ends", ends, "--out", tmp_path / "x"]
        done = dynabench("run", "--url", url, *words, env=env)
    is_late = "the client was late" in done.stdout  # on a busy machine
    assert (done.returncode, done.stderr) == (int(is_late), ""), done.stdout
    assert ("(any certificate accepted)" in " ".join(done.stdout.split())) is (way == "--insecure")
    assert json.loads((tmp_path / "x" / "experiment.json").read_text())["client"]["insecure"] is (way == "--insecure")


def test_a_file_without_a_certificate_is_no_authority(tmp_path):
    file = tmp_path / "no.pem"
    file.write_text("hello")
    done = dynabench("run", "--url", "https://127.0.0.1:1", "--ca-file", file, "--out", tmp_path / "x")
    assert (done.returncode, done.stderr.strip()) == (2, f"dynabench: --ca-file {file}: it holds no certificate")


def test_warm_ups_are_sent_as_the_requests_are():
    with strange_server(answers, seen := [], heads=(heads := [])) as url:
        client = ClientConfig(url=url, warmup_requests=2, header=("x-tenant: a",), extra_body='{"seed": 7}')
        measure(Run.alone(Settings(client=client)), workload(3))
    assert [head["x-tenant"] for head in heads] == ["a"] * 5
    assert [body["seed"] for body in seen] == [7] * 5


def test_of_another_server_no_workers_are_known_that_it_does_not_name(tmp_path):
    with strange_server(answers) as url:
        done = dynabench("run", "--url", url, "--model", "m", "--max-requests", "8", "--out", tmp_path / "x")
    assert done.returncode == 0, done.stderr
    _, [run] = read(tmp_path / "x")
    assert run.num_workers == 1
    report = (tmp_path / "x" / "report.html").read_text()
    assert "workers had" not in report and "worker had" not in report
