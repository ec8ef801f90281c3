"""KV beyond the GPU, for any family of engines: host memory, the link to it, and the tiers behind it."""
