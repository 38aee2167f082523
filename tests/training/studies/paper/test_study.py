"""The frame of all studies: a queue that resumes, records that say where they come from, honest sentences."""

import json
import math
import subprocess
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from ermoe.cli import main as cli
from ermoe.errors import UserError
from ermoe.studies.figures import verdict
from ermoe.studies.paper import catalogue
from ermoe.studies.paper.setup import Setup, slug
from ermoe.studies.paper.study import Findings, Study, run, run_study
from ermoe.studies.record import RECORDS, Job, read_records


@pytest.fixture
def setup(tmp_path):
    return Setup(out=tmp_path / "out", work=tmp_path / "work", seeds=(1, 2), console=Console(quiet=True))


def study(work):
    def jobs(setup):
        return [Job("a", seed, lambda seed=seed: work(seed)) for seed in setup.seeds]

    def findings(runs):
        return Findings(["row", "paper", "ours"], [["a", "1", runs.cell("a", "x", style=".1f")]], ["It is so."])

    return Study("thing", "a thing", "somewhere else", lambda setup: "here", jobs, findings)


def test_a_run_is_recorded_and_not_repeated(setup):
    calls = []

    def work(seed):
        calls.append(seed)
        return {"x": float(seed), "nothing": math.nan}

    run(study(work), setup)
    run(study(work), setup)
    assert calls == [1, 2]
    place = setup.out / "thing" / "mini-bundled"
    record = read_records(place / RECORDS)[0]
    assert record["figures"] == {"x": 1.0, "nothing": None}
    assert (record["study"], record["name"], record["seed"]) == ("thing", "a", 1)
    assert record["settings"] == {"scale": "mini", "data": None}
    assert {"ran_on", "command", "commit", "machine", "versions"} <= record["environment"].keys()
    text = (place / "result.md").read_text(encoding="utf-8")
    assert "| a | 1 | 1.5 ± 0.7 |" in text
    assert "Here (mini): here" in text
    assert "- It is so." in text


def test_an_interrupted_queue_goes_on_where_it_was(setup):
    calls = []

    def stops_at_two(seed):
        calls.append(seed)
        if seed == 2 and len(calls) == 2:
            raise KeyboardInterrupt
        return {"x": 1.0}

    with pytest.raises(KeyboardInterrupt):
        run_study(study(stops_at_two), setup)
    assert len(run_study(study(stops_at_two), setup)) == 2
    assert calls == [1, 2, 2]


def test_some_rows_alone_are_run_and_the_table_waits_for_the_others(setup, capsys):
    def of(recipe):
        def jobs(setup):
            return [Job(name, 1, lambda: {"x": 1.0}, {"recipe": recipe}) for name in "abc"]

        return replace(study(lambda seed: {}), jobs=jobs)

    setup = replace(setup, console=Console(width=1000))
    assert run(of(1), replace(setup, only=("b",))) is None
    assert "the table waits for a, c" in capsys.readouterr().out
    assert [record["name"] for record in run_study(of(1), replace(setup, only=("a",)))] == ["a", "b"]
    with pytest.raises(UserError, match="there is no row 'd': there are a, b, c"):
        run_study(of(1), replace(setup, only=("d",)))
    with pytest.raises(UserError, match="recipe"):  # what others have on record is another study
        run_study(of(2), replace(setup, only=("c",)))
    assert run(of(1), replace(setup, only=("c",))) is not None


def test_what_an_earlier_version_left_counts_as_done(setup):
    place = setup.out / "thing" / "mini-bundled"
    place.mkdir(parents=True)
    old = {"study": "thing", "name": "a", "scale": "mini", "data": None, "ran_on": "here", "seconds": 3.0, "threads": 1}
    old |= {"command": "ermoe", "commit": "0e424b7", "machine": {"cores": 2}, "versions": {"torch": "2"}}
    for seed in (1, 2):
        (place / f"a-{seed}.json").write_text(json.dumps({**old, "seed": seed, "figures": {"x": float(seed)}}))
    records = run_study(study(lambda seed: pytest.fail("is there")), setup)
    assert [record["figures"]["x"] for record in records] == [1.0, 2.0]
    assert records[0]["settings"] == {"scale": "mini", "data": None}
    assert records[0]["environment"]["commit"] == "0e424b7"
    assert len((place / RECORDS).read_text().splitlines()) == 3, "the environment once"


