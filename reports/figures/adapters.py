"""Which LoRA adapters the requests of a run asked for."""

import numpy as np

from reports.record.pools import AdapterUse
from reports.record.records import Requests


def adapters_asked(requests: Requests) -> tuple[AdapterUse, ...]:
    """Return each adapter with the measured requests that asked for it, and their mean TTFT."""
    ttft_s = requests.first_token_s - requests.intended_s
    found = []
    for adapter in sorted(set(requests.adapter) - {""}):
        counted = (requests.adapter == adapter) & requests.is_measured
        mean_s = ttft_s[counted].mean()
        found.append(AdapterUse(adapter, int(counted.sum()), None if mean_s is np.ma.masked else float(mean_s)))
    return tuple(found)
