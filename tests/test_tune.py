"""Tuning: the table that kernels read, and how it is made; with a fake clock."""

import functools
import json
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

from benchmarks import __main__ as command
from benchmarks import tables, timing, tune
from benchmarks.suites import tuning as suite
from turbojax.ops.turbo_attention import mosaic_decode, mosaic_gpu, tuning

LAUNCHES = {"mosaic_decode": mosaic_decode.Launch, "mosaic_gpu": mosaic_gpu.Launch}


class Launch(NamedTuple):
    stages: int
    warps: int


DEFAULT = Launch(2, 4)


def entry(launch, device="a GPU", bits=(4, 2), **sizes):
    traits = {"bits": list(bits), "dim": 128}
    return {
        "kernel": "k",
        "device": device,
        "traits": traits,
        "sizes": sizes,
        "launch": launch,
    }


TABLE = (
    entry({"stages": 3, "warps": 8}, batch=16, tokens=4096),
    entry({"stages": 4, "warps": 1}, batch=1, tokens=4096),
    entry({"stages": 9, "warps": 9}, device="another", batch=16, tokens=4096),
    entry({"stages": 5}, bits=(2,), batch=16, tokens=4096),
)


@pytest.mark.parametrize(
    ("bits", "batch", "tokens", "expected"),
    [
        ((4, 2), 16, 4096, Launch(3, 8)),
        ((4, 2), 8, 3000, Launch(3, 8)),  # 1 and 0.4 doublings away
        ((4, 2), 2, 4096, Launch(4, 1)),
        ((4, 2), 16, 32768, DEFAULT),  # 3 doublings
        ((4,), 16, 4096, DEFAULT),
        ((2,), 16, 4096, Launch(5, 4)),  # what an entry does not say is the default's
    ],
)
def test_the_nearest_shape_of_the_same_traits(monkeypatch, bits, batch, tokens, expected):
    monkeypatch.setattr(tuning, "entries", lambda: TABLE)
    monkeypatch.setattr(tuning, "gpu_kind", lambda: "a GPU")
    call = functools.partial(
        tuning.launch, traits={"bits": bits, "dim": 128}, sizes={"batch": batch, "tokens": tokens}
    )
    assert call("k", DEFAULT) == expected
    assert call("another kernel", DEFAULT) == DEFAULT
    monkeypatch.setattr(tuning, "gpu_kind", lambda: None)
    assert call("k", DEFAULT) == DEFAULT


def test_sizes_that_do_not_match_are_an_error():
    with pytest.raises(ValueError, match=r"must have the sizes \['length'\]"):
        tuning.nearest(TABLE, "k", "a GPU", {"bits": (4, 2), "dim": 128}, {"length": 3})


def test_the_committed_table_is_of_these_kernels():
    shapes = {}
    for found in tuning.entries():
        default = dict.fromkeys(LAUNCHES[found["kernel"]]._fields, 1)
        assert found["launch"].keys() <= default.keys()
        LAUNCHES[found["kernel"]](**{**default, **found["launch"]})
        key = json.dumps([found[name] for name in ("kernel", "device", "traits", "sizes")])
        assert shapes.setdefault(key, found) is found, f"twice: {key}"
        assert found["us"] <= found["default_us"]
        assert {"jax", "date"} <= found.keys()


# How it is made ----------------------------------------------------------------------------------


def fake_problem(results=None, log=None, name="k/shape"):
    """A kernel that adds; `results` says what else comes out for some candidates."""
    candidates = (DEFAULT, Launch(3, 4), Launch(3, 8), Launch(4, 8))

    def build():
        if log is not None:
            log.append(name)
        x = jnp.arange(8.0)

        def function_of(launch):
            extra = (results or {}).get(launch, 0.0)
            if isinstance(extra, Exception):
                raise extra
            return lambda x: (x + launch.stages * 0.0 + extra,)

        return (x,), function_of

    place = {"traits": {"bits": (4,)}, "sizes": {"batch": 2}}
    return tune.Problem(name, "k", **place, candidates=candidates, build=build)


def clock(times):
    """Times in the order of the calls."""
    left = iter(times)

    def measure(compiled, arguments):
        compiled(*arguments)
        return timing.Timing(next(left), 0.0, 0.0, "fake", 1)

    return measure


def rows_of(problem, times, done=None, **options):
    rows = dict(done or {})
    tune.run(
        [problem],
        dict(rows),
        lambda row: rows.update({row["name"]: row}),
        measure=clock(times),
        **options,
    )
    return rows


