"""A network in memory: what is published is heard, and what is registered is seen, before the call returns."""

from collections import defaultdict

from serving.runtime.address import Instance
from serving.runtime.messages import CallError


class Network:
    """What all members share."""

    def __init__(self):
        self.keys = {}
        self.watches = []
        self.listeners = defaultdict(list)
        self.published = []

    def join(self, instance_id):
        return Member(self, instance_id)

    def change(self, key, value):
        """Register a key, or take it out with None."""
        if value is None:
            del self.keys[key]
        else:
            self.keys[key] = value
        for prefix, on_change in list(self.watches):
            if key.startswith(prefix):
                on_change(key, value)


class Member:
    """Plays a process's `DistributedRuntime`, its discovery and its event plane."""

    def __init__(self, network, instance_id):
        self.instance_id = instance_id
        self.network = network
        self.discovery = self.events = self

    async def register(self, key, value):
        self.network.change(key, value)

    async def watch(self, prefix, on_change):
        watch = (prefix, on_change)
        self.network.watches.append(watch)
        for key, value in list(self.network.keys.items()):
            if key.startswith(prefix):
                on_change(key, value)
        return lambda: self.network.watches.remove(watch)

    async def announce(self, subject):
        pass

    async def publish(self, subject, data, *, durable=False):
        self.network.published.append((subject, data))
        for hear in list(self.network.listeners[subject]):
            hear(data)

    async def subscribe(self, subject, on_event, *, durable=False):
        self.network.listeners[subject].append(on_event)
        return lambda: self.network.listeners[subject].remove(on_event)

    async def client(self, address, on_join, on_leave):
        self.instances = Instances(address, on_join, on_leave)
        return self.instances


class Instances:
    """Plays a `Client`: the test says who joins and leaves, and what each sends as its snapshot."""

    def __init__(self, address, on_join, on_leave):
        self._address = address
        self._on_join = on_join
        self.leave = on_leave
        self.snapshots = {}
        self.asked = []

    def join(self, instance_id):
        self._on_join(Instance(*self._address, instance_id, "unix:/nowhere"))

    def side_call(self, instance_id, address, request):
        self.asked.append((instance_id, address.endpoint, request))
        if instance_id not in self.snapshots:
            raise CallError("it is gone", "lost")
        return self._send(self.snapshots[instance_id])

    async def _send(self, items):
        for item in items:
            yield item

    async def close(self):
        pass
