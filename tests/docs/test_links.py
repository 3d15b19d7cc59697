"""Each relative link of the pages leads to a file that is there, and its anchor to a heading of that file."""

import functools
import pathlib
import re

import pytest

pytestmark = pytest.mark.one_pair  # does not depend on JAX's version

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")]


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def anchor(heading: str) -> str:
    """As GitHub and MyST make it of a heading: its text without marks, in small letters, with hyphens for spaces."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


@functools.cache
def anchors(page: pathlib.Path) -> set[str]:
    text = page.read_text()
    headings = re.findall(r"^#{1,6} (.*)$", without_code(text), re.MULTILINE)
    included = re.findall(r"^```\{include\} (.*)$", text, re.MULTILINE)
    return {anchor(heading) for heading in headings}.union(*(anchors(page.parent / file) for file in included))


def links(page: pathlib.Path) -> list[str]:
    return [
        link for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text()))
        if not re.match(r"https?:", link)
    ]  # fmt: skip


def fault(page: pathlib.Path, link: str) -> str | None:
    file, _, heading = link.partition("#")
    target = (page.parent / file).resolve() if file else page
    if not target.exists():
        return "no such file"
    if heading and target.suffix == ".md" and heading not in anchors(target):
        return "no such heading"
    site = ROOT / "docs"
    if site in page.parents and target.suffix == ".md" and site not in target.parents:
        return "no page of the site"
    return None


def test_links_lead_somewhere():
    checked = [(page, link) for page in PAGES for link in links(page)]
    assert len(checked) > 200
    wrong = [f"{page.relative_to(ROOT)}: {link}: {why}" for page, link in checked if (why := fault(page, link))]
    assert not wrong, "\n".join(wrong)


def test_the_site_has_the_pages_that_its_pages_link():
    page = ROOT / "docs" / "elastic.md"
    assert fault(page, "../SECURITY.md#files") == "no page of the site"
    assert fault(page, "security.md#files") is None


def test_a_wrong_link_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A `b()` [c](x.md)\n[1](#a-b-c) [2](#d) [3](page.md) [4](other.md)\n```\n[5](other.md)\n```\n")
    assert [(link, fault(page, link)) for link in links(page)] == [
        ("x.md", "no such file"), ("#a-b-c", None), ("#d", "no such heading"), ("page.md", None),
        ("other.md", "no such file"),
    ]  # fmt: skip