def test_the_fastest_correct_candidate_wins():
    """One is wrong, one cannot be built, one says NaN: they are recorded, and not chosen."""
    problem = fake_problem({Launch(3, 4): 1.0, Launch(3, 8): RuntimeError("no shared memory\nat")})
    rows = rows_of(problem, [10.0, 7.0])
    by_launch = {(row["launch"]["stages"], row["launch"]["warps"]): row for row in rows.values()}
    assert by_launch[2, 4]["us"] == 10.0
    assert by_launch[4, 8]["us"] == 7.0
    assert "from the default's output" in by_launch[3, 4]["reason"]
    assert by_launch[3, 8]["reason"] == "RuntimeError: no shared memory"
    (won,) = tune.winners([problem], rows.values(), "a GPU", {"jax": "1", "date": "today"})
    assert won["launch"] == {"stages": 4, "warps": 8}
    assert (won["us"], won["default_us"], won["date"]) == (7.0, 10.0, "today")
    assert tuning.nearest((won,), "k", "a GPU", {"bits": (4,)}, {"batch": 3}) is won


def test_nan_is_wrong():
    rows = rows_of(fake_problem({Launch(3, 4): float("nan")}), [10.0, 7.0, 8.0])
    assert [row["us"] for row in rows.values()] == [10.0, None, 7.0, 8.0]


def test_the_default_stays_unless_it_is_worth_it():
    problem = fake_problem()
    rows = rows_of(problem, [10.0, 9.95, 11.0, 12.0])
    (won,) = tune.winners([problem], rows.values(), "a GPU", {})
    assert won["launch"] == DEFAULT._asdict()


def test_a_default_that_fails_ends_its_problem():
    problem = fake_problem({DEFAULT: RuntimeError("broken")})
    rows = rows_of(problem, [])
    assert [row["reason"] for row in rows.values()] == ["RuntimeError: broken"]
    assert tune.winners([problem], rows.values(), "a GPU", {}) == []


def test_resuming_measures_only_what_is_left():
    log = []
    problem = fake_problem(log=log)
    rows = rows_of(problem, [10.0, 9.0, 8.0, 7.0])
    names = list(rows)
    partly = {name: rows[name] for name in names[:2]}
    resumed = rows_of(problem, [5.0, 6.0], partly)
    assert [resumed[name]["us"] for name in names] == [10.0, 9.0, 5.0, 6.0]
    assert log == ["k/shape"] * 2
    assert rows_of(problem, [], resumed) == resumed
    assert log == ["k/shape"] * 2  # nothing left: not even the inputs are made


def test_what_the_time_did_not_allow_is_not_decided():
    problem = fake_problem()
    rows = rows_of(problem, [], deadline=-1.0)
    assert {row["reason"] for row in rows.values()} == {tables.OUT_OF_TIME}
    assert tune.winners([problem], rows.values(), "a GPU", {}) == []


def test_the_table_is_renewed_shape_by_shape(tmp_path):
    old = [entry({"stages": 1}, batch=1), entry({"stages": 2}, batch=2)]
    new = [entry({"stages": 7}, batch=2), entry({"stages": 8}, device="another", batch=2)]
    table = tune.merged(old, new)
    assert sorted(found["launch"]["stages"] for found in table) == [1, 7, 8]
    path = tmp_path / "table.json"
    tune.write_table(path, table)
    assert json.loads(path.read_text())["entries"] == table
    assert len(path.read_text().splitlines()) == 3 + 4


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="about a machine without a GPU")
def test_without_a_gpu_there_is_nothing_to_tune():
    with pytest.raises(SystemExit, match="tune needs a GPU, not cpu"):
        command.main(["tune"])


def test_the_command_writes_results_and_table(monkeypatch, tmp_path):
    machine = {"device": "a GPU", "python": "3", "jax": "1", "turbojax": "0", "date": "today"}
    table, out = tmp_path / "tuning.json", tmp_path / "out.json"
    tune.write_table(table, [])
    monkeypatch.setattr(command, "_machine", lambda: machine)
    monkeypatch.setattr(timing, "on_gpu", lambda: True)
    monkeypatch.setattr(suite, "problems", lambda: iter([fake_problem(), fake_problem(name="no")]))
    times = clock([10.0, 9.0, 8.0, 7.0])
    monkeypatch.setattr(tune, "run", functools.partial(tune.run, measure=times))
    arguments = ["tune", "--out", str(out), "--table", str(table), "--filter", "shape"]
    command.main(arguments)
    assert [row["us"] for row in json.loads(out.read_text())["rows"]] == [10.0, 9.0, 8.0, 7.0]
    (won,) = json.loads(table.read_text())["entries"]
    assert won["launch"] == {"stages": 4, "warps": 8}
    command.main([*arguments, "--resume"])  # and measures nothing
    assert json.loads(table.read_text())["entries"] == [won]


def test_problems_are_those_of_the_adapters():
    """Named once; candidates begin with the default; the table finds each problem again."""
    problems = list(suite.problems())
    names = [tune.key_of(problem, c) for problem in problems for c in problem.candidates]
    assert len(set(names)) == len(names)
    for problem in problems:
        assert isinstance(problem.candidates[0], LAUNCHES[problem.kernel])
        found = entry(problem.candidates[0]._asdict(), **problem.sizes)
        found |= {"kernel": problem.kernel, "traits": json.loads(json.dumps(dict(problem.traits)))}
        near = tuning.nearest((found,), problem.kernel, "a GPU", problem.traits, problem.sizes)
        assert near is found
