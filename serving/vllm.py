"""`python -m serving.vllm MODEL`: a worker with vLLM."""

from serving.cli.commands import run_engine

if __name__ == "__main__":
    run_engine("vllm")
