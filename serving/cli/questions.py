"""The options that `--help` of serving's programs shows; `--help-all` shows the others too."""

QUESTIONS = {
    "Which model?": ("--model-path", "--model-name", "--context-length"),
    "On which engine?": (
        "--model",
        "--gpu",
        "--timing-file",
        "--tensor-parallel-size",
        "--num-gpu-blocks",
        "--max-num-batched-tokens",
        "--extra-engine-args",
        "--dry-run",
    ),
    "For which part of each request?": ("--role", "--kv-role"),
    "How are requests spread?": ("--router-mode", "--kv-overlap-score-weight"),
    "Where does it listen?": ("--http-host", "--http-port", "--endpoint", "--num-workers"),
    "How do processes find each other?": ("--namespace", "--discovery-backend", "--etcd-endpoints", "--nats-server"),
    "How does it ask and print?": (
        "--temperature",
        "--max-tokens",
        "--batch-concurrency",
        "--interactive",
        "--verbose",
    ),
}
"""The options by the question that they answer, in the order of the help."""
