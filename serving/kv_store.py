"""`python -m serving.kv_store`: memory for KV that all workers share, as a process of its own."""

from serving.cli.commands import run_app, store_app

if __name__ == "__main__":
    run_app(store_app, "serving.kv_store")
