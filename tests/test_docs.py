"""The documentation against the code: what README and docs/ name exists, and what they show runs."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from fractions import Fraction
from importlib import import_module
from pathlib import Path

import click
import pytest
import torch
from oracle import installed_backend

import remat_compiler
from remat_compiler.cli import main
from remat_compiler.options import OPTIONS
from remat_passes.errors import RematError
from remat_passes.plan import BatchValue, Microbatches, RematPlan, ValuePlan

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
PAGES = [README, ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
DECISIONS = sorted((ROOT / "docs/decisions").glob("*.md"))

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
INLINE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
FOLDERS = ("passes", "remat_compiler", "benchmarks", "tests", "docs", ".ci")


def names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def blocks(page: Path, language: str) -> list[str]:
    return [text for kind, text in FENCE.findall(page.read_text(encoding="utf-8")) if kind == language]


def inline(page: Path) -> list[str]:
    return INLINE.findall(prose(page))


def between(page: Path, marker: str) -> str:
    return page.read_text(encoding="utf-8").split(f"<!-- {marker} -->")[1].split(f"<!-- /{marker} -->")[0]


def table(text: str) -> list[list[str]]:
    """The rows of the tables in ``text``, without headers and rules; cells without backticks."""
    lines = text.splitlines()
    rows = [line for at, line in enumerate(lines) if line.startswith("|") and not _is_header(lines, at)]
    return [[cell.strip().replace("`", "") for cell in row.strip("|").split("|")] for row in rows]


def _is_header(lines: list[str], at: int) -> bool:
    return any(set(line) <= set("|-: ") and line.startswith("|") for line in lines[at : at + 2])


def section(page: Path, heading: str) -> str:
    return page.read_text(encoding="utf-8").split(f"\n{heading}\n")[1].split("\n## ")[0]


# -- options, plans, errors ------------------------------------------------------------------------------------------


def test_the_option_table_is_the_code_s() -> None:
    rows = table(between(README, "options"))

    assert rows == [[o.name, o.environment, o.accepted, o.default] for o in OPTIONS]


def test_every_environment_variable_is_one() -> None:
    known = {option.environment for option in OPTIONS}
    named = {name for page in PAGES for name in re.findall(r"REMAT_[A-Z_]+", page.read_text(encoding="utf-8"))}

    assert named <= known


def test_every_field_of_a_plan_is_documented_in_its_order() -> None:
    rows = table(section(ROOT / "docs/command-line.md", "## The plan file"))
    named = [name for row in rows for name in row[0].split(", ")]
    value_fields = [field.name for field in fields(ValuePlan)]
    others = [field.name for kind in (RematPlan, Microbatches, BatchValue) for field in fields(kind)]

    assert sorted(named) == sorted(["schema", *others, *value_fields])
    assert sorted(named[-len(value_fields) :]) == sorted(value_fields)


def test_every_error_has_its_section() -> None:
    headings = re.findall(r"^## (\w+Error)$", (ROOT / "docs/errors.md").read_text(encoding="utf-8"), re.M)

    assert sorted(headings) == sorted(error.__name__ for error in RematError.__subclasses__())


def constants() -> dict[str, set[Fraction]]:
    """The numbers that modules of ``remat_passes`` name in capitals."""
    found: dict[str, set[Fraction]] = {}
    for path in (ROOT / "passes/remat_passes").glob("*.py"):
        module = import_module(f"remat_passes.{path.stem}")
        for name, value in vars(module).items():
            if name.isupper() and isinstance(value, (int, float, Fraction)):
                found.setdefault(name, set()).add(Fraction(str(value)))
    return found


def test_constants_have_the_values_that_pages_give_them() -> None:
    known = constants()
    given = [re.fullmatch(r"([A-Z_]+) = ([\d./]+)", text) for page in PAGES for text in inline(page)]
    claims = [(match[1], Fraction(match[2])) for match in given if match and not match[1].startswith("REMAT_")]

    assert claims
    assert [(name, value) for name, value in claims if known.get(name) != {value}] == []


# -- files -----------------------------------------------------------------------------------------------------------


def is_missing(name: str) -> bool:
    """Whether ``name`` looks like a path in this repository, or in torch, and is none."""
    path = name.split(":")[0]
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)*/?", path) or "/" not in path:
        return False
    top = path.split("/")[0]
    if top == "torch":
        return not (Path(torch.__file__).parent.parent / path).exists()
    return top in FOLDERS and not (ROOT / path).exists()


@pytest.mark.parametrize("page", names(PAGES))
def test_every_file_that_a_page_names_exists(page: str) -> None:
    assert [name for name in inline(ROOT / page) if is_missing(name)] == []


def test_the_check_of_files_sees_a_wrong_one() -> None:
    assert is_missing("passes/remat_passes/cuts.py")
    assert is_missing("torch/_inductor/configs.py")
    assert not is_missing("passes/remat_passes/cut.py")
    assert not is_missing("build/demo")


@pytest.mark.parametrize(
    "row", table(section(ROOT / "docs/architecture.md", "## From a graph to two modules")), ids=str
)
def test_every_stage_is_a_function_of_its_file(row: list[str]) -> None:
    _, stage, file, *_ = row
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))

    assert stage in [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def slug(heading: str) -> str:
    """The anchor that GitHub gives to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def is_broken(page: Path, link: str) -> bool:
    if link.startswith(("https://", "http://")):
        return False
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    if not target.exists():
        return True
    headings = re.findall(r"^#+ (.+)$", prose(target), re.M) if target.suffix == ".md" else []
    return bool(anchor) and anchor not in map(slug, headings)


