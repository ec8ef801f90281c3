"""`python -m serving.trtllm MODEL`: a worker with TensorRT-LLM."""

from serving.cli.commands import run_engine

if __name__ == "__main__":
    run_engine("trtllm")
