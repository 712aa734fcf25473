"""The texts by which changes of structure are held to change no program."""

import pytest

from benchmarks.device import traced

CASE = "^plain append, 4 bits$"


def test_equal_code_gives_equal_texts_and_a_difference_is_shown(tmp_path, capsys):
    traced.main(["--write", str(tmp_path), CASE])
    [path] = tmp_path.iterdir()
    traced.main(["--compare", str(tmp_path), CASE])
    assert "equal: plain append, 4 bits" in capsys.readouterr().out
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(" add ", " sub ", 1), encoding="utf-8")
    with pytest.raises(SystemExit, match="1 differ"):
        traced.main(["--compare", str(tmp_path), CASE])
    shown = capsys.readouterr().out
    assert "differs: plain append, 4 bits" in shown
    assert " sub " in shown


def test_places_do_not_count():
    one = "pallas_call[name=_append name_and_src_info=kernel at /a/b.py:12 x=<f at 0x7f1>] add"
    other = "pallas_call[name=_other name_and_src_info=kernel at /c/d.py:9 x=<f at 0x8a2>] add"
    assert traced.normalized(one) == traced.normalized(other)
    assert traced.normalized(one) != traced.normalized(other.replace("add", "sub"))
    assert traced.normalized("name=append") != traced.normalized("name=decode")


def test_kernels_and_public_operations_are_cases():
    names = [name for name, _ in traced.cases()]
    assert len(names) == len(set(names)) == len({traced.path_of(traced.Path(), x) for x in names})
    assert {"prompts, fp8, 128", "plain decode, 4 bits"} <= set(names)
