"""docs/evaluation.md: its examples run, and its tasks and options are what the code takes."""

import json
import re

import pytest
from docs_helpers import DOCS, examples, run

from turbojax import evaluation
from turbojax.evaluation.tasks import _KEYS, parse_task

PAGE = DOCS / "evaluation.md"
TEXT = PAGE.read_text(encoding="utf-8")
TASKS, PYTHON = examples(PAGE)


def test_the_tasks_of_the_page():
    [block] = re.findall(r"```json\n(.*?)```", TEXT, flags=re.DOTALL)
    words, choice, chat = (parse_task(line, i) for i, line in enumerate(block.splitlines(), 1))
    assert words.is_right(" Paris")
    assert choice.choices[choice.right] == " oxygen"
    assert chat.is_right("It is 51.")
    assert set(re.findall(r"^\| `(\w+)`", TEXT, flags=re.MULTILINE)) <= {*_KEYS}
    named = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", TEXT, flags=re.MULTILINE)
    assert {x for names in named for x in re.findall(r"\w+", names)} == {*_KEYS}


def test_the_file_of_questions(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    item = {"question": "2 times 600?", "answer": "It is 1,200. #### 1,200"}
    (tmp_path / "test.jsonl").write_text(f"{json.dumps(item)}\n")
    run(TASKS)
    [task] = evaluation.read_tasks(tmp_path / "gsm8k.jsonl")
    assert task.prompt.endswith("#### 19\n\nQuestion: 2 times 600?\nAnswer:")
    assert task.is_right(" That is 2 * 600. #### 1200.")
    assert not task.is_right(" That is 1200.")


@pytest.mark.slow
def test_python():
    exact, kv4 = run(PYTHON).splitlines()
    assert exact == "exact +0.000 100%"
    assert re.fullmatch(r"kv4   [+-]0\.\d{3} \d+%", kv4)
