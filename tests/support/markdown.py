"""Code blocks and tables of Markdown pages."""

import re
from dataclasses import dataclass
from pathlib import Path


ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@dataclass(frozen=True)
class Block:
    """A block of code.

    Args:
        page: name of its file.
        language: language of the code, as in ```` ```sh ````.
        title: requirement, such as "needs the Hub"; empty for a block that runs anywhere.
        text: the code.
    """

    page: str
    language: str
    title: str
    text: str


def blocks(page: Path, language: str = "") -> list[Block]:
    """Return a page's blocks of code, in one language or all."""
    found = re.findall(r'(?ms)^```(\w+)(?: title="([^"]*)")?\n(.*?)^```$', page.read_text(encoding="utf-8"))
    return [Block(page.name, *parts) for parts in found if language in ("", parts[0])]


def commands(page: Path) -> list[tuple[str, str]]:
    """Return the lines of a page's shell blocks without their comments, each with its block's title."""
    lines = [(line, block.title) for block in blocks(page, "sh") for line in block.text.splitlines()]
    return [(re.sub(r"\s+# .*", "", line), title) for line, title in lines]


def parse_tables(text: str) -> list[list[list[str]]]:
    """Return the tables in a text, each as the cells of its header and of its rows."""
    parsed = []
    for table in re.findall(r"(?m)(?:^\|.*\|\n)+", text):
        header, _, *rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in table.splitlines()]
        parsed.append([header, *rows])
    return parsed


def tables(page: Path, first_column: str) -> list[dict[str, dict[str, str]]]:
    """Return the tables of a page whose first column has this title: row label -> column title -> cell."""
    result = []
    for (first, *columns), *rows in parse_tables(page.read_text(encoding="utf-8")):
        if first == first_column:
            result.append({label: dict(zip(columns, cells, strict=True)) for label, *cells in rows})
    return result


def render(first_column: str, table: dict[str, dict[str, str]]) -> str:
    """Return a table as Markdown, from the form that `tables` returns."""
    columns = list(next(iter(table.values())))
    lines = [[first_column, *columns], ["---"] * (len(columns) + 1)]
    lines += [[label, *row.values()] for label, row in table.items()]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
