"""A small Kubernetes API server for tests, with what a real one does to us: versions, conflicts, watches that end, old versions
that are gone, failures, and roles. What is written to it is validated strictly against Kubernetes' own schemas.
"""

import asyncio
import contextlib
import json
import shutil
import ssl
import tempfile
import threading
import time
import uuid
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import kubernetes_validate
import trustme
from aiohttp import web

from serving.runtime.stopping import cancel_all

VERSION = "1.37"
GROUPS = {
    "configmaps": ("", "ConfigMap"),
    "secrets": ("", "Secret"),
    "pods": ("", "Pod"),
    "leases": ("coordination.k8s.io", "Lease"),
    "endpointslices": ("discovery.k8s.io", "EndpointSlice"),
    "deployments": ("apps", "Deployment"),
    "horizontalpodautoscalers": ("autoscaling", "HorizontalPodAutoscaler"),
}
VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete", "GET": "get"}
EMPTY_TOKEN = {"metadata": {"name": "dynabench-cluster-token"}, "type": "Opaque"}
"""What manifests hold of the token's Secret."""

REASONS = {
    302: "Found",
    400: "BadRequest",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    409: "Conflict",
    410: "Expired",
}
REASONS |= {422: "Invalid", 429: "TooManyRequests", 500: "InternalError", 503: "ServiceUnavailable"}


class RefusalError(Exception):
    def __init__(self, code, message, **headers):
        super().__init__(message)
        self.code = code
        self.headers = headers


@dataclass
class Fault:
    """What happens to calls instead of an answer."""

    verb: str
    resource: str
    what: int | str | bytes
    """A status, "hang", "drop", or what a watch sends before it ends."""
    times: int
    retry_after: str = ""
    message: str = "as the test wants it"


@dataclass(eq=False)
class Watch:
    resource: str
    response: web.StreamResponse
    is_mute: bool = False
    news: asyncio.Event = field(default_factory=asyncio.Event)


