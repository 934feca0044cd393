"""docs/sources.md: every line says where a thing is, with a test that there is, or that it is not here."""

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs/sources.md"
TEST = re.compile(r"`((?:unit|integration|e2e)/test_\w+\.py)::(test_\w+)`")
LINK = re.compile(r"\]\((?!https?://)([^)#\s]*)(?:#([^)\s]+))?\)")


def lines():
    """[source, theirs, here, test] of each line of the three tables."""
    source = None
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            source = line[3:]
        elif line.startswith("| ") and not line.startswith(("| theirs", "| ---")):
            yield [source, *(cell.strip() for cell in line.strip("|").split("|"))]


def anchors(page):
    """As GitHub and the site make them of headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_three_sources_have_lines():
    assert {source for source, *_ in lines()} == {"Published recipe", "APRIL", "AReaL"}


@pytest.mark.parametrize("line", lines(), ids=lambda line: line[1])
def test_line_names_a_test_or_a_record_or_says_no(line):
    _, theirs, here, test = line
    named = TEST.findall(test)
    assert theirs and here
    assert named or here.startswith("**no**") or "studies/results/" in here
    for file, name in named:
        assert f"def {name}(" in (REPOSITORY / "tests" / file).read_text(), test


def test_every_anchor_is_a_heading_of_its_page():
    """MkDocs checks those within the site alone."""
    for target, anchor in LINK.findall(PAGE.read_text()):
        page = (PAGE.parent / target).resolve() if target else PAGE
        assert page.exists(), target
        assert not anchor or anchor in anchors(page), f"{target}#{anchor}"
