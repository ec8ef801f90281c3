"""`python -m serving.llama_cpp MODEL`: a worker with llama.cpp."""

from serving.cli.commands import run_engine

if __name__ == "__main__":
    run_engine("llamacpp")