@pytest.mark.parametrize("page", names(PAGES))
def test_every_link_leads_somewhere(page: str) -> None:
    links = LINK.findall(prose(ROOT / page))

    assert [link for link in links if is_broken(ROOT / page, link)] == []


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, waiting = set(), [README]
    while waiting:
        page = waiting.pop()
        if page not in reached:
            reached.add(page)
            links = [link.partition("#")[0] for link in LINK.findall(prose(page)) if "://" not in link]
            waiting.extend((page.parent / link).resolve() for link in links if link.endswith(".md"))

    assert [str(page) for page in PAGES if page not in reached] == []


@pytest.mark.parametrize("page", names(PAGES))
def test_no_page_names_a_folder_of_one_machine(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")

    assert re.findall(r"(?<![\w$~.}])/(?:tmp|work|home|root|Users)/\S*", text) == []


@pytest.mark.parametrize("page", names(DECISIONS))
def test_a_decision_has_its_three_parts(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")

    headings = re.findall(r"^## (\w+)$", text, re.M)
    assert [heading for heading in headings if heading in ("Context", "Decision", "Consequences")] == [
        "Context",
        "Decision",
        "Consequences",
    ]
    assert text.startswith(f"# {int(Path(page).name[:4])}. ")


def test_decisions_are_numbered_without_gaps() -> None:
    assert [int(page.name[:4]) for page in DECISIONS] == list(range(1, len(DECISIONS) + 1))


# -- commands --------------------------------------------------------------------------------------------------------


def commands() -> Iterator[tuple[str, str]]:
    """Every command in a shell block or between backticks, with its page."""
    for page in PAGES:
        lines = [line for block in blocks(page, "sh") for line in block.splitlines() if line.strip()]
        mentioned = [text for text in inline(page) if re.match(r"(remat|make) [a-z]", text)]
        yield from ((command, page.name) for command in [*lines, *mentioned])


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))


def complaint(command: str) -> str | None:
    """What is wrong with a command, or ``None``."""
    program, *words = shlex.split(command, comments=True)
    if program == "pip":
        return None
    if program == "make":
        unknown = set(words) - make_targets()
        return f"no target {unknown}" if unknown else None
    if program != "remat":
        return f"{program} is not a command of this project"
    found = main.commands.get(words[0])
    if found is None:
        return f"no command {words[0]}"
    options = {option for param in found.params if isinstance(param, click.Option) for option in param.opts}
    unknown = {word for word in words[1:] if word.startswith("--")} - options - {"--help"}
    return f"no option {unknown}" if unknown else None


def test_every_command_is_one() -> None:
    found = dict(commands())

    assert len(found) > 10
    assert {command: complaint(command) for command in found if complaint(command)} == {}


def test_the_check_of_commands_sees_a_wrong_one() -> None:
    assert complaint("make demos") is not None
    assert complaint("remat show plans") is not None
    assert complaint("remat dump plans --form json") is not None
    assert complaint("remat dump plans --format json  # for programs") is None


def test_every_option_of_remat_run_is_documented() -> None:
    rows = table(section(ROOT / "docs/command-line.md", "## Run a script"))
    params = [param for param in main.commands["run"].params if isinstance(param, click.Option)]

    assert [row[0].split()[0] for row in rows] == [param.opts[0] for param in params]


# -- code ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", names(PAGES))
def test_every_block_of_python_compiles(page: str) -> None:
    for block in blocks(ROOT / page, "python"):
        assert ast.parse(block).body


@pytest.mark.usefixtures("fresh_compiler")
def test_the_first_example_runs_and_keeps_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMAT_LOWERING", "eager")
    example = blocks(README, "python")[0]
    before = len(remat_compiler.plans())

    scope = {"installed_backend": installed_backend}
    exec(example.replace('backend="remat"', "backend=installed_backend()"), scope)

    (plan,) = remat_compiler.plans()[before:]
    assert plan.budget_bytes == 8 * 2**30
    assert plan.projected_peak_bytes <= plan.budget_bytes


@pytest.mark.parametrize(
    ("page", "marker"), [("README.md", "results:first"), ("docs/memory-model.md", "results:memory")]
)
def test_the_places_for_results_are_marked(page: str, marker: str) -> None:
    assert between(ROOT / page, marker).strip()
