"""`turbojax serve --mesh`."""

import json

import pytest
from typer.testing import CliRunner

from turbojax.app.main import app

pytestmark = pytest.mark.mesh

LINES = [{"prompt": "abc" * i, "max_new_tokens": 6, "seed": i} for i in range(1, 6)]


def serve(folder, tmp_path, *options):
    file, out = tmp_path / "requests.jsonl", tmp_path / "results.jsonl"
    file.write_text("\n".join(map(json.dumps, LINES)))
    arguments = [str(file), "--out", str(out), "--model", folder, "--max-length", "64"]
    arguments += ["--reproducible", "--step-tokens", "16", "--json", *options]
    found = CliRunner().invoke(app, ["serve", "--no-compilation-cache", *arguments])
    assert found.exit_code == 0, found.output
    lines = map(json.loads, out.read_text().splitlines())
    # Without the progress that comes before it.
    report = json.loads(found.stdout[found.stdout.index("{") :])
    return {line["id"]: line["tokens"] for line in lines}, report["statistics"]


@pytest.mark.slow
def test_a_mesh_changes_no_text(tiny_folder, tmp_path):
    sizes = ("--num-pages", "20")
    alone, of_one = serve(tiny_folder, tmp_path, *sizes)
    split, of_two = serve(tiny_folder, tmp_path, *sizes, "--mesh", "data=2,model=2", "--overwrite")
    assert split == alone
    assert of_two["pages"] == 2 * of_one["pages"] == 40
    assert of_two["finished"] == of_one["finished"] == len(LINES)
    # What is kept may be gone on with, but not by devices that round otherwise.
    again, of_none = serve(tiny_folder, tmp_path, *sizes, "--mesh", "data=4,model=2", "--resume")
    assert (again, of_none) == (alone, None)
    file, out = str(tmp_path / "requests.jsonl"), str(tmp_path / "results.jsonl")
    options = ["--model", tiny_folder, "--max-length", "64", "--reproducible", "--resume"]
    found = CliRunner().invoke(app, ["serve", file, "--out", out, *options])
    assert found.exit_code == 2
    assert "another" in found.output


def test_bad_meshes_are_refused_before_anything_is_loaded(tiny_folder, tmp_path):
    file = tmp_path / "requests.jsonl"
    file.write_text(json.dumps(LINES[0]))
    for mesh, message in (
        ("data=3,model=4", "needs 12 devices, there are 8 (cpu)"),
        ("model=8", "num_heads=4 must be a multiple of 8"),
    ):
        found = CliRunner().invoke(
            app, ["serve", str(file), "--model", tiny_folder, "--mesh", mesh]
        )
        assert found.exit_code == 2
        assert message in " ".join(found.output.split())
