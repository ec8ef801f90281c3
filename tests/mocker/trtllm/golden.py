"""Where the recordings of TensorRT-LLM's scheduler are."""

from pathlib import Path

GOLDEN = Path(__file__).parents[2] / "golden" / "trtllm"
FILES = sorted(GOLDEN.glob("*.jsonl.gz"))
