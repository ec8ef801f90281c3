"""The paths of `vllm serve`, and what answers them."""
