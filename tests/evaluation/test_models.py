"""Identification of models and files, and loading of models."""

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from diffllama.evaluation.models import OWN_FILES, LoadedModel, digest, model_spec
from support.tiny_loaded_models import tiny_loaded_model
from support.tiny_models import tiny_model, tiny_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model and its tokenizer."""
    tiny_model("v2").to(torch.bfloat16).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


class TestDigest:
    @pytest.fixture
    def tree(self, tmp_path: Path) -> Path:
        for name, content in {"b": "2", "a/c": "3", "a/d": "1"}.items():
            (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "tree" / name).write_text(content)
        return tmp_path / "tree"

    def test_digest_is_of_bytes_and_of_a_folder_also_of_sorted_names(self, tree: Path) -> None:
        assert digest(tree / "b") == hashlib.sha256(b"2").hexdigest()
        content = {"a/c": b"3", "a/d": b"1", "b": b"2"}
        lines = [f"{name}\0{hashlib.sha256(one).hexdigest()}\n" for name, one in content.items()]
        assert digest(tree) == hashlib.sha256("".join(lines).encode()).hexdigest()

    def test_digest_ignores_location_and_hidden_files(self, tree: Path) -> None:
        before = digest(tree)
        (tree / ".hidden").write_text("x")
        (tree / ".git").mkdir()
        (tree / ".git" / "x").write_text("x")
        (tree / "empty").mkdir()
        assert digest(tree.rename(tree.with_name(".elsewhere"))) == before

    def test_digest_counts_each_matching_file_once(self, tree: Path) -> None:
        assert digest(tree, ("b", "x")) == digest(tree, ("*", "b")) != digest(tree)


class TestModelSpec:
    def test_facts_change_only_with_files_that_determine_the_model(self, folder: Path) -> None:
        facts = model_spec(str(folder), dtype="float32", device="cpu").facts
        assert facts == {
            "name": str(folder), "sha256": digest(folder, OWN_FILES), "dtype": "float32", "device": "cpu",
            "trust_remote_code": False,
        }  # fmt: skip
        (folder / "README.md").write_text("A model.")
        (folder / "probes").mkdir()
        (folder / "probes" / "results.json").write_text("{}")
        assert model_spec(str(folder), dtype="float32", device="cpu").facts == facts
        seen = {facts["sha256"]}
        weights = load_file(folder / "model.safetensors")
        weights["model.norm.weight"][0] += 1
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        seen.add(model_spec(str(folder), device="cpu").facts["sha256"])
        for name in ("config.json", "tokenizer.json"):
            (folder / name).write_text((folder / name).read_text() + "\n")
            seen.add(model_spec(str(folder), device="cpu").facts["sha256"])
        assert len(seen) == 4

    @pytest.mark.parametrize(("dtype", "expected"), [("auto", torch.bfloat16), ("float32", torch.float32)])
    def test_model_is_loaded_in_dtype_and_evaluation_mode(
        self, dtype: str, expected: torch.dtype, folder: Path
    ) -> None:
        loaded = model_spec(str(folder), dtype=dtype, device="cpu").load()
        assert loaded.model.dtype == expected
        assert not loaded.model.training
        assert loaded.model.config.diff_variant == "v2"
        assert loaded.encode("w7 w9") == [7, 9]
        assert loaded.tensor([7, 9]).tolist() == [[7, 9]]

    def test_pickled_weights_are_not_loaded(self, folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        torch.save(weights, folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
        with pytest.raises(ValueError, match="model cannot be loaded from safetensors"):
            model_spec(str(folder), device="cpu").load()

    def test_model_with_missing_weights_is_refused(self, folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        del weights["model.norm.weight"]
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=r"lacks 1 of its model's weights: model\.norm\.weight"):
            model_spec(str(folder), device="cpu").load()

    def test_tokenizer_larger_than_embeddings_is_refused(self, folder: Path) -> None:
        tiny_loaded_model("llama").tokenizer.save_pretrained(folder)
        with pytest.raises(ValueError, match="at most 97 tokens, the embeddings of the model, got 257"):
            model_spec(str(folder), device="cpu").load()

    @pytest.mark.parametrize("name", ["abacus", "meta", "cuda:99"])
    def test_unusable_device_is_refused(self, name: str, folder: Path) -> None:
        with pytest.raises(ValueError, match=f"--device: torch cannot compute on {name!r} here"):
            model_spec(str(folder), device=name)

    @pytest.mark.parametrize("name", ["nowhere", "./no/where", "/no/where", "~/nowhere", "a/b/c", "folder"])
    def test_name_without_a_model_is_refused(self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "folder").mkdir()
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HOME", str(tmp_path))
        with pytest.raises(FileNotFoundError, match=f"{name} is not a folder with a config.json"):
            model_spec(name)

    def test_repository_is_named_by_its_commit(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "snapshots").mkdir()
        snapshot = folder.rename(tmp_path / "snapshots" / "0123abc")
        asked = []

        def download(name: str, **options: object) -> str:
            asked.append((name, options["revision"]))
            return str(snapshot)

        monkeypatch.setattr("huggingface_hub.snapshot_download", download)
        facts = model_spec("me/model", revision="v1").facts
        assert (facts["name"], facts["commit"]) == ("me/model", "0123abc")
        assert set(asked) == {("me/model", "v1")}


@pytest.mark.parametrize(
    ("template", "prefix"), [("$A", []), ("<s> $A", [1]), ("<|user|> <s> $A </s>", [4, 1]), ("$A </s>", [])]
)
def test_prefix_is_what_the_tokenizer_puts_before_texts(template: str, prefix: list[int]) -> None:
    tokenizer, special = tiny_tokenizer(), [("<|user|>", 4), ("<s>", 1), ("</s>", 2)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=special)
    assert LoadedModel(name="a", model=tiny_loaded_model("v1").model, tokenizer=tokenizer).prefix == prefix


def test_tokenizer_without_a_token_for_the_probed_text_is_refused() -> None:
    loaded = tiny_loaded_model("v1")
    backend = Tokenizer(BPE({"<s>": 0, "b": 1}, []))  # drops unknown characters
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    with pytest.raises(
        ValueError,
        match=r"The tokenizer of a must encode `a` alike with and without special tokens, got \[0\] and \[\]",
    ):
        _ = LoadedModel(name="a", model=loaded.model, tokenizer=tokenizer).prefix
