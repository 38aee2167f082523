"""The command line teaches quickly, and turns mistakes into one sentence."""

import subprocess
import sys

import pytest

import ermoe
from ermoe.cli import main as cli
from ermoe.errors import UserError

LISTED = "import sys; sys.argv = ['ermoe', *{argv!r}]\n" + (
    "from ermoe.cli.main import main\n"
    "try:\n"
    "    code = main()\n"
    "except SystemExit as stop:\n"
    "    code = stop.code\n"
    "heavy = {{'torch', 'numpy', 'matplotlib', 'timm'}} & set(sys.modules)\n"
    "sys.exit(f'loaded {{heavy}}' if heavy else code)\n"
)


@pytest.mark.parametrize("argv", [[], ["--help"], ["--version"], *([name, "--help"] for name in cli.COMMANDS)])
def test_help_loads_nothing_heavy(argv):
    run = subprocess.run([sys.executable, "-c", LISTED.format(argv=argv)], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip()


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["help"]])
def test_usage_names_every_command_and_what_it_does(argv, capsys):
    assert cli.main(argv) == 0
    shown = capsys.readouterr().out
    for name, (_, purpose) in cli.COMMANDS.items():
        assert f"  {name}" in shown
        assert purpose in shown


@pytest.mark.parametrize("argv", [["--version"], ["-V"], ["version"]])
def test_version(argv, capsys):
    assert cli.main(argv) == 0
    assert capsys.readouterr().out == f"ermoe {ermoe.__version__}\n"


def test_python_dash_m():
    run = subprocess.run([sys.executable, "-m", "ermoe", "nonsense"], capture_output=True, text=True, timeout=60)
    assert run.returncode == 2
    assert run.stderr.startswith("ermoe: there is no command 'nonsense'")


@pytest.mark.parametrize(("typed", "advice"), [("dmeo", "did you mean demo?"), ("xyz", "there are demo")])
def test_an_unknown_command_gets_advice(typed, advice, capsys):
    assert cli.main([typed]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"ermoe: there is no command '{typed}': ")
    assert advice in shown.err
    assert len(shown.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("problem", "code", "message"),
    [
        (UserError("data: no such folder; give another"), 2, "ermoe: data: no such folder; give another\n"),
        (KeyboardInterrupt(), 130, "\nermoe: interrupted\n"),
    ],
)
def test_mistakes_and_interruptions_end_without_a_traceback(problem, code, message, monkeypatch, capsys):
    def fail(demo, console):
        raise problem

    monkeypatch.setattr("ermoe.studies.demo.Demo.__call__", fail)
    assert cli.main(["demo"]) == code
    assert capsys.readouterr().err == message


def test_output_that_nobody_reads_to_its_end_is_no_error():
    code = "import sys; from ermoe.cli.main import main; sys.exit(main(['brain', 'predict', '--help']))"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as command:
        command.stdout.close()
        assert command.stderr.read() == b""
    assert command.returncode == cli.UNREAD


def test_bugs_keep_their_traceback(monkeypatch):
    def fail(demo, console):
        raise ValueError("not the user's fault")

    monkeypatch.setattr("ermoe.studies.demo.Demo.__call__", fail)
    with pytest.raises(ValueError, match="not the user's fault"):
        cli.main(["demo"])


@pytest.mark.parametrize("argv", [["--epochs", "0"], ["--epochs", "many"], ["--colour", "red"]])
def test_bad_options_exit_with_2(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["demo", *argv])
    assert stop.value.code == 2
    assert argv[0] in capsys.readouterr().err
