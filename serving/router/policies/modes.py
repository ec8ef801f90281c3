"""Router modes by name, and additions to them: `lmetric+eps(5)`, `marginal+late(8192)+wspt(0.1)`."""

import random
import re
from dataclasses import dataclass

from foundation.own_code import base_and_additions, is_own, own_class
from foundation.text import instead_of
from serving.router.config import RouterConfig
from serving.router.policies import affinity, kv, load, oracles, predicting, prefix
from serving.router.policies.policy import Policy

ROUTER_MODES: dict[str, type[Policy]] = {
    "random": load.Random,
    "round-robin": load.RoundRobin,
    "least-loaded": load.LeastLoaded,
    "kv": kv.Kv,
    "kv-tiered": kv.KvTiered,
    "p2c": load.PowerOfTwo,
    "least-tokens": load.LeastTokens,
    "session": affinity.Session,
    "chwbl": affinity.Chwbl,
    "prefix-longest": prefix.PrefixLongest,
    "sgl-cache-aware": prefix.SglCacheAware,
    "aibrix-prefix": prefix.AibrixPrefix,
    "prodstack-loadaware": prefix.ProdstackLoadaware,
    "llmd-weighted": prefix.LlmdWeighted,
    "dynamo-kv": kv.DynamoKv,
    "dynamo-kv-p8": kv.DynamoKvP8,
    "dynamo-lmetric": kv.DynamoLmetric,
    "lmetric": prefix.Lmetric,
    "lmetric-new": prefix.LmetricNew,
    "llumnix": prefix.Llumnix,
    "eldr": prefix.Eldr,
    "dualmap": predicting.DualMap,
    "preble-e2": predicting.PrebleE2,
    "jspt": predicting.Jspt,
    "marginal": predicting.Marginal,
    "marginal-all": predicting.MarginalAll,
    "oracle-cache": oracles.OracleCache,
    "oracle-load": oracles.OracleLoad,
    "oracle-rollout": oracles.OracleRollout,
}
"""Every router mode by name; the CLI, the docs and the reports list them from here."""

SYMBOLS = {
    "L, B, R": "prompt tokens; block size; R = ceil(L / B)",
    "m, miss": "matched blocks; miss = L - m B",
    "Q": "prefill tokens sent there and not computed yet",
    "A, a": "blocks of the requests in flight there; the blocks among them that this prompt shares",
    "n, d, e": "requests in flight there; those among them that decode; those that have this whole prompt",
    "C, K": "context tokens of the decoding requests; prompt tokens of all requests in flight",
    "q, u": "requests waiting; KV usage (both as the worker reports them)",
    "F": "time to load what is beyond the GPU",
    "W": "workers",
    "Tp, T0, Td, Tk": "time of a prompt token, a step, a decoding request, a context token (--step-base-ms and others)",
    "s": "steps that the prompt needs, with --step-budget-tokens in each",
    "E[out], alpha": "--expected-osl; --interference",
    "P, c, k, decay": "--prefill-load-scale; --overlap-score-credit; k as given; --overlap-score-credit-decay",
    "weight": "--kv-overlap-score-weight",
    "SLO": "--ttft-slo-s",
}
"""What the formulas of modes are made of: facts about the prompt and about each worker, and settings."""

ADDITIONS = {
    "temp": "temp(T): draw from a softmax of the costs at temperature T",
    "eps": "eps(X): any worker within X % of the range of costs counts as best",
    "bound": "bound(X): leave out workers with X (at least 1) or more times the mean of requests in flight, rounded up",
    "adapter": "adapter(N): prefer workers that have the request's LoRA adapter among the last N, unless they have 1.25 times the mean of requests in flight",
    "predict": "predict(S): in addition to KV events, assume for S seconds that a routed prompt is cached",
    "stale": "stale(MS): see the workers' load and reports as they were when last polled, every MS milliseconds",
    "late": "late(H): hold a request at the router while H or more prefill tokens wait at its worker (virtual time)",
    "wspt": "wspt(A): with late, the held request with the smallest uncached tokens - A x waited ms goes first",
}
"""Additions to a mode, each with a number."""

