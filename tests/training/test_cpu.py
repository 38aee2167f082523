"""A CPU that traps what it announces: half precision is kept from it, or refused in one sentence."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import timm

import ermoe
from ermoe import cpu
from ermoe.cli.main import main

TRAPS = "half-precision products end Python on this CPU, which announces AMX and traps it"
REFUSED = f"{TRAPS}: set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 before Python starts, or use fp32"
LIMITED = f"{TRAPS}: ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 is set for this run, and they work"
HOPELESS = f"{TRAPS}, even with ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16: use fp32"
TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """One for all tests, so that a probe with torch runs once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def machine(cache, monkeypatch):
    """A machine of its own: nothing is set, nothing known, and the CPU announces no AMX."""
    monkeypatch.setenv("ERMOE_CACHE", str(cache))
    for name in (cpu.LIMIT, cpu.PROBE, "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cpu, "_CPU_INFO", cache / "no-cpuinfo")


@pytest.fixture
def dying(monkeypatch):
    monkeypatch.setenv(cpu.PROBE, "dies")


@pytest.fixture
def before_torch(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")


def ending(code, children):
    """Instead of the probe: ends with ``code``, and counts."""

    def run():
        children.append(os.environ.get(cpu.LIMIT))
        return code

    return run


def python(*args):
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, timeout=280, cwd=TESTS.parent)


def test_the_probe_passes_where_these_tests_run(dying, monkeypatch):
    """With the variable that the session may have needed."""
    monkeypatch.setenv(cpu.LIMIT, cpu.LIMITED)
    assert cpu.problem() is None
    assert cpu._verdict_file(cpu.described()).read_bytes() == b"works"


def test_what_dies_is_limited_and_said_once_and_remembered(dying, before_torch, monkeypatch):
    assert cpu.limit() == LIMITED
    assert os.environ[cpu.LIMIT] == cpu.LIMITED
    assert cpu.limit() is None, "so is every process that inherits the variable"
    monkeypatch.delenv(cpu.LIMIT)
    children = []
    monkeypatch.setattr(cpu, "_run_probe", ending(-4, children))
    assert cpu.limit() == LIMITED
    assert children == [], "both verdicts are known"


def test_only_a_cpu_that_announces_amx_is_probed(tmp_path, monkeypatch):
    children = []
    monkeypatch.setattr(cpu, "_run_probe", ending(-4, children))
    monkeypatch.setattr(cpu, "_CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setenv("ERMOE_CACHE", str(tmp_path))
    for flags, num_children in (("fpu avx2", 0), ("fpu amx_tile", 1), ("fpu amx_tile", 1), ("fpu amx_bf16", 2)):
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nmodel name\t: Xeon\nflags\t\t: {flags}\n\nprocessor\t: 1\n")
        assert cpu.problem() == (REFUSED if "amx" in flags else None)
        assert len(children) == num_children


def test_where_even_the_limit_does_not_help_fp32_is_left(before_torch, tmp_path, dying, monkeypatch):
    children = []
    monkeypatch.setenv("ERMOE_CACHE", str(tmp_path))
    monkeypatch.setattr(cpu, "_run_probe", ending(-4, children))
    assert cpu.limit() == HOPELESS
    assert cpu.problem() == HOPELESS
    assert children == [None, cpu.LIMITED]


def test_what_a_user_has_set_stays(dying, before_torch, monkeypatch):
    monkeypatch.setenv(cpu.LIMIT, "AVX2")
    assert cpu.limit() is None
    assert os.environ[cpu.LIMIT] == "AVX2"


def test_a_cache_that_cannot_be_written_is_done_without(dying, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("ERMOE_CACHE", str(tmp_path / "file"))
    assert cpu.problem() == REFUSED


@pytest.mark.parametrize("code", [1, -9, None])
def test_a_probe_that_fails_otherwise_says_nothing_about_the_cpu(dying, tmp_path, monkeypatch, code):
    children = []
    monkeypatch.setenv("ERMOE_CACHE", str(tmp_path))
    monkeypatch.setattr(cpu, "_run_probe", ending(code, children))
    assert [cpu.problem(), cpu.problem()] == [None, None]
    assert len(children) == 2, "it is tried again"


def test_a_command_says_it_once_and_runs(dying):
    done = python("-m", "ermoe", "paper", "list")
    assert done.returncode == 0
    assert done.stderr == f"ermoe: {LIMITED}\n"


@pytest.mark.parametrize(("rank", "said"), [("0", f"ermoe: {LIMITED}\n"), ("1", "")])
def test_of_many_processes_one_says_it(dying, before_torch, rank, said, monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.setattr("ermoe.cli.info.Info.__call__", lambda info, console: print(os.environ[cpu.LIMIT]))
    assert main(["info", "tiny-ti16"]) == 0
    assert capsys.readouterr() == (f"{cpu.LIMITED}\n", said)


def test_help_starts_no_probe(dying, tmp_path, monkeypatch):
    monkeypatch.setenv("ERMOE_CACHE", str(tmp_path / "new"))
    done = python("-m", "ermoe", "image", "train", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert not (tmp_path / "new").exists()


def test_training_is_refused_where_torch_is_there_already(dying, tmp_path, capsys):
    command = ["image", "train", "digits-ermoe", "digits", "--precision", "bf16", "--out", str(tmp_path)]
    assert main(command) == 2
    assert capsys.readouterr().err == f"ermoe: precision=bf16: {REFUSED}\n"


def test_a_model_in_half_precision_is_loaded_with_a_warning(dying, tmp_path, caplog):
    ermoe.save(ermoe.upcycle(timm.create_model("test_vit"), num_experts=2).bfloat16(), tmp_path)
    ermoe.load(tmp_path)
    assert caplog.messages == [f"{tmp_path} holds weights in torch.bfloat16: {REFUSED}"]


def test_pytest_runs_and_says_it_once_for_all_its_processes(dying):
    test = "tests/unit/nn/test_balance.py::test_offsets_stay_in_float32_and_follow_the_module"
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "1", test)
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout
    assert (done.stdout + done.stderr).count(LIMITED) == 1
