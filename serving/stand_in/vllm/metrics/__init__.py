"""The metrics of `vllm serve`, counted at the moments at which vLLM counts them."""
