"""docs/video.md: its examples run, one after the other, and print what the page says."""

import re

import pytest

from tests.tools.docs_helpers import DOCS, examples, run
from turbojax.finetune.optimizer import default_promotion

PAGE = DOCS / "video.md"


@pytest.mark.optimized
@pytest.mark.fuzz
def test_examples():
    names = {"__name__": "docs"}
    with default_promotion():  # optax relies on it
        printed = [run(example, names).strip() for example in examples(PAGE)]
    said = re.findall(r"It prints `(.*?)`[.:]", PAGE.read_text(encoding="utf-8"))
    assert len(printed) == len(said) == 3
    assert printed == said
