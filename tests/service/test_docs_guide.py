"""docs/guide.md: every guideline has its evidence and limits, and every command and link in it works."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from service.cli.specs import spec_text
from service.config.document import parse
from service.config.hardware import CATALOGUE
from service.specs.experiment import validate

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
RUN = re.compile(r"stillhouse \w+|python -m benchmarks\.|command above|sweep of \[batch\]|[Ss]ame runs")
CHOICES = (
    "Precision", "Distillation", "Encoder", "Inference format", "Binary weights", "Batch", "Optimizer",
    "Parallel strategy", "Hardware",
)  # fmt: skip


def commands() -> list[list[str]]:
    """The words of every command, with shell variables put in."""
    found = []
    for block in re.findall(r"^```\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE):
        variables: dict[str, str] = {}
        for line in block.replace("\\\n", " ").splitlines():
            if assigned := re.fullmatch(r'([A-Z]+)="(.*)"', line):
                variables[assigned[1]] = assigned[2]
                continue
            for name, value in variables.items():
                line = line.replace(f"${name}", value)
            found.append(shlex.split(line))
    return found


COMMANDS = commands()


def guidelines() -> dict[str, str]:
    """The text of each guideline, by its heading."""
    _, *sections = re.split(r"^## ", PAGE, flags=re.MULTILINE)
    by_choice = {text.partition("\n")[0]: text for text in sections}
    found: dict[str, str] = {}
    for choice in CHOICES:
        _, *parts = re.split(r"^### ", by_choice[choice], flags=re.MULTILINE)
        assert parts, f"{choice} has no guideline"
        found |= {f"{choice}: {part.partition(chr(10))[0]}": part for part in parts}
    return found


@pytest.mark.parametrize("text", guidelines().values(), ids=list(guidelines()))
def test_a_guideline_has_evidence_and_limits_or_says_that_it_has_none(text: str) -> None:
    if "**Evidence.**" not in text:
        assert "**No evidence yet" in text
        return
    assert "**Limits.**" in text
    evidence = text.partition("**Evidence.**")[2].partition("**Limits.**")[0]
    assert RUN.search(evidence)
    assert re.search(r"\d", evidence)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_command_of_the_guide_names_a_valid_experiment(command: list[str]) -> None:
    """A submitted spec is valid with its changes at every point, but for runs that only a service knows."""
    assert command[0] == "stillhouse"
    if command[1] != "submit":
        return
    path, *options = command[2:]
    assert options[::2] == ["--set"] * (len(options) // 2)
    spec = validate(parse(spec_text(ROOT / path, options[1::2])), CATALOGUE)
    assert len(list(spec.runs(CATALOGUE))) == spec.run_count()


def test_benchmarks_and_examples_that_the_guide_names_exist() -> None:
    for module in set(re.findall(r"python -m (benchmarks\.\w+)", PAGE)):
        assert importlib.util.find_spec(module) is not None, module
    for example in set(re.findall(r"examples/[\w-]+\.yaml", PAGE)):
        assert (ROOT / example).is_file(), example


def test_the_guides_links_lead_somewhere() -> None:
    for target in set(re.findall(r"\]\(([^)]+)\)", PAGE)):
        file, _, anchor = target.partition("#")
        text = PAGE if not file else (ROOT / "docs" / file).read_text(encoding="utf-8")
        if anchor:
            assert anchor in {slug(heading) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}, (
                target
            )


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-")
