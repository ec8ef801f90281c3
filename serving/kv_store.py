"""`python -m serving.kv_store`: KV memory that all workers share, in its own process."""

from serving.cli.commands import run_app, store_app

if __name__ == "__main__":
    run_app(store_app, "serving.kv_store")
