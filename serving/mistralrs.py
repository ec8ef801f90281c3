"""`python -m serving.mistralrs MODEL`: a worker with mistral.rs."""

from serving.cli.commands import run_engine

if __name__ == "__main__":
    run_engine("mistralrs")
