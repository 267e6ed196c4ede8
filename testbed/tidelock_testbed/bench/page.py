"""What the sections of the page have in common."""

from __future__ import annotations

from pathlib import Path

from .charts import on_white


def chart(directory: Path, name: str, svg: str) -> str:
    """Writes a chart, and returns what shows it."""
    (directory / f"{name}.svg").write_text(on_white(svg) + "\n")
    return f"![{name}]({name}.svg)"


def profile(title: str, top: list[dict]) -> list[str]:
    """A table that opens on demand; nothing where there is no profile."""
    if not top:
        return []
    rows = [
        f"| {row['percent']:.1f} | {row['thread']} | `{row['function']}`{' (kernel)' if row['kernel'] else ''} |"
        for row in top
    ]
    head = [f"<details><summary>{title}</summary>", "", "| % | thread | function |", "|---|---|---|"]
    return [*head, *rows, "", "</details>", ""]
