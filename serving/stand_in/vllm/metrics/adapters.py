"""Which adapters are in use, as vLLM shows it."""

from serving.runtime.world import world


class AdaptersInUse:
    """The adapters of the requests that have got a token and have not ended.

    vLLM keeps a set of adapters that run and one of those that only wait, and then shows the names of both in both labels;
    of requests that wait for their first token it does not know yet. Each combination of names keeps the time at which
    it last held.
    """

    def __init__(self, max_loras: int) -> None:
        self.max_loras = max_loras
        self.seen_s: dict[str, float] = {}
        """When each combination last held, in seconds since 1970."""
        self._in_use: dict[str, int] = {}

    def begin(self, adapter: str) -> None:
        """Note a request's first token; its adapter is empty for the model itself."""
        if adapter:
            self._in_use[adapter] = self._in_use.get(adapter, 0) + 1

    def end(self, adapter: str) -> None:
        """Note a request's end."""
        if adapter not in self._in_use:
            return
        self._in_use[adapter] -= 1
        if not self._in_use[adapter]:
            del self._in_use[adapter]

    def record(self) -> None:
        """Note the present combination."""
        self.seen_s[",".join(self._in_use)] = world().wall_s()
