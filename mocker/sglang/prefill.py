"""SGLang's scheduler in an engine that only computes prompts, for engines that answer them.

The loop is the usual one without decodes. A request whose prompt is computed has its first token, and has ended for the
scheduler. It keeps a row and its KV until the core releases it, when another engine has read that.

Source: SGLang 0.5.23, `srt/disaggregation/prefill.py` (`get_next_disagg_prefill_batch_to_run`,
`process_batch_result_disagg_prefill`). No recording of it exists. KV is never sent before the other engine has room for
all of it, so a driver adds a request only then (`optimistic_prefill_attempts` is 0, the default).
"""

from mocker.sglang.request import Request
from mocker.sglang.scheduler import Scheduler


class PrefillScheduler(Scheduler):
    """Decides whose prompts are computed."""

    def _merge(self) -> None:
        """Cache the last chunk; nobody goes on to decode."""
        self._cache_chunk()
        if self._last is not None:
            self._last.drop()

    def _release_ended(self, request: Request) -> None:
        """Cache a computed prompt, and keep its KV for another engine; one that was aborted leaves nothing."""
        if request.ending == "abort":
            self.pool.release(request, is_kept=True)
        else:
            self.pool.checkpoint(request, request.end)
            request.prefix = request.end
