"""House rules: import order, torch-free parts, file lengths, configurations, documentation that points at what exists."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from qerl.config.docs import config_markdown
from qerl.config.fields import all_keys, section_names
from qerl.config.load import load_config
from qerl.metrics.catalogue import to_markdown

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "qerl"
LONGEST_FILE = 400

ORDER = (
    ("errors", "signals", "units"),
    ("config",),
    ("formats",),
    ("kernels",),
    ("model",),
    ("records", "memory"),
    ("metrics", "env_info"),
    ("data",),
    ("quantize",),
    ("rollout",),
    ("reward",),
    ("objective",),
    ("eval",),
    ("report",),
    ("train",),
    ("experiments",),
    ("integrations",),
    ("verbs",),
    ("cli",),
    ("__main__",),
)
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}
REPORT_MAY_IMPORT = {"errors", "signals", "units", "config", "metrics", "report"}
TORCH_FREE = (
    "qerl",
    "qerl.cli",
    "qerl.env_info",
    "qerl.config.load",
    "qerl.config.docs",
    "qerl.metrics.catalogue",
    "qerl.metrics.run_dir",
    "qerl.model.spec",
    "qerl.report.html",
)

MODULES = sorted(PACKAGE.rglob("*.py"))
PAGES = sorted(path for where in (ROOT, ROOT / "docs", ROOT / "configs") for path in where.glob("*.md"))
PAGES += sorted(PACKAGE.rglob("*.md"))
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
MAP_HEADING = "## Where is …?"


def part_of(module: Path) -> str:
    return module.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_parts(module: Path) -> Iterator[tuple[str, int]]:
    """Top-level parts of qerl that a module imports anywhere in it, with the line."""
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: imports are absolute"
            names = [f"qerl.{alias.name}" for alias in node.names] if node.module == "qerl" else [node.module or ""]
        else:
            continue
        for name in names:
            if name.startswith("qerl."):
                yield name.split(".")[1], node.lineno


def test_every_part_has_a_place_in_the_order():
    assert {part_of(module) for module in MODULES} - {"__init__"} <= RANK.keys()


def test_modules_import_only_what_stands_before_them():
    wrong = []
    for module in MODULES:
        part = part_of(module)
        if part == "__init__":
            continue
        for imported, line in imported_parts(module):
            same_or_before = imported == part or RANK[imported] < RANK[part]
            # Within the pair of records and memory, memory may read records.
            if not same_or_before and (part, imported) != ("memory", "records"):
                wrong.append(f"{module.relative_to(ROOT)}:{line}: {part} imports {imported}")
    assert not wrong, "\n".join(wrong)


def test_the_report_reads_run_folders_only():
    for module in (PACKAGE / "report").rglob("*.py"):
        assert {imported for imported, _ in imported_parts(module)} <= REPORT_MAY_IMPORT, module


def test_light_modules_load_no_torch():
    """Importing them must not pull torch in, neither directly nor through another module."""
    program = "import importlib, sys\n" + "".join(
        f"importlib.import_module({name!r}); assert 'torch' not in sys.modules, {name!r}\n" for name in TORCH_FREE
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("folder", ["qerl", "tests", "scripts", "benchmarks"])
def test_files_are_short_enough_to_read(folder):
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in (ROOT / folder).rglob("*.py")}
    long = {str(path.relative_to(ROOT)): length for path, length in lengths.items() if length > LONGEST_FILE}
    assert not long


RECIPES = sorted(path for path in (ROOT / "configs").rglob("*.yaml") if path.parent.name != "matrix")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_parses_and_holds_no_outside_path(path):
    config = load_config(path)
    for value in (config.model.path, config.data.train, config.data.eval, config.run.dir):
        assert value is None or not value.startswith(("/", "~", "..")), f"{value} points outside the repository"
    assert config.run.name == path.stem, "the run is named as its recipe"


def test_generated_pages_are_current():
    for name, text in {"config.md": config_markdown(), "metrics.md": to_markdown()}.items():
        assert (ROOT / "docs" / name).read_text(encoding="utf-8") == text, f"docs/{name} is stale: run `make docs`"


def headings(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+\s+(.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{page.name} links to {link}"
        if anchor:
            assert anchor in headings(target), f"{page.name} links to {link}, which has no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_name_only_keys_that_exist(page):
    sections, known = section_names(), all_keys()
    for code in CODE.findall(page.read_text(encoding="utf-8")):
        match = re.fullmatch(r"([a-z]+(?:\.[a-z_]+)+)(?:=.*)?", code)
        if match and match[1].split(".")[0] in sections and not match[1].endswith((".py", ".md", ".jsonl")):
            name = match[1]
            is_key = name in known or name in sections
            is_module = (PACKAGE / name.replace(".", "/")).with_suffix(".py").exists()
            assert is_key or is_module or hasattr_module(name), f"{page.name} names {name}"


def hasattr_module(name: str) -> bool:
    """Whether ``a.b.c`` is the name c defined in the module qerl/a/b.py."""
    module, _, attribute = name.rpartition(".")
    path = (PACKAGE / module.replace(".", "/")).with_suffix(".py")
    if not path.exists():
        return False
    return (
        re.search(rf"^(?:def|class) {attribute}\b|^{attribute}\b\s*[:=]", path.read_text("utf-8"), re.MULTILINE)
        is not None
    )


def test_the_map_of_the_readme_points_at_what_exists():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert MAP_HEADING in text
    table = text.partition(MAP_HEADING)[2].partition("\n## ")[0]
    paths = [code for line in table.splitlines() if line.startswith("|") for code in CODE.findall(line) if "/" in code]
    assert len(paths) > 15
    for path in paths:
        assert (ROOT / path.partition("::")[0]).exists(), f"the map names {path}"


def test_the_readme_opens_with_the_two_commands_and_ci_runs_the_second():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    first_block = readme.partition("```")[2].partition("```")[0]
    assert [line.split("#")[0].strip() for line in first_block.splitlines()[1:]] == ["make demo", "make test"]
    ci = ROOT / ".ci" / "run"
    assert os.access(ci, os.X_OK)
    assert "make test" in ci.read_text(encoding="utf-8")


def test_no_file_holds_a_path_of_someones_machine():
    pattern = re.compile(r"/(?:home|Users|root|work|tmp)/\w|\.\./[s]hared")
    folders = ("qerl", "tests", "scripts", "benchmarks", "configs", "docs", ".ci")
    files = [
        *(path for path in ROOT.glob("*.*") if path.name != ".git"),
        ROOT / "Makefile",
        *(path for folder in folders for path in (ROOT / folder).rglob("*")),
    ]
    for path in files:
        if path.is_file() and path.suffix in {"", ".py", ".md", ".yaml", ".toml", ".txt", ".json", ".jinja"}:
            found = pattern.search(path.read_text(encoding="utf-8"))
            assert found is None, f"{path.relative_to(ROOT)} holds {found[0]}"