def test_a_damaged_record_of_an_earlier_version_gets_a_sentence(setup):
    path = setup.out / "thing" / "mini-bundled" / "a-1.json"
    path.parent.mkdir(parents=True)
    path.write_text("{")
    with pytest.raises(UserError, match=r"a-1.json is damaged: remove it"):
        run_study(study(lambda seed: {}), setup)


def test_data_and_scale_have_folders_of_their_own(setup):
    other = Setup(data="some/where/cifar-10-batches-bin/", scale="full", out=setup.out)
    assert other.place("x") == setup.out / "x" / "full-cifar-10-batches-bin"
    assert setup.place("x") == setup.out / "x" / "mini-bundled"
    after = Setup(data="b", pretrain="some/a", weights="w.pth", epochs=3, out=setup.out)
    assert after.place("x") == setup.out / "x" / "mini-b-after-a-from-w.pth-3-epochs"


def test_a_record_of_other_data_of_the_same_name_is_refused(setup, tmp_path):
    folders = [tmp_path / parent / "data" for parent in ("one", "two")]
    for folder in folders:
        folder.mkdir(parents=True)
    one, two = (replace(setup, data=str(folder)) for folder in folders)
    run_study(study(lambda seed: {"x": 1.0}), one)
    with pytest.raises(UserError, match=r"data: .*one/data there, .*two/data asked for\): choose another --out"):
        run_study(study(lambda seed: {"x": 2.0}), two)
    folders[0].rename(tmp_path / "elsewhere")  # a folder that has moved is not another one
    assert len(run_study(study(lambda seed: {"x": 2.0}), two)) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [({"scale": "huge"}, "use one of"), ({"seeds": ()}, "at least one"), ({"only": ()}, "at least one row")],
)
def test_bad_setups_get_a_sentence(options, message):
    with pytest.raises(UserError, match=message):
        Setup(**options)


def test_verdicts_know_noise():
    words = {"larger": "A", "smaller": "B", "what": "x"}
    assert "inside the noise" in verdict([0.5, 0.7, 0.6], [0.55, 0.6, 0.62], **words)
    assert "more than the noise" in verdict([0.9, 0.91, 0.9], [0.1, 0.12, 0.11], **words)
    assert "inside the noise" in verdict([0.5, 0.51], [0.55, 0.57], **words)  # two seeds know nothing of their spread
    assert verdict([0.1, 0.1], [0.3, 0.3], **words).startswith("x: B is above A by 0.2")
    assert "one seed" in verdict([0.9], [0.1], **words)
    assert verdict([0.5, 0.5], [0.5, 0.5004], **words, form=".1%") == "x: A and B are equal."
    assert "by 2.0%" in verdict([0.52], [0.5], **words, form=".1%")
    assert "nothing to compare" in verdict([], [0.1], **words)


def test_tables_in_markdown():
    assert Findings(["a", "b"], [["1", "2"]]).table.markdown() == "| a | b |\n| :-- | --: |\n| 1 | 2 |"


def test_names_of_files_are_plain():
    assert slug("normal weights") == "normal-weights"
    assert slug("V-MoE E=8") == "V-MoE-E-8"


@pytest.mark.parametrize(
    ("name", "scale"), [(n, scale) for n, entry in catalogue.ENTRIES.items() for scale in entry.scales]
)
def test_every_listed_study_is_there_under_its_name(name, scale):
    found = catalogue.find(name, scale)
    assert found.name == name
    assert found.title
    assert found.paper.endswith(".")


def test_unknown_studies_get_a_sentence():
    with pytest.raises(UserError, match="there is no study 'table-1': use one of imagenet"):
        catalogue.find("table-1")
    assert cli.main(["paper", "run", "table-1"]) == 2


def test_the_list_needs_no_torch(capsys):
    code = "import sys; from ermoe.cli.main import main; main(['paper', 'list']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for name in catalogue.ENTRIES:
        assert name in done.stdout


def test_full_scale_wants_real_data(setup, tmp_path):
    with pytest.raises(UserError, match="--data"):
        run(catalogue.find("balance"), Setup(scale="full", out=tmp_path, console=Console(quiet=True)))
