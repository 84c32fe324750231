from pathlib import Path

import pytest

from examples import draw_maps


def test_figure_shows_a_needle_that_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    titles: list[str] = []
    monkeypatch.setattr("matplotlib.figure.Figure.suptitle", lambda figure, title, **_: titles.append(title))
    picture = tmp_path / "maps.png"
    draw_maps.main(str(Path(__file__).parents[2] / "examples/recall_model"), str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "after “ London” it predicts “ sister”" in titles[0]
