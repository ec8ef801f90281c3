"""Which images and other items of prompts the encoder computes in a step, and the cache of what it made.

An item is encoded as a whole, before the first step that computes any of its tokens, unless the cache has it. If the step's
budget or the cache has no room for it, the step ends before the item.

    absent -- fits into budget and cache --> in use -- its last user is past it, or gone --> freeable, the oldest first
       ^                                        ^                                               |     |
       |                                        +----------- somebody needs it again -----------+     |
       +------------------------------------- its room is needed -------------------------------------+

A sequence that is preempted after an item was planned for it leaves the item in the cache, though nobody has computed it: so
does vLLM.
"""

from collections import OrderedDict

from mocker.media import EncoderCounts, MediaItem
from mocker.sequence import Sequence
from mocker.vllm.config import EngineConfig
from mocker.vllm.speculation import Speculation


class Encoder:
    """The encoder's work in the step that is being scheduled, and its cache, both counted in tokens."""

    def __init__(self, config: EngineConfig) -> None:
        """Start with an empty cache, for an engine whose model has an encoder."""
        assert config.max_tokens_per_mm_item is not None
        rules = config.rules
        # vLLM's `compute_mm_encoder_budget`, for the work of a step as for the cache.
        self.size = max(config.max_num_batched_tokens, config.max_tokens_per_mm_item)
        """Most tokens of a step, and room in the cache."""
        self.counts = EncoderCounts()
        self._is_whole = config.disable_chunked_mm_input
        self._is_whole_from_start = rules.holds_whole_items
        self._num_ahead = Speculation(config).num_read_ahead  # tokens after those of a step that the drafter reads
        self._num_kept = 0 if rules.frees_items_at_once else self._num_ahead
        self._budget = self.size
        self.num_free = self.size
        """Room in the cache."""
        self._num_unused = self.size  # with what is freeable
        self.users: dict[str, int] = {}
        """The items in the cache, and how many sequences need each."""
        self._freeable: OrderedDict[str, int] = OrderedDict()
        self._held: dict[Sequence, set[int]] = {}  # places of items in `media`; in a set's order, as in vLLM
        self._planned: list[int] = []  # by the last `cut`
        self._repeated: list[int] = []  # items of the same sequence that equal a planned one
        self._found: list[MediaItem] = []  # that the last `cut` has let its sequence use
        self._num_planned = 0
        self._step: dict[Sequence, list[MediaItem]] = {}  # what is planned in this step

    # A step

    def begin_step(self) -> None:
        """Begin a step, with the whole budget."""
        self._budget = self.size
        self._step = {}

    def cut(self, sequence: Sequence, computed: int, count: int) -> int:
        """Return how many of the next `count` tokens a step can compute, and plan what has to be encoded for them."""
        self._planned, self._repeated, self._found, self._num_planned = [], [], [], 0
        media = sequence.media
        if media[-1].end <= computed:
            return count
        planned: set[str] = set()
        end = computed + count + self._num_ahead
        for place, item in enumerate(media):
            if item.end <= computed:
                continue
            if item.offset >= end:
                break
            if self._is_whole and self._would_split(item, computed, count):
                return max(item.offset - computed - self._num_ahead, 0)
            if item.id in planned:
                self._repeated.append(place)
            elif item.id in self.users:
                self._use(sequence, place, item)
            elif self._has_room(item.num_tokens):
                planned.add(item.id)
                self._planned.append(place)
                self._num_planned += item.num_tokens
            else:
                return max(min(count, item.offset - computed - self._num_kept), 0)
        return count

    def _would_split(self, item: MediaItem, computed: int, count: int) -> bool:
        """Return whether a chunk of so many tokens would end within an item that it has to contain as a whole."""
        latest = item.offset if self._is_whole_from_start else item.offset - 1
        return computed <= latest and computed + count < item.end

    def _has_room(self, num_tokens: int) -> bool:
        """Return whether budget and cache have room for an item beside those planned, after making it."""
        if num_tokens > self._budget - self._num_planned:
            return False
        needed = num_tokens + self._num_planned
        if needed > self._num_unused:
            return False
        while needed > self.num_free:
            oldest, freed = self._freeable.popitem(last=False)
            del self.users[oldest]
            self.num_free += freed
        return True

    def take(self, sequence: Sequence) -> None:
        """Encode what the last `cut` has planned for a sequence."""
        media = sequence.media
        if self._planned:
            self._step[sequence] = items = [media[place] for place in self._planned]
            self._held.setdefault(sequence, set()).update(self._planned)
            for item in items:
                self.users[item.id] = 1
            self.num_free -= self._num_planned
            self._num_unused -= self._num_planned
            self._budget -= self._num_planned
        for place in self._repeated:
            self._use(sequence, place, media[place])
        self.counts.found += len(self._found)
        self.counts.found_tokens += sum([item.num_tokens for item in self._found])

    def end_step(self) -> int:
        """Return the tokens that the step encodes."""
        items = [item for each in self._step.values() for item in each]
        num_tokens = sum([item.num_tokens for item in items])
        self.counts.computed += len(items)
        self.counts.computed_tokens += num_tokens
        self._step = {}
        return num_tokens

    # The cache

    @property
    def freeable(self) -> list[str]:
        """The items in the cache that nobody needs, the next one to go first."""
        return list(self._freeable)

    def _use(self, sequence: Sequence, place: int, item: MediaItem) -> None:
        """Let a sequence use an item that is in the cache."""
        held = self._held.setdefault(sequence, set())
        if place in held:
            return
        self._found.append(item)
        is_new = not self._holds(sequence, item.id)
        held.add(place)
        if not is_new:
            return
        if not self.users[item.id]:
            self._num_unused -= self._freeable.pop(item.id)
        self.users[item.id] += 1

    def _holds(self, sequence: Sequence, id: str) -> bool:
        return any(sequence.media[place].id == id for place in self._held.get(sequence, ()))

    def pass_by(self, sequence: Sequence, num_computed: int) -> None:
        """Free the items that a sequence is past, once so many of its tokens are computed for certain."""
        for place in list(self._held.get(sequence, ())):
            if sequence.media[place].end + self._num_kept <= num_computed:
                self._free(sequence, place)

    def release(self, sequence: Sequence) -> None:
        """Free all items of a sequence, which stay in the cache until their room is needed."""
        for place in list(self._held.get(sequence, ())):
            self._free(sequence, place)

    def take_back(self, sequence: Sequence) -> None:
        """Free all items of a preempted sequence; what this step would have encoded for it is in the budget again."""
        self._budget += sum([item.num_tokens for item in self._step.pop(sequence, ())])
        self.release(sequence)

    def _free(self, sequence: Sequence, place: int) -> None:
        item, held = sequence.media[place], self._held[sequence]
        held.remove(place)
        if not held:
            del self._held[sequence]
        if self._holds(sequence, item.id):
            return
        self.users[item.id] -= 1
        if not self.users[item.id]:
            self._freeable[item.id] = item.num_tokens
            self._num_unused += item.num_tokens
