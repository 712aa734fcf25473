"""docs/serving.md: its examples run, one after the other, and print what the page says."""

import json
import re
import shlex

import pytest
from typer.main import get_command

from tests.tools.docs_helpers import DOCS, docs_text, examples, run
from turbojax.app.main import app
from turbojax.app.serve.requests import _KEYS, read_requests
from turbojax.models import ByteTokenizer

PAGE = DOCS / "serving.md"


@pytest.mark.optimized
@pytest.mark.fuzz
def test_examples():
    names = {"__name__": "docs"}
    engine, samples, interrupted, guesses, schema, threads, server = (
        run(example, names).splitlines() for example in examples(PAGE)
    )
    *results, last = engine
    kinds = [re.match(r"(\d) (\w+) '", line).groups() for line in results]
    assert sorted(kinds) == [("0", "stop"), ("1", "length"), ("2", "length")]
    reused = int(re.match(r"(\d+) tokens of prompts found, [1-9]\d* pages kept", last).group(1))
    assert reused >= 64  # of the beginning, which the first two ran side by side
    assert re.fullmatch(r"-\d\.\d\d '.+'", samples[0])
    assert interrupted[0] == "enough for now"
    assert re.fullmatch(r"stop '.*\):\\n'", interrupted[1])
    right, proposed = map(int, re.match(r"(\d+) of (\d+) guesses", guesses[1]).groups())
    assert proposed >= right >= 10
    new, steps = map(int, re.match(r"(\d+) tokens in (\d+) steps", guesses[2]).groups())
    assert new == 32 > steps
    rating = json.loads("\n".join(schema[:-1]))
    assert 1 <= rating["stars"] <= 5
    assert re.fullmatch(r"""stop '"\d\.\d{1,2}"\\x00'""", schema[-1])
    assert len(threads) == 3
    assert all(len(line) > 10 for line in threads)
    # The server's engine is one like the first.
    assert server[0] == threads[0]
    assert re.fullmatch(r'stop "\d\.\d{1,2}"', server[1])


def test_commands_have_the_options_that_the_page_names():
    known = {x for one in get_command(app).commands["serve"].params for x in one.opts}
    text = PAGE.read_text(encoding="utf-8")
    assert set(re.findall(r"(?<![\w'-])--[a-z][a-z-]+", text)) - {"--resume"} <= known
    for line in re.findall(r"^turbojax serve (.*)$", text, flags=re.MULTILINE):
        words = shlex.split(line, comments=True)
        assert {x for x in words if x.startswith("--")} <= known


def test_every_key_of_a_line_is_named():
    text = docs_text("serving.md")
    assert [key for key in _KEYS if f"`{key}`" not in text and key != "prompt"] == []


def test_the_lines_of_the_example_can_run():
    text = PAGE.read_text(encoding="utf-8")
    content = re.search(r"<< 'END'\n(.*?)END\n", text, flags=re.DOTALL).group(1)
    file = read_requests(content.encode(), ByteTokenizer(), 8)
    assert (len(file.requests), file.bad) == (3, ())
