"""The outlines of vLLM's answers, as recorded: each outline once, as many requests have the same."""

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "vllm_answers.json"


def load() -> dict[str, dict[str, Any]]:
    """Return the outlines by server and case."""
    kept = json.loads(FILE.read_text())
    return {
        server: {name: kept["outlines"][number] for name, number in cases.items()}
        for server, cases in kept["servers"].items()
    }


def save(answers: dict[str, dict[str, Any]]) -> None:
    """Keep them."""
    lines: dict[str, int] = {}
    servers = {
        server: {
            name: lines.setdefault(json.dumps(outline, ensure_ascii=False, separators=(",", ":")), len(lines))
            for name, outline in cases.items()
        }
        for server, cases in answers.items()
    }
    outlines = ",\n".join(lines)
    names = ",\n".join(f'"{server}": {json.dumps(cases, indent=0)}' for server, cases in servers.items())
    FILE.write_text(f'{{"outlines": [\n{outlines}\n],\n"servers": {{\n{names}\n}}}}\n')
