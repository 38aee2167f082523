"""What people install: wheel and source archive, without the repository, from the lowest versions to the newest.

Needs uv and a package index; every environment holds torch, about 6 GB, and is removed again.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import ermoe

ROOT = Path(__file__).parents[2]
UV = shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
EXTRAS = ("brain", "clip", "dev", "explore", "export", "register")
UNIT = ("analysis", "brain", "data", "explorer", "images", "models", "nn", "retrieval", "train")
UNIT = tuple(f"tests/unit/{folder}" for folder in UNIT)
LEFT_OUT = (".ci/", ".github/")  # what only the repository needs
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}

pytestmark = [pytest.mark.timeout(1800), pytest.mark.skipif(UV is None, reason="needs uv")]


def ran(*command, cwd, **environment):
    ended = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=CLEAN | environment, capture_output=True, text=True, timeout=3000
    )
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-4000:]
    return ended.stdout


def build(source, folder):
    """The wheel and the source archive of ``source``, as ``make dist`` builds them."""
    constraints = source / "constraints.txt"
    ran(UV, "build", "--out-dir", folder, "-b", constraints, cwd=source, SOURCE_DATE_EPOCH="1700000000")
    return next(folder.glob("*.whl")), next(folder.glob("*.tar.gz"))


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return build(ROOT, tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def unpacked(built, tmp_path_factory):
    """The source archive, somewhere else."""
    folder = tmp_path_factory.mktemp("source")
    with tarfile.open(built[1]) as archive:
        archive.extractall(folder, filter="data")
    return folder / f"ermoe-{ermoe.__version__}"


def test_a_second_build_elsewhere_has_the_same_bytes(built, unpacked, tmp_path):
    again = build(unpacked, tmp_path)
    assert [path.name for path in again] == [path.name for path in built]
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in built]


def test_the_source_archive_has_all_that_the_documents_name(unpacked):
    if (ROOT / ".git").exists():
        tracked = ran("git", "ls-files", cwd=ROOT).splitlines()
        assert [name for name in tracked if not name.startswith(LEFT_OUT) and not (unpacked / name).exists()] == []
        known = {*tracked, "PKG-INFO"}
        assert {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()} <= known
    for page in [*unpacked.glob("*.md"), *unpacked.glob("docs/**/*.md")]:
        links = re.findall(r"\]\(([^)#\s]+)", page.read_text())
        assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == [], page


def test_the_wheel_has_the_whole_package_and_its_metadata(built, unpacked):
    source = unpacked / "src"
    with zipfile.ZipFile(built[0]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        metadata = wheel.read(f"ermoe-{ermoe.__version__}.dist-info/METADATA").decode()
    assert names == {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()}
    assert "ermoe/py.typed" in names
    assert f"\nVersion: {ermoe.__version__}\n" in metadata
    assert "\nLicense-Expression: Apache-2.0\n" in metadata


def installed(python, wheel, folder, *more):
    """The program ``ermoe`` of an environment that has nothing else."""
    ran(UV, "venv", "--python", python, folder / "environment", cwd=folder)
    ran(UV, "pip", "install", "--python", folder / "environment", wheel, *more, cwd=folder)
    return folder / "environment" / "bin" / "ermoe"


def assert_demo_runs(program, folder):
    assert ran(program, "--version", cwd=folder) == f"ermoe {ermoe.__version__}\n"
    place = ran(program.parent / "python", "-c", "import ermoe.nn; print(ermoe.__file__)", cwd=folder)
    assert Path(place.strip()).is_relative_to(folder)
    ran(program, "demo", "--epochs", "1", cwd=folder, OMP_NUM_THREADS="1")
    assert (folder / "runs" / "demo" / "report.html").stat().st_size > 100_000


@pytest.fixture
def empty(tmp_path):
    """A folder for an environment, which does not stay."""
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_the_wheel_runs_the_demo_in_an_empty_environment(version, built, empty):
    find = [UV, "python", "find", "--no-python-downloads", "--no-project", version]
    found = subprocess.run(find, cwd=empty, env=CLEAN, capture_output=True, text=True, timeout=60)
    if found.returncode != 0:
        pytest.skip(f"needs a Python {version} on the PATH")
    assert_demo_runs(installed(found.stdout.strip(), built[0], empty), empty)


@pytest.mark.timeout(3600)
def test_the_lowest_versions_run_the_demo_and_the_unit_tests(built, unpacked, empty):
    """Of everything that pyproject.toml names, extras and the tools of the tests included."""
    extras = [part for name in EXTRAS for part in ("--extra", name)]
    lowest = [UV, "pip", "compile", ROOT / "pyproject.toml", *extras, "--resolution", "lowest-direct"]
    ran(*lowest, "--python-version", "3.11", "--output-file", empty / "lowest.txt", cwd=empty)
    program = installed("3.11", built[0], empty, "-r", empty / "lowest.txt")
    assert_demo_runs(program, empty)
    tests = ["-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider", *UNIT]
    ran(program.parent / "python", *tests, cwd=unpacked, OMP_NUM_THREADS="1")


@pytest.mark.parametrize("resolution", ["lowest-direct", "highest"])
@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_every_extra_has_versions_for_every_python(version, resolution, tmp_path):
    resolve = [UV, "pip", "compile", ROOT / "pyproject.toml", "--all-extras", "--python-version", version]
    platform = ["--python-platform", "x86_64-manylinux_2_28", "--resolution", resolution]
    assert "torch==" in ran(*resolve, *platform, cwd=tmp_path)
