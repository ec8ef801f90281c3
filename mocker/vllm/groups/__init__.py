"""KV cache groups, as in vLLM's hybrid manager: layers that keep different things share one pool of blocks."""
