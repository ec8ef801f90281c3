"""`python -m serving.sglang MODEL`: a worker with SGLang."""

from serving.cli.commands import run_engine

if __name__ == "__main__":
    run_engine("sglang")
