import subprocess
import sys
from pathlib import Path

import pytest

from support.tiny_models import tiny_model, tiny_tokenizer


@pytest.mark.slow
def test_the_figure_is_drawn(tmp_path: Path) -> None:
    tiny_model("v2", num_hidden_layers=19, num_attention_heads=14, num_key_value_heads=7).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    script = Path(__file__).parents[2] / "examples/draw_maps.py"
    picture = tmp_path / "maps.png"
    subprocess.run([sys.executable, script, tmp_path, picture], check=True, cwd=tmp_path)
    assert picture.read_bytes().startswith(b"\x89PNG")
