"""The options that `--help` shows, of the commands that have many; `--help-all` shows the others too."""

QUESTIONS = {
    "Which router, and which settings?": ("--router-mode", "--vary", "--find", "--repeats"),
    "Which requests are sent?": ("--columns", "--max-requests", "--rate-scale", "--concurrency"),
    "To which workers?": (
        "--deployment",
        "--url",
        "--engine",
        "--workers",
        "--prefill-workers",
        "--decode-workers",
        "--planner",
    ),
    "Of which model, on which GPU?": (
        "--model",
        "--model-name",
        "--gpu",
        "--price",
        "--max-gpus",
        "--tensor-parallel-size",
        "--timing-file",
        "--num-gpu-blocks",
        "--max-num-batched-tokens",
    ),
    "How good must it be?": ("--slo", "--attainment", "--loads", "--real", "--fail-if"),
    "Where does it listen?": ("--http-host", "--http-port"),
    "Where do the results go?": ("--out", "--json"),
}
"""The options by the question that they answer, in the order of the help."""
