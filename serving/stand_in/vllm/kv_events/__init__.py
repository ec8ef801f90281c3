"""KV events over ZeroMQ as vLLM 0.32 publishes them."""
