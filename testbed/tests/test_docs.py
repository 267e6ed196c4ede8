"""Links between the pages lead somewhere."""

from __future__ import annotations

import re

from tidelock_testbed.paths import ROOT

PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def prose_of(page) -> str:
    """The page without its code."""
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)


def anchors_of(page) -> set[str]:
    """As the usual renderers make them of headings."""
    headings = (re.sub(r"[^\w\- ]", "", heading.strip().lower()) for heading in HEADING.findall(prose_of(page)))
    return {heading.replace(" ", "-") for heading in headings}


def test_each_link_leads_to_a_file_and_a_heading():
    broken = []
    for page in PAGES:
        for link in LINK.findall(prose_of(page)):
            if "://" in link:
                continue
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors_of(target)):
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert not broken
