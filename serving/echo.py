"""`python -m serving.echo core|full`: an echo engine as a worker."""

from serving.cli.commands import echo_app, run_app

if __name__ == "__main__":
    run_app(echo_app, "serving.echo")
