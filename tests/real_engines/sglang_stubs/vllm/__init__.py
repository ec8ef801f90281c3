"""Stands in for vLLM: away from GPUs, SGLang's rotary embedding imports a kernel of it, and then computes without."""
