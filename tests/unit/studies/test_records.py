"""Files of records and the queue over them: nothing is lost, nothing is repeated, nothing is mixed."""

import json

import pytest
from rich.console import Console

from ermoe.errors import UserError
from ermoe.studies.record import Job, add_records, new_record, read_records, run_queue


@pytest.fixture
def path(tmp_path):
    return tmp_path / "deep" / "study.jsonl"


def record(name="a", seed=1, figures=None, **environment):
    return new_record("x", name, seed=seed, settings={"epochs": 2}, figures=figures or {"y": 1.0}, **environment)


def test_an_environment_is_written_once(path):
    add_records(path, record(seed=1))
    add_records(path, record(seed=2), record(seed=3, ran_on="another thing"))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert ["name" in line for line in lines] == [False, True, True, False, True]
    assert "commit" not in lines[1]
    records = read_records(path)
    assert [own["seed"] for own in records] == [1, 2, 3]
    assert records[0]["environment"] == records[1]["environment"]
    assert records[2]["environment"] == {**records[0]["environment"], "ran_on": "another thing"}


def test_a_torn_last_line_is_forgotten(path):
    add_records(path, record(seed=1), record(seed=2))
    path.write_bytes(path.read_bytes()[:-30])
    assert [own["seed"] for own in read_records(path)] == [1]
    add_records(path, record(seed=3))
    assert [own["seed"] for own in read_records(path)] == [1, 3]


def test_a_damaged_line_gets_a_sentence(path):
    add_records(path, record(seed=1), record(seed=2))
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1][:-5], lines[2]]) + "\n")
    with pytest.raises(UserError, match=r"study.jsonl is damaged in line 2: remove that line"):
        read_records(path)
    path.write_text(lines[1] + "\n")
    with pytest.raises(UserError, match=r"study.jsonl, line 1, is no run whose environment the file has: remove it"):
        read_records(path)


def test_a_queue_runs_what_has_no_line_and_says_what(path, capsys):
    calls = []

    def jobs(names):
        return [Job(name, 1, lambda name=name: calls.append(name) or {"y": len(calls)}) for name in names]

    run_queue("x", jobs("ab"), path, console=Console(quiet=True))
    records = run_queue("x", jobs("bca"), path, console=Console())
    assert calls == ["a", "b", "c"]
    assert [(own["name"], own["figures"]["y"]) for own in records] == [("b", 2), ("c", 3), ("a", 1)]
    assert capsys.readouterr().out == "run 2 of 3: c, seed 1\n"


def test_a_queue_refuses_other_settings_before_it_runs_anything(path):
    def job(name, **settings):
        return Job(name, 1, lambda: {"y": 1.0}, settings)

    run_queue("x", [job("a", epochs=2, sizes=(1, 2))], path, console=Console(quiet=True))
    assert len(run_queue("x", [job("a", sizes=(1, 2))], path)) == 1
    with pytest.raises(UserError, match=r"holds a, seed 1, with other settings \(epochs: 2 there, 3 asked for\)"):
        run_queue("x", [job("b"), job("a", epochs=3)], path)
    assert len(read_records(path)) == 1


def test_a_run_that_went_on_has_no_time_of_its_own(path):
    (own,) = run_queue("x", [Job("a", 1, lambda: {"y": 1.0, "seconds": None})], path, console=Console(quiet=True))
    assert own["seconds"] is None
    assert own["figures"] == {"y": 1.0}
