import importlib
import json
from pathlib import Path

import pytest
import yaml
from transformers import LlamaConfig

from diffllama import convert
from support.llama_checkpoints import SIZES, save_model
from support.tiny_models import tiny_tokenizer


EXAMPLES = Path(__file__).parents[2] / "examples"


def test_conversion_and_its_llama_begin_equal_and_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    save_model(tmp_path / "llama", LlamaConfig(**SIZES))
    convert(tmp_path / "llama", tmp_path / "converted", source="llama")
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt").write_text(" ".join(f"w{6 + i * i % 17}" for i in range(2000)))
    settings = yaml.safe_load((EXAMPLES / "heal.yaml").read_text())
    settings["model"] = {"from": "converted", "baseline_from": "llama"}
    settings |= {"tokenizer": "tokenizer", "sequence_length": 16, "tokens_per_step": 64}
    settings["training"] |= {"output_dir": "healed", "max_steps": 6, "eval_steps": 3, "disable_tqdm": True}
    Path("heal.yaml").write_text(yaml.safe_dump(settings))

    importlib.import_module("heal").main("heal.yaml", "out/heal")

    results = json.loads(Path("out/heal.json").read_text())["results"]
    assert results["DIFF V2"]["eval_loss"][0] == results["Llama"]["eval_loss"][0]  # the conversion is exact
    assert [step for step, _ in results["Llama"]["eval_loss"]] == [0, 3, 6]
    assert results["DIFF V2"]["loss"][-1] != results["Llama"]["loss"][-1]
    assert results["DIFF V2"]["diff_cosine"][0] == [0, pytest.approx(1)]
    assert results["DIFF V2"]["diff_cosine"][-1][1] < 0.9999
    assert results["DIFF V2"]["diff_lambda"][0] == [0, 0.5]
    assert "diff_cosine" not in results["Llama"]
    assert Path("out/heal.png").read_bytes().startswith(b"\x89PNG")
