import random
import shutil
from pathlib import Path

import pytest
import torch
import typer
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig

from diffllama import convert
from diffllama.evaluation.datasets.haystack import CITIES, HEAD, ask
from examples import heal
from examples.study.text import train_tokenizer
from support.llama_checkpoints import SIZES, save_model
from support.tiny_models import tiny_model


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A tiny Llama and its conversion, whose tokenizer knows the words of the task."""
    sizes = SIZES | {"vocab_size": 512, "max_position_embeddings": 512}
    llama, converted = save_model(tmp_path / "llama", LlamaConfig(**sizes)), tmp_path / "converted"
    words = [HEAD, ask(CITIES[:2]), "The magic number of", *CITIES]
    train_tokenizer(words, 512, [], 512).save_pretrained(llama)
    convert(llama, converted, source="llama")
    return llama, converted


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    draw = random.Random(0)
    for number in range(10):
        sentences = [" ".join(draw.choices(CITIES, k=6)) + "." for _ in range(80)]
        (folder / f"{number}.txt").write_text(" ".join(sentences))
    return folder


SETTINGS = heal.Settings(length=200, needles=2, queries=2, steps=4, batch=2, rank=2, held_out=2, samples=1)


@pytest.mark.slow
def test_arms_are_trained_and_tested(
    tmp_path: Path, folders: tuple[Path, Path], texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama, converted = folders
    arms = {"llama": (llama, heal.LORA), "lora": (converted, heal.LORA), "second": (converted, heal.SECOND_QUERIES)}
    monkeypatch.setattr(heal, "ARMS", arms)
    monkeypatch.setattr(heal, "prepare", lambda: None)
    results = heal.heal(texts, tmp_path / "out", 2, SETTINGS)
    assert results["accuracy before"]["llama"] == results["accuracy before"]["converted"]
    assert {arm: len(numbers["seeds"]) for arm, numbers in results["accuracy"].items()} == dict.fromkeys(arms, 2)
    losses, cosines = (
        {arm: [entry[name] for entry in results["logs"][arm][0] if name in entry] for arm in arms}
        for name in ("eval_loss", "diff_cosine")
    )
    assert {len(values) for values in losses.values()} == {5}
    assert losses["llama"][0] == pytest.approx(losses["lora"][0], rel=1e-2) == losses["second"][0]
    assert len(set(losses["llama"])) == 5
    assert not cosines["llama"]
    assert cosines["lora"][0] == cosines["second"][0] == pytest.approx(1)
    assert cosines["second"][-1] < cosines["lora"][-1]
    assert (tmp_path / "out/curves.png").read_bytes().startswith(b"\x89PNG")

    (tmp_path / "out/second/1/log.json").unlink()  # as if the last training had been interrupted
    shutil.rmtree(tmp_path / "out/second/1-needles")
    assert heal.heal(texts, tmp_path / "out", 2, SETTINGS)["accuracy"] == results["accuracy"]


def test_folder_with_other_settings_is_refused(tmp_path: Path, texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "heal.json").write_text('{"length": 2048}')
    with pytest.raises(typer.Exit):
        heal.main(texts, tmp_path)
    assert "has a run with other settings. Name another --folder." in capsys.readouterr().err


def test_only_answers_count_in_the_loss(folders: tuple[Path, Path], texts: Path) -> None:
    loaded = heal.model_spec(str(folders[0])).load()
    made = heal.rows(loaded, [file.read_text() for file in texts.iterdir()], SETTINGS, 4, "a seed")
    assert len(made) == 4
    for row in made:
        first, second = loaded.tokenizer.decode(row["answer"]).strip(" .\n").split(" and ")
        prompt = loaded.tokenizer.decode(row["prompt"])
        assert f"is {first}." in prompt
        assert f"is {second}." in prompt
        assert prompt.endswith(" are")
        ids = torch.tensor([row["prompt"] + row["answer"]])
        labels = torch.tensor([[-100] * len(row["prompt"]) + row["answer"]])
        expected = loaded.model(ids, labels=labels).loss
        torch.testing.assert_close(loaded.model(**heal.collate([row])).loss, expected)


def test_only_rows_of_noise_heads_get_gradients() -> None:
    model = tiny_model("v2", num_attention_heads=6, num_noise_heads=2, num_key_value_heads=2)
    peft_model = get_peft_model(model, LoraConfig(r=2, task_type="CAUSAL_LM"))
    parameters = heal.second_queries(peft_model)
    assert len(parameters) == model.config.num_hidden_layers
    tokens = torch.randint(0, model.config.vocab_size, (2, 8))
    peft_model(tokens, labels=tokens).loss.backward()
    for parameter in parameters:
        by_head = parameter.grad.unflatten(0, (6, -1)).abs().amax((1, 2))
        assert [bool(value) for value in by_head > 0] == [False, False, True, False, False, True]
