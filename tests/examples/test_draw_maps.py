import importlib
from pathlib import Path

import pytest

from support.tiny_models import tiny_model, tiny_tokenizer


def test_figure_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model("v2").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    draw_maps = importlib.import_module("draw_maps")
    monkeypatch.setattr(draw_maps, "LAYER", 1)
    monkeypatch.setattr(draw_maps, "HEAD", 3)
    picture = tmp_path / "maps.png"
    draw_maps.main(str(tmp_path), str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")
