"""KV beyond the GPU: host memory, as vLLM's OffloadingConnector keeps it, and what an engine asks of the tiers behind it."""
