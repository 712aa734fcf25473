"""`turbojax generate --mesh`."""

import json

import pytest
from typer.testing import CliRunner

from turbojax.app.main import app

pytestmark = pytest.mark.mesh


def generate(*options):
    arguments = ["generate", "--no-compilation-cache", "--max-new-tokens", "6", *options]
    return CliRunner().invoke(app, arguments)


@pytest.mark.slow
def test_a_mesh_changes_no_text(tiny_folder):
    options = ("some text", "--model", tiny_folder, "--cache", "exact", "--batch-size", "2")
    texts = []
    for mesh in ((), ("--mesh", "data=2,model=2")):
        found = generate(*options, *mesh, "--json")
        assert found.exit_code == 0, found.output
        texts.append(json.loads(found.output)["text"])
    assert texts[0] == texts[1]


@pytest.mark.fuzz
def test_half_of_the_heads_of_each_device(tiny_folder):
    """Of one head a device the keys have 4 bits and the values 2: as many bytes as without it."""
    found = []
    for mesh in ((), ("--mesh", "model=2")):
        made = generate(
            "a text " * 12, "--model", tiny_folder, "--cache", "2/4bit", *mesh, "--json"
        )
        assert made.exit_code == 0, made.output
        found.append(json.loads(made.output)["cache_bytes"])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("model=16",), "mesh 'model=16' needs 16 devices, there are 8 (cpu)"),
        (("tensor=2",), "must be such as data=2,model=4"),
        (("model=8",), "num_heads=4 must be a multiple of 8"),
        (("data=2", "--batch-size", "3"), "must be multiples of data=2 of --mesh"),
    ],
)
def test_bad_meshes_are_refused_before_anything_is_loaded(options, message, tiny_folder):
    found = generate("some text", "--model", tiny_folder, "--mesh", *options)
    assert found.exit_code == 2
    assert message in " ".join(found.output.split())
