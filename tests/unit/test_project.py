"""What the project says of itself agrees: versions, addresses, dependencies, links, workflows."""

import ast
import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import yaml

import ermoe

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())
WORKFLOWS = sorted(ROOT.glob(".github/workflows/*.yml"))

spec = importlib.util.spec_from_file_location("check_release", ROOT / "tools/check_release.py")
check_release = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check_release)


def canonical(distribution):
    return re.sub(r"[-_.]+", "-", distribution).lower()


def declared():
    """Every distribution that the package or one of its extras names."""
    extras = PROJECT["optional-dependencies"]
    stated = PROJECT["dependencies"] + [requirement for requirements in extras.values() for requirement in requirements]
    return {canonical(re.match(r"[\w.-]+", requirement)[0]) for requirement in stated}


def imported():
    """The packages that the source imports, anywhere in it, beside itself and the standard library."""
    found = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.split(".")[0])
    return found - set(sys.stdlib_module_names) - {"ermoe"}


def test_the_layer_needs_torch_alone():
    code = """
import sys
import torch
before = {name.split(".")[0] for name in sys.modules}
import pkgutil
import ermoe.nn
for module in pkgutil.walk_packages(ermoe.nn.__path__, "ermoe.nn."):
    __import__(module.name)
print(*sorted({name.split(".")[0] for name in sys.modules} - before - set(sys.stdlib_module_names)))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    of_torch = {"_remote_module_non_scriptable", "mpmath", "sympy"}  # parts of it load them later than torch itself
    assert set(run.stdout.split()) - of_torch == {"ermoe"}, run.stderr


def test_what_the_source_imports_is_declared():
    distributions = packages_distributions()
    undeclared = {
        name for name in imported() if not {canonical(one) for one in distributions.get(name, [name])} & declared()
    }
    # anyio belongs to starlette's interface; wandb brings dozens of packages, and who tells it figures has it.
    assert undeclared <= {"anyio", "wandb"}


def test_extras_that_are_named_exist():
    texts = [path.read_text() for path in [*PAGES, *(ROOT / "src").rglob("*.py")]]
    named = {
        extra.strip()
        for text in texts
        for some in re.findall(r"ermoe\[([\w, -]+)\]", text)
        for extra in some.split(",")
    }
    assert named
    assert named <= set(PROJECT["optional-dependencies"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


def test_links_of_the_readme_work_on_a_package_index():
    hook = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["metadata"]["hooks"][
        "fancy-pypi-readme"
    ]
    text = (ROOT / "README.md").read_text()
    for change in hook["substitutions"]:
        text = re.sub(change["pattern"], change["replacement"], text)
    links = re.findall(r"\]\(([^)\s]+)", text)
    assert [link for link in links if not link.startswith("https://")] == []
    site = PROJECT["urls"]["Documentation"]
    pages = [link.removeprefix(site).partition("#")[0] for link in links if link.startswith(site)]
    assert len(pages) > 10
    assert [
        page
        for page in pages
        if not (ROOT / f"docs{page.replace('_images', 'images')}".replace(".html", ".md")).exists()
    ] == []


def test_versions_and_addresses_agree():
    assert CITATION["version"] == check_release.version(ROOT) == ermoe.__version__
    assert CITATION["url"] == PROJECT["urls"]["Homepage"]
    assert CITATION["repository-code"] == PROJECT["urls"]["Source"]
    assert CITATION["license"] == PROJECT["license"]
    assert all(url.startswith(PROJECT["urls"]["Homepage"]) for url in PROJECT["urls"].values())


@pytest.fixture
def ready(tmp_path):
    """A project whose version 1.2.3 may be released."""
    (tmp_path / "src/ermoe").mkdir(parents=True)
    (tmp_path / "src/ermoe/_version.py").write_text('__version__ = "1.2.3"\n')
    (tmp_path / "pyproject.toml").write_text('[project.urls]\nHomepage = "https://project.test"\n')
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## [1.2.3] - 2027-01-31\n")
    (tmp_path / "CITATION.cff").write_text("title: t\nversion: 1.2.3\ndate-released: 2027-01-31\n")
    return tmp_path


def test_a_release_that_is_ready_passes(ready):
    assert check_release.obstacles("v1.2.3", ready) == []


@pytest.mark.parametrize(
    ("name", "old", "new", "obstacle"),
    [
        ("src/ermoe/_version.py", "1.2.3", "1.2.4", "they must agree"),
        ("src/ermoe/_version.py", "1.2.3", "1.2.3.dev0", "is no release"),
        ("CHANGELOG.md", "[1.2.3] - 2027-01-31", "[Unreleased]", "CHANGELOG.md has no line"),
        ("CITATION.cff", "version: 1.2.3", "version: 1.2.2", "no line 'version: 1.2.3'"),
        ("CITATION.cff", "date-released", "date", "date-released"),
        ("CITATION.cff", "title: t", "url: https://ermoe.example", "CITATION.cff still holds a placeholder"),
        ("pyproject.toml", ".test", ".example", "pyproject.toml: [project.urls] still holds a placeholder"),
    ],
)
def test_a_release_that_is_not_ready_is_told_why(ready, name, old, new, obstacle):
    text = (ready / name).read_text()
    (ready / name).write_text(text.replace(old, new))
    assert any(obstacle in sentence for sentence in check_release.obstacles("v1.2.3", ready))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_what_there_is(path):
    text = path.read_text()
    steps = [step for job in yaml.safe_load(text)["jobs"].values() for step in job["steps"]]
    assert "secrets." not in text
    assert all(re.fullmatch(r"[\w./-]+@(v\d+|release/v\d+)", step["uses"]) for step in steps if "uses" in step)
    commands = "\n".join(step["run"] for step in steps if "run" in step)
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"make ([\w-]+)", commands)) <= set(targets)
    assert all((ROOT / file).exists() for file in re.findall(r"[\w/-]+\.py\b", commands))


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck")
def test_scripts_for_clusters_are_clean():
    scripts = sorted((ROOT / "examples" / "cluster").iterdir())
    assert [script.name for script in scripts] == ["slurm.sbatch", "torchrun_hosts.sh"]
    checked = subprocess.run(["shellcheck", "-s", "bash", *scripts], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout
