"""KV beyond the GPU: host memory, as in vLLM's OffloadingConnector, and an engine's requests to the tiers behind it."""
