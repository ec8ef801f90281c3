"""`python -m serving.own pytok|pystr FILE`: an engine of your own as a worker."""

from serving.cli.commands import own_app, run_app

if __name__ == "__main__":
    run_app(own_app, "serving.own")
