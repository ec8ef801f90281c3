"""How the tokens of a rank of the mocker come to their readers, step by step."""

from mocker import Engine, Sequence
from mocker.step import CountedOutput
from serving.engines.mock.kv.handover import Handover, HandoverRank
from serving.engines.mock.live import Live, live_of
from serving.engines.mock.observer import RankWatch


class Delivery:
    """See the module."""

    def __init__(self, rank: HandoverRank, handover: Handover | None = None, watch: RankWatch | None = None) -> None:
        self._rank = rank
        self._handover = handover
        self._watch = watch

    def send(self, engine: Engine) -> None:
        """Complete the step in flight, and send what it made."""
        decoded = engine.decoded()
        output = engine.complete()
        if isinstance(output, CountedOutput):
            decoded = [sequence for sequence, _ in output.emitted]
        if self._watch is not None:
            self._watch.report(decoded, output)
        for sequence in output.finished:
            live = sequence.payload
            assert isinstance(live, Live)
            if sequence.failure:
                live.stream.end(sequence.failure, "engine")
            elif not sequence.is_remote_decode:
                live.finish()
            else:
                live.is_plain = (
                    False  # the last token comes with where the KV is, as a client may leave after that token
                )
        if isinstance(output, CountedOutput):
            for sequence, num_tokens in output.emitted:
                live = live_of(sequence)
                live.made += num_tokens
                if not (sequence.is_remote_decode and sequence.is_over):
                    live.flush()
            decoded = []
        prefilled = [sequence for sequence in output.sampled if not (sequence.is_token_shipped and sequence in decoded)]
        for sequence in (*decoded, *prefilled):
            live = sequence.payload
            assert isinstance(live, Live)
            made = live.made = live.made + 1
            if live.is_plain and live.end is None and live.sent == made - 1 and not live.stream.is_blocked:
                live.stream.send(live.output[live.sent])
                live.sent = made
            elif not (sequence.is_remote_decode and sequence.is_over):
                live.flush()
        if self._handover is not None:
            self._end_shared(self._handover, output.finished)

    def follow_loads(self, handover: Handover) -> None:
        """Read KV that there are blocks for now, and send the tokens that came with what was read."""
        outbox = self._rank.engine.outbox
        if loads := outbox.take_loads():
            handover.on_loads(self._rank, loads)
        for sequence in outbox.take_shipped():
            live = live_of(sequence)
            live.made += 1
            live.flush()

    def _end_shared(self, handover: Handover, finished: list[Sequence]) -> None:
        """End those finished requests that are shared with another worker."""
        for sequence in finished:
            live = live_of(sequence)
            if sequence.failure:
                continue  # it has ended
            if sequence.is_remote_decode:
                handover.on_finished(self._rank, live)
            elif live.load is not None:
                self.end(sequence)

    def end(self, sequence: Sequence) -> None:
        """Send the end of a request whose KV was to be read, unless it has been sent."""
        live = live_of(sequence)
        assert live.load is not None
        if sequence.failure:
            live.stream.end(sequence.failure, "engine")
            return
        if sequence.is_failed and live.load.error is not None:
            kind = "engine" if live.load.is_directed else live.load.error.kind
            live.stream.end(f"the KV of its prompt did not arrive: {live.load.error}", kind)
            return
        if sequence.is_token_shipped:
            live.made = max(live.made, 1)  # that may be all that was asked for
        live.finish()
        live.flush()
