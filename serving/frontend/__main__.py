"""`python -m serving.frontend`: the HTTP frontend, with the router inside."""

from serving.cli.commands import frontend_app, run_app

if __name__ == "__main__":
    run_app(frontend_app, "serving.frontend")
