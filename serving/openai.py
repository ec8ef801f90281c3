"""`python -m serving.openai URL`: a worker with an OpenAI server such as `vllm serve`."""

from serving.cli.commands import openai_app, run_with_arguments

if __name__ == "__main__":
    run_with_arguments(openai_app, "serving.openai")
