"""`python -m serving.router_service`: the router as its own process."""

from serving.cli.commands import router_app, run_app

if __name__ == "__main__":
    run_app(router_app, "serving.router_service")
