"""docs/images.md: its examples run, one after the other, and print what the page says."""

import contextlib
import io
import json
import re
from pathlib import Path

import pytest
from PIL import Image

from tests.models import image_helpers as tiny

PAGE = (Path(__file__).parents[2] / "docs" / "images.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
TEMPLATE = (
    "{{ bos_token }}{% for x in messages[0]['content'] %}"
    "{{ '<start_of_image>' if x['type'] == 'image' else x['text'] }}{% endfor %}"
)


def write_tokenizer(folder: Path) -> None:
    """Words, and the special tokens of images under the numbers of the config."""
    import tokenizers

    special = {"<bos>": 2, "<start_of_image>": 61, "<end_of_image>": 62, "<image_soft_token>": 64}
    words = {f"w{i}": i for i in range(61) if i not in (2, 3, 4, 5)} | {
        "what": 3,
        "is": 4,
        "this": 5,
    }
    model = tokenizers.models.WordLevel({**words, **special}, unk_token="w0")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([tokenizers.AddedToken(x, special=True) for x in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<bos>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


@pytest.mark.slow
def test_examples(tmp_path, monkeypatch):
    """With a tiny model under the name of a published one."""
    monkeypatch.chdir(tmp_path)
    write_tokenizer(tiny.write(Path("gemma-3-4b-it")))
    Image.fromarray(tiny.images()[1]).save("cat.png")
    names, lines = {"__name__": "docs"}, []
    for example in EXAMPLES:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(example, "docs/images.md", "exec"), names)
        lines.append(out.getvalue().strip())
    generated, trained, saved = lines
    assert generated.startswith("(1, 9, 32) ")
    assert names["tokens"] == [2, tiny.BEGIN, *[tiny.IMAGE] * 9, tiny.END, 3, 4, 5]
    assert (trained, saved) == ("True float32", "True")
