"""KV that left the GPU's cache and is kept in host memory, as vLLM's OffloadingConnector keeps it."""