class Cluster:
    """See the module. It serves in a thread of its own; its methods may be called from any other."""

    def __init__(self, rules=None, namespace="here"):
        self.namespace = namespace
        self.rules = rules
        self.calls = set()
        """(verb, API group, resource, name) of each call."""
        self.tokens = {"first"}
        self.invalid = []
        """What did not validate."""
        self.page_size = 500
        self.objects = {}
        self._applied = {}
        self.faults = []
        self.folder = Path(tempfile.mkdtemp(prefix="cluster-"))
        self.on_change = lambda resource, name: None
        """Is called in the server's loop; controllers hang on it."""
        self._version = 100
        self._log = []
        self._oldest = 0
        self._watches = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self):
        authority = trustme.CA()
        certificate = authority.issue_cert("127.0.0.1")
        authority.cert_pem.write_to_path(self.folder / "ca.crt")
        self.ssl = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        certificate.configure_cert(self.ssl)
        (self.folder / "namespace").write_text(self.namespace)
        (self.folder / "token").write_text("first")
        self._thread.start()
        self.port = 0
        self.start()
        self.apply("secrets", EMPTY_TOKEN)
        return self

    def __exit__(self, *_):
        self.stop()
        self.do(self._end)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        shutil.rmtree(self.folder)

    @property
    def url(self):
        return f"https://127.0.0.1:{self.port}"

    def environment(self, pod):
        """Return the environment of a container of a pod."""
        return {
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            "KUBERNETES_SERVICE_PORT": str(self.port),
            "DYN_SERVICE_ACCOUNT_DIR": str(self.folder),
            "DYN_DISCOVERY_BACKEND": "kubernetes",
            "POD_NAME": pod["metadata"]["name"],
            "POD_UID": pod["metadata"]["uid"],
            "POD_IP": "127.0.0.1",
        }

    # What tests do to it.

    def do(self, work, *arguments):
        """Call something in the server's loop; return what it returns."""

        async def call():
            found = work(*arguments)
            return await found if asyncio.iscoroutine(found) else found

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(60)

    def start(self):
        self.do(self._start)

    def stop(self):
        """Be away; what it holds stays."""
        self.do(self._stop)

    def fail(self, verb, resource, what, times=1, **more):
        self.do(self.faults.append, Fault(verb, resource, what, times, **more))

    def drop_watches(self):
        self.do(self._drop)

    def mute_watches(self):
        """Let the watches of now hear nothing more; they stay open, as behind a NAT that forgot them."""

        def mute():
            for watch in self._watches:
                watch.is_mute = True

        self.do(mute)

    def compact(self):
        """Forget what changed until now."""

        def forget():
            self._oldest = self._version
            self._log.clear()

        self.do(forget)

    def put(self, resource, content):
        """Make or replace an object, as kubectl replace --force does."""
        return self.do(self.write, resource, content)

    def apply(self, resource, content):
        """Make an object, or change what was applied before and leave the rest to others, as kubectl apply does."""
        key = resource, content["metadata"]["name"]
        before, self._applied[key] = self._applied.get(key, {}), content
        held = self.find(*key) or {}
        return self.put(resource, merged(merged(held, emptied(before, content)), content))

    def remove(self, resource, name):
        self.do(self.erase, resource, name)

    def find(self, resource, name):
        return self.do(lambda: self.objects.get((resource, name)))

    def names(self, resource):
        return self.do(lambda: sorted(name for kind, name in self.objects if kind == resource))

    def pod(self, name="pod-0", labels=None):
        """Make a pod that runs."""
        return self.put("pods", pod(name, labels))

    # Objects; in the server's loop.

    def write(self, resource, content):
        name = content["metadata"]["name"]
        group, kind = GROUPS[resource]
        before = self.objects.get((resource, name))
        self._version += 1
        metadata = {
            "uid": before["metadata"]["uid"] if before else str(uuid.uuid4()),
            "creationTimestamp": before["metadata"]["creationTimestamp"] if before else stamp(),
            **{key: value for key, value in content["metadata"].items() if value is not None},
            "namespace": self.namespace,
            "resourceVersion": str(self._version),
        }
        version = {"": "v1", "autoscaling": "autoscaling/v2"}.get(group, f"{group}/v1")
        content = {"apiVersion": version, "kind": kind, **content, "metadata": metadata}
        try:
            kubernetes_validate.validate(content, VERSION, strict=True)
        except kubernetes_validate.ValidationError as error:
            self.invalid.append(f"{resource} {name}: {error.message}")
            raise RefusalError(422, error.message) from error
        if resource == "secrets":
            content = {"type": "Opaque", **content}
            if before is not None and before["type"] != content["type"]:
                raise RefusalError(422, f'Secret "{name}" is invalid: type: field is immutable')
        self.objects[resource, name] = content
        self._note(resource, "MODIFIED" if before else "ADDED", content, before)
        return content

    def erase(self, resource, name):
        gone = self.objects.pop((resource, name))
        self._version += 1
        gone = gone | {"metadata": gone["metadata"] | {"resourceVersion": str(self._version)}}
        self._note(resource, "DELETED", gone, gone)
        uid = gone["metadata"]["uid"]
        for (kind, owned), held in list(self.objects.items()):
            if any(owner["uid"] == uid for owner in held["metadata"].get("ownerReferences", ())):
                self.erase(kind, owned)
        return gone

    def _note(self, resource, what, content, before):
        self._log.append((self._version, resource, what, content, before))
        for watch in self._watches:
            watch.news.set()
        self.on_change(resource, content["metadata"]["name"])

    # Calls.

    async def _start(self):
        app = web.Application(client_max_size=4 << 20)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.05)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, ssl_context=self.ssl, reuse_address=True)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]

    async def _stop(self):
        self._drop()
        await self._runner.cleanup()

    async def _end(self):
        await cancel_all(*(asyncio.all_tasks() - {asyncio.current_task()}))

    def _drop(self):
        for watch in self._watches:
            if watch.response._req.transport is not None:
                watch.response._req.transport.abort()

    async def _answer(self, request):
        try:
            return await self._serve(request)
        except RefusalError as refusal:
            status = {"code": refusal.code, "reason": REASONS[refusal.code], "message": str(refusal)}
            content = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", **status}
            return web.json_response(content, status=refusal.code, headers=refusal.headers)

    async def _serve(self, request):
        group, namespace, resource, name, part = parse(request.path)
        verb = VERBS[request.method]
        if verb == "get" and not name:
            verb = "watch" if request.query.get("watch") in ("1", "true", "True") else "list"
        whole = f"{resource}/{part}" if part else resource
        for key, _, value in (text.partition("=") for text in request.query.get("fieldSelector", "").split(",")):
            name = value if key == "metadata.name" else name
        if (answer := await self._trouble(verb, whole, request)) is not None:
            return answer
        if request.headers.get("Authorization", "").removeprefix("Bearer ") not in self.tokens:
            raise RefusalError(401, "Unauthorized")
        self.calls.add((verb, group, whole, "" if verb == "create" else name))
        if self.rules is not None and not any(allows(rule, verb, group, whole, name) for rule in self.rules):
            raise RefusalError(
                403, f'{whole} is forbidden: User "x" cannot {verb} resource "{whole}" in API group "{group}"'
            )
        if resource not in GROUPS or GROUPS[resource][0] != group:
            raise RefusalError(404, "the server could not find the requested resource")
        if verb == "watch":
            return await self._watch(request, resource)
        if verb == "list":
            return self._list(request, resource)
        if verb == "create":
            return self._create(namespace, resource, await request.json())
        held = self.objects.get((resource, name))
        if held is None or namespace != self.namespace:
            raise RefusalError(404, f'{resource} "{name}" not found')
        if verb == "delete":
            self._delete(resource, held)
            return web.json_response({"kind": "Status", "apiVersion": "v1", "status": "Success"})
        if part == "scale":
            held = self._scale(held)
        if verb == "get":
            return web.json_response(held)
        changed = await request.json()
        if verb == "patch":
            if request.content_type != "application/merge-patch+json":
                raise RefusalError(400, f"the body of the request was in an unknown format: {request.content_type}")
            changed = merged(held, changed)
        if (
            changed["metadata"].get("resourceVersion", held["metadata"]["resourceVersion"])
            != held["metadata"]["resourceVersion"]
        ):
            raise RefusalError(
                409, f'Operation cannot be fulfilled on {resource} "{name}": the object has been modified'
            )
        if part == "scale":
            whole = self.objects[resource, name]
            self.write(resource, whole | {"spec": whole["spec"] | {"replicas": changed["spec"]["replicas"]}})
            return web.json_response(self._scale(self.objects[resource, name]))
        return web.json_response(self.write(resource, changed))

    async def _trouble(self, verb, resource, request):
        for fault in self.faults:
            if fault.verb in (verb, "*") and fault.resource in (resource, "*") and fault.times:
                fault.times -= 1
                if fault.what == "hang":
                    await asyncio.sleep(3600)
                if fault.what == "drop":
                    request.transport.abort()
                    raise asyncio.CancelledError
                if isinstance(fault.what, bytes):
                    return web.Response(body=fault.what)
                headers = {"Retry-After": fault.retry_after} if fault.retry_after else {}
                raise RefusalError(fault.what, fault.message, **headers)
        return None

    def _create(self, namespace, resource, content):
        if namespace != self.namespace:
            raise RefusalError(404, f'namespaces "{namespace}" not found')
        name = content["metadata"]["name"]
        if (resource, name) in self.objects:
            raise RefusalError(409, f'{resource} "{name}" already exists')
        return web.json_response(self.write(resource, content), status=201)

    def _delete(self, resource, held):
        """Remove an object; a pod ends first, if there is somebody to end it."""
        if resource == "pods" and self.is_ending(held):
            return
        self.erase(resource, held["metadata"]["name"])

    def is_ending(self, pod):
        return False

    def _scale(self, deployment):
        metadata = deployment["metadata"]
        kept = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
        return {
            "kind": "Scale",
            "apiVersion": "autoscaling/v1",
            "metadata": {key: metadata[key] for key in kept},
            "spec": {"replicas": deployment["spec"].get("replicas", 1)},
            "status": {"replicas": deployment.get("status", {}).get("replicas", 0)},
        }

    def _list(self, request, resource):
        found = [
            held
            for (kind, _), held in sorted(self.objects.items())
            if kind == resource and selects(request.query, held)
        ]
        start = int(request.query.get("continue", "0"))
        size = min(int(request.query.get("limit", "500")), self.page_size)
        metadata = {"resourceVersion": str(self._version)}
        if start + size < len(found):
            metadata |= {"continue": str(start + size), "remainingItemCount": len(found) - start - size}
        kind = f"{GROUPS[resource][1]}List"
        api = found[0]["apiVersion"] if found else "v1"
        # As the real one does: null for an empty list, and items that do not say what they are.
        items = [{key: value for key, value in each.items() if key not in ("kind", "apiVersion")} for each in found]
        return web.json_response(
            {"kind": kind, "apiVersion": api, "metadata": metadata, "items": items[start : start + size] or None}
        )

    async def _watch(self, request, resource):
        seen = int(request.query.get("resourceVersion") or self._version)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        watch = Watch(resource, response)
        if seen < self._oldest:
            await say(response, "ERROR", {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"})
            return response
        self._watches.add(watch)
        end = time.monotonic() + float(request.query.get("timeoutSeconds", "300"))
        try:
            while (left := end - time.monotonic()) > 0:
                watch.news.clear()
                for version, kind, what, content, before in list(self._log):
                    if kind == resource and version > seen and not watch.is_mute:
                        seen = version
                        await tell(response, request.query, what, content, before)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(watch.news.wait(), min(left, 1.0))
                if not watch.news.is_set() and not watch.is_mute and "allowWatchBookmarks" in request.query:
                    seen = max(seen, self._version)
                    await say(response, "BOOKMARK", bookmark(resource, seen))
        except ConnectionError:
            pass
        finally:
            self._watches.discard(watch)
        return response


async def tell(response, query, what, content, before):
    is_in, was_in = selects(query, content), before is not None and selects(query, before)
    if what == "DELETED" or (was_in and not is_in):
        await say(response, "DELETED", content) if was_in else None
    elif is_in:
        await say(response, "MODIFIED" if was_in else "ADDED", content)


async def say(response, what, content):
    await response.write(json.dumps({"type": what, "object": content}).encode() + b"\n")


def bookmark(resource, version):
    return {"kind": GROUPS[resource][1], "metadata": {"resourceVersion": str(version), "creationTimestamp": None}}


def parse(path):
    """Return the API group, namespace, resource, name and subresource that a path names."""
    match path.strip("/").split("/"):
        case ["api", "v1", "namespaces", namespace, resource, *rest]:
            group = ""
        case ["apis", group, _, "namespaces", namespace, resource, *rest]:
            pass
        case _:
            raise RefusalError(404, f"the server could not find the requested resource {path}")
    name, part, *_ = *rest, "", ""
    return group, namespace, resource, name, part


def allows(rule, verb, group, resource, name):
    is_of_name = not rule.names or name in rule.names
    return rule.group == group and rule.resource == resource and verb in rule.verbs and is_of_name


def selects(query, held):
    labels = held["metadata"].get("labels") or {}
    for term in filter(None, query.get("labelSelector", "").split(",")):
        key, equals, value = term.partition("=")
        if key not in labels or (equals and labels[key] != value.removeprefix("=")):
            return False
    wanted = [term.partition("=")[2] for term in query.get("fieldSelector", "").split(",") if "metadata.name" in term]
    return not wanted or held["metadata"]["name"] in wanted


def merged(held, patch):
    """Return what RFC 7386 makes of both."""
    if not isinstance(patch, dict):
        return patch
    found = dict(held) if isinstance(held, dict) else {}
    for key, value in patch.items():
        if value is None:
            found.pop(key, None)
        else:
            found[key] = merged(found.get(key), value)
    return found


def emptied(before, after):
    """Return the patch that removes what was in an object before and no longer is."""
    return {
        key: emptied(value, after[key]) if isinstance(value, dict) and key in after else None
        for key, value in before.items()
        if key not in after or isinstance(value, dict)
    }


def stamp():
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def pod(name, labels=None, **more):
    return {
        "metadata": {"name": name, "labels": labels or {}, **more},
        "spec": {"containers": [{"name": "main", "image": "dynabench"}]},
    }


def endpoint_slice(name, *pods, service="workers", labels=None):
    """Return an EndpointSlice; each pod comes as (pod, ready, serving)."""
    return {
        "metadata": {
            "name": name,
            "labels": {"kubernetes.io/service-name": service} | (labels or {"app.kubernetes.io/name": "dynabench"}),
        },
        "addressType": "IPv4",
        "ports": [],
        "endpoints": [
            {
                "addresses": ["10.0.0.1"],
                "conditions": {"ready": ready, "serving": serving, "terminating": not ready},
                "targetRef": {"kind": "Pod", "name": each["metadata"]["name"], "uid": each["metadata"]["uid"]},
            }
            for each, ready, serving in pods
        ],
    }
