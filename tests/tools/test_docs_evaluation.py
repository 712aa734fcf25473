"""docs/evaluation.md: its examples run, and its tasks and options are what the code takes."""

import json
import re

import pytest

from tests.tools.docs_helpers import DOCS, examples, run
from turbojax import evaluation
from turbojax.models import ByteTokenizer

PAGE = DOCS / "evaluation.md"
TEXT = PAGE.read_text(encoding="utf-8")
[PYTHON] = examples(PAGE)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # packages of lm-eval warn of each other
def test_the_task_of_the_page(tmp_path):
    [yaml] = re.findall(r"```yaml\n(.*?)```", TEXT, flags=re.DOTALL)
    [lines] = re.findall(r"```json\n(.*?)```", TEXT, flags=re.DOTALL)
    (tmp_path / "capitals.yaml").write_text(yaml)
    (tmp_path / "capitals.jsonl").write_text(lines)
    tasks = evaluation.TaskMeasure([str(tmp_path / "capitals.yaml")], ByteTokenizer([0]))
    [item] = [json.loads(line) for line in lines.splitlines()]
    assert item["choices"][item["answer"]] == "Paris"
    assert len(tasks.identity["checksum"]) == 16


@pytest.mark.fuzz
def test_python():
    exact, kv4 = run(PYTHON).splitlines()
    assert exact == "exact +0.000 100%"
    assert re.fullmatch(r"kv4   [+-]0\.\d{3} \d+%", kv4)
