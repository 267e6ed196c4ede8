"""What the sections of the page have in common."""

from __future__ import annotations

from pathlib import Path

from .charts import on_white


def chart(directory: Path, name: str, svg: str) -> str:
    """Writes a chart, and returns what shows it."""
    (directory / f"{name}.svg").write_text(on_white(svg) + "\n")
    return f"![{name}]({name}.svg)"


def profile(title: str, top: list[dict]) -> list[str]:
    """Where the time went; nothing where there is no profile."""
    rows = [
        f"| {row['percent']:.1f} | {row['thread']} | `{row['function']}`{' (kernel)' if row['kernel'] else ''} |"
        for row in top
    ]
    return details(title, ["%", "thread", "function"], rows)


def details(title: str, columns: list[str], rows: list[str]) -> list[str]:
    """A table that opens on demand; nothing without rows."""
    if not rows:
        return []
    head = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    return [f"<details><summary>{title}</summary>", "", *head, *rows, "", "</details>", ""]
