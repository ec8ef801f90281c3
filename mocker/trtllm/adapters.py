"""Adapter pages: LoRA adapters need memory, and only some fit into a step together."""


class AdapterPages:
    """The pages that the adapters of one step's requests take. An adapter counts once."""

    def __init__(self, num_pages: int, pages_of: dict[int, int]) -> None:
        self._num_pages = num_pages
        self._pages_of = pages_of
        self._num_taken = 0
        self._present: set[int] = set()

    def begin(self) -> None:
        """Begin with no adapter."""
        self._num_taken = 0
        self._present.clear()

    def fits(self, adapter: int | None) -> bool:
        """Return whether a request with this adapter may join."""
        if adapter is None or adapter in self._present:
            return True
        return self._num_taken + self._pages_of[adapter] <= self._num_pages

    def add(self, adapter: int | None) -> None:
        """Let a request with this adapter join."""
        if adapter is not None and adapter not in self._present:
            self._present.add(adapter)
            self._num_taken += self._pages_of[adapter]
