"""Recordings of TensorRT-LLM's scheduler."""
