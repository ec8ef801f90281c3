"""Sets that are iterated in the same order in each run."""

from typing import TypeVar

Element = TypeVar("Element")


class OrderedSet(dict[Element, None]):
    """A set that is iterated in the order in which its elements came; a `set` goes by hashes, and so by addresses."""

    __slots__ = ()

    def add(self, element: Element) -> None:
        """Add an element, as the last; if it is there, it keeps its place."""
        self[element] = None

    def discard(self, element: Element) -> None:
        """Remove an element that may be there."""
        self.pop(element, None)
