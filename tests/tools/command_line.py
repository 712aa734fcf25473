"""Commands of `turbojax`, run in the tests' process."""

import json
from pathlib import Path

from typer.testing import CliRunner

from turbojax.app.main import app


def run(*arguments: object, **options):
    """A command in a terminal of 120 columns."""
    given = {"env": {"COLUMNS": "120"}, **options}
    return CliRunner().invoke(app, list(map(str, arguments)), **given)


def works(result):
    """The result of a command that has done what it was to do."""
    assert result.exit_code == 0, result.stderr
    return result


def refuses(result, *words: str):
    """The result of a command that has ended with these words, and without a traceback."""
    assert result.exit_code == 2
    for text in words:
        assert text in result.stderr
    assert "Traceback" not in result.stderr
    return result


def write(folder: Path, *lines: dict | str) -> str:
    """The path of a file with requests of `turbojax serve`."""
    file = folder / "requests.jsonl"
    file.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines))
    return str(file)
