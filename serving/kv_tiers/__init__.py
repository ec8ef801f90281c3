"""KV beyond the GPU, as real bytes: one protocol, three kinds of tier."""
