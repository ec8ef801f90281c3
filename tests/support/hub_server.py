"""A small hub: the HTTP API of huggingface.co, as far as huggingface_hub asks it for models."""

import contextlib
import hashlib
import http.server
import json
import threading

COMMIT = "0123456789abcdef0123456789abcdef01234567"
GATED, TOKEN = "meta/gated-model", "hf_secret"


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def do_HEAD(self):
        self._serve(with_body=False)

    def do_GET(self):
        self._serve(with_body=True)

    def _serve(self, with_body):
        hub = self.server.hub
        path = self.path.partition("?")[0]
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        hub.requests.append((self.command, path, token))
        name, rest = self._split(path)
        if name not in hub.models and name != GATED:
            self._answer(401, b'{"error": "Repository not found"}', {"X-Error-Code": "RepoNotFound"}, with_body)
            return
        if name == GATED and token != TOKEN and not path.startswith("/api/"):
            body = b'{"error": "Access to model is restricted"}'
            self._answer(403, body, {"X-Error-Code": "GatedRepo"}, with_body)
            return
        files = hub.models.get(name) or next(iter(hub.models.values()))
        if rest.startswith("tree/"):
            entries = [
                {"type": "file", "path": file, "size": len(files[file]), "oid": _id(files[file])} for file in files
            ]
            self._answer(200, json.dumps(entries).encode(), {}, with_body)
            return
        if path.startswith("/api/models/"):
            self._answer(200, self._facts(name, files), {}, with_body)
            return
        file = rest.removeprefix(f"resolve/{COMMIT}/").removeprefix("resolve/main/")
        if file not in files:
            self._answer(404, b'{"error": "Entry not found"}', {"X-Error-Code": "EntryNotFound"}, with_body)
            return
        content = files[file]
        facts = {"ETag": f'"{_id(content)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        self._answer(200, content, facts, with_body)

    def _split(self, path):
        path = path.removeprefix("/api/models").strip("/")
        parts = path.split("/")
        return "/".join(parts[:2]), "/".join(parts[2:])

    def _facts(self, name, files):
        siblings = [{"rfilename": file} for file in files]
        facts = {"id": name, "modelId": name, "sha": COMMIT, "siblings": siblings, "private": False, "tags": []}
        return json.dumps(facts).encode()

    def _answer(self, status, body, headers, with_body):
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        if with_body:
            self.wfile.write(body)


def _id(content):
    """Name a file's content as git does."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Hub:
    def __init__(self, models, url):
        self.models = models
        self.url = url
        self.requests = []

    def asked(self, file):
        return [path for method, path, _ in self.requests if method == "GET" and path.endswith(f"/{file}")]


@contextlib.contextmanager
def running(models):
    """Serve models, as {name: {file: content}}."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.hub = Hub(models, f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
