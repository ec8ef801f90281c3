"""lm-eval's own client against a served model: answers generated, and choices and texts scored by log-probabilities."""

import json
import os
import subprocess
import sys

import pytest

from serving.engines.mock.answers.made_up import log_probability

QUESTIONS = [
    {"q": "two and two are", "a": "four", "choices": [" four", " a banana of uncommon size"], "gold": 0},
    {"q": "the sky is", "a": "blue", "choices": [" a sandwich with cheese", " blue"], "gold": 1},
]
COMMON = """
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
doc_to_text: "{{{{q}}}}"
"""
TASKS = {
    "generated": """
task: generated
output_type: generate_until
doc_to_target: "{{a}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 8, temperature: 0.0}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
""",
    "chosen": """
task: chosen
output_type: multiple_choice
doc_to_target: "{{gold}}"
doc_to_choice: "{{choices}}"
target_delimiter: ""
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
""",
    "scored": """
task: scored
output_type: loglikelihood_rolling
doc_to_target: "{{q}}"
metric_list:
  - {metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}
""",
}
RUN = """
import json, sys
import lm_eval
from lm_eval.tasks import TaskManager
kind, arguments, tasks, folder = json.loads(sys.argv[1])
result = lm_eval.simple_evaluate(
    model=kind, model_args=arguments, tasks=tasks, batch_size=1, apply_chat_template="chat" in kind, bootstrap_iters=0,
    task_manager=TaskManager(include_path=folder, include_defaults=False), log_samples=True,
)
samples = {task: [sample["filtered_resps"] for sample in found] for task, found in result["samples"].items()}
print(json.dumps({"results": result["results"], "samples": samples}, default=str))
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, QUESTIONS)))
    for name, text in TASKS.items():
        first, _, rest = text.strip().partition("\n")
        common = COMMON.format(data=data)
        if name == "scored":
            common = common.replace('"{{q}}"', '""')
        (folder / f"{name}.yaml").write_text(f"{first}{common}{rest}\n")
    return folder


def evaluate(kind, tasks, wanted, **arguments):
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tasks / "home"), "OPENAI_API_KEY": "x"}
    asked = json.dumps([kind, arguments | {"max_retries": 1}, wanted, str(tasks)])
    run = subprocess.run(
        [sys.executable, "-c", RUN, asked], env=os.environ | offline, capture_output=True, text=True, timeout=170
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.strip().rpartition("\n")[2])


@pytest.mark.timeout(240)
def test_lm_eval_generates_and_scores(tiny, tasks, model_path):
    import tokenizers

    found = evaluate(
        "local-completions",
        tasks,
        ["generated", "chosen", "scored"],
        model="tiny",
        base_url=f"{tiny.url}/v1/completions",
        tokenizer_backend="remote",
    )
    answers = [answer[0] for answer in found["samples"]["generated"]]
    assert all(0 < len(answer.split()) <= 8 for answer in answers)
    # The mocker's log-probabilities are a function of the token, so we know what each choice must score.
    tokenizer = tokenizers.Tokenizer.from_file(str(model_path / "tokenizer.json"))
    for question, scores in zip(QUESTIONS, found["samples"]["chosen"], strict=True):
        for choice, (score, is_greedy) in zip(question["choices"], scores, strict=True):
            start = len(tokenizer.encode(question["q"]).ids)
            tokens = tokenizer.encode(question["q"] + choice).ids[start:]
            assert float(score) == pytest.approx(sum(map(log_probability, tokens)))
            assert str(is_greedy) == "True"
    assert found["results"]["chosen"]["acc,none"] == 1.0
    assert found["results"]["scored"]["word_perplexity,none"] > 1


@pytest.mark.timeout(240)
def test_lm_eval_talks_to_a_chat(tiny, tasks):
    found = evaluate(
        "local-chat-completions",
        tasks,
        ["generated"],
        model="tiny",
        base_url=f"{tiny.url}/v1/chat/completions",
        eos_string="<|im_end|>",
    )
    assert all(answer[0] for answer in found["samples"]["generated"])
