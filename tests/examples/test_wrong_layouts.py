import importlib.util
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def rows() -> list[tuple[str, str, float, float]]:
    spec = importlib.util.spec_from_file_location("wrong_layouts", ROOT / "examples" / "wrong_layouts.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.rows()


def test_right_conversions_are_within_their_promise(rows: list[tuple[str, str, float, float]]) -> None:
    right = {name: difference for name, left_out, difference, _ in rows if left_out == "nothing"}
    assert len(right) == 7
    assert right["llama → V2"] == 0
    assert max(right.values()) <= 1e-5


def test_step_that_is_left_out_is_seen_at_once(rows: list[tuple[str, str, float, float]]) -> None:
    wrong = [(difference, other) for _, left_out, difference, other in rows if left_out != "nothing"]
    assert len(wrong) == 11
    assert min(difference for difference, _ in wrong) > 0.1
    assert min(other for _, other in wrong) > 0.1


def test_documented_table_has_these_rows(rows: list[tuple[str, str, float, float]]) -> None:
    text = (ROOT / "docs/layouts.md").read_text(encoding="utf-8")
    for name, left_out, difference, other in rows:
        start = f"| {name} | {left_out} | "
        (line,) = [line for line in text.splitlines() if line.startswith(start)]
        numbers = [float(cell.strip(" %")) for cell in line.removeprefix(start).strip(" |").split("|")]
        if left_out == "nothing":  # rounding depends on the machine
            assert numbers == [0, 0] if difference == 0 else numbers[0] <= 1e-5
        else:
            assert numbers == pytest.approx([difference, 100 * other], rel=0.1)