MOST = 10**9
"""The largest number that an addition takes."""

_FORM = re.compile(r"([a-z]+)\(([0-9.]+)\)")


@dataclass(frozen=True, slots=True)
class Mode:
    """A router mode as a user names it."""

    name: str
    base: str
    temp: float | None = None
    eps: float = 0.0
    bound: float = 0.0
    adapter: float = 0.0
    predict: float = 0.0
    stale: float = 0.0
    late: float = 0.0
    wspt: float | None = None

    @classmethod
    def parse(cls, name: str) -> "Mode":
        """Read `base`, or `base+addition(number)+...`; the base is a built-in mode, or a file with the user's.

        Raises:
            ValueError: there is no such mode or addition.
        """
        base, additions = base_and_additions(name)
        _kind(base)
        found = [_addition(name, addition) for addition in additions]
        values = dict(found)
        if len(values) < len(found):
            twice = next(one for one, _ in found if sum(other == one for other, _ in found) > 1)
            raise ValueError(f"router_mode {name!r}: {twice} is added twice; expected one number for it")
        if "wspt" in values and "late" not in values:
            raise ValueError(f"router_mode {name!r}: wspt orders requests that late(H) holds; add late")
        if values.get("bound", 1) < 1:
            raise ValueError(
                f"router_mode {name!r}: bound({values['bound']:g}) leaves out every worker; expected 1 or more"
            )
        if (slots := values.get("adapter", 1)) < 1 or slots != int(slots):
            raise ValueError(
                f"router_mode {name!r}: adapter({slots:g}); expected a whole number of at least 1, as --max-loras"
            )
        return cls(name, base, **values)

    def policy(self, config: RouterConfig, rng: random.Random) -> Policy:
        """Make the policy."""
        return _kind(self.base)(config, rng)

    @property
    def is_oracle(self) -> bool:
        """Whether it knows what no live router can know."""
        return self.base.startswith("oracle-")

    @property
    def is_held(self) -> bool:
        """Whether requests may wait at the router."""
        return self.late > 0


def _addition(name: str, addition: str) -> tuple[str, float]:
    match = _FORM.fullmatch(addition)
    if match is None or match[1] not in ADDITIONS or match[2].count(".") > 1 or match[2] == ".":
        raise ValueError(
            f"router_mode {name!r}: {addition!r} cannot be added; expected one of {'; '.join(ADDITIONS.values())}"
        )
    if (number := float(match[2])) > MOST:
        raise ValueError(f"router_mode {name!r}: {addition!r} is out of range; expected a number from 0 to {MOST:,}")
    return match[1], number


def _kind(base: str) -> type[Policy]:
    if base in ROUTER_MODES:
        return ROUTER_MODES[base]
    if is_own(base):
        try:
            return own_class(base, Policy)
        except ValueError as error:
            raise ValueError(f"router_mode {error}") from error
    raise ValueError(f"router_mode {base!r} is unknown; {instead_of(base, ROUTER_MODES)}")


def check_registered_mode(name: str) -> None:
    """Refuse a router mode that a worker must not ask for: a worker's registration must not make us run a file.

    Raises:
        ValueError: the live router cannot use it, or it is in a file.
    """
    if is_own(base_and_additions(name)[0]):
        raise ValueError(f"router_mode {name!r}: a worker cannot ask for a mode in a file; give it to the frontend")
    check_live_mode(name)


def check_live_mode(name: str) -> None:
    """Refuse a router mode that the live router cannot use.

    Raises:
        ValueError: there is no such mode, or it holds requests or is an oracle.
    """
    mode = Mode.parse(name)
    if mode.is_held or mode.is_oracle:
        raise ValueError(f"router_mode {name!r}: late(H) and the oracles are for virtual time (dynabench simulate)")


def wants_kv_events(mode: str, config: RouterConfig) -> bool:
    """Return whether ranks must report KV events for a mode."""
    parsed = Mode.parse(mode)
    return parsed.policy(config, random.Random(0)).needs_overlap and (config.use_kv_events or parsed.is_oracle)
