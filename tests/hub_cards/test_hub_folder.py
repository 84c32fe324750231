import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Trainer, TrainingArguments

from diffllama import DiffLlamaForSequenceClassification, convert
from diffllama.checkpoints.errors import CheckpointError
from diffllama.hub_cards.checks import check
from diffllama.hub_cards.code import package_code, split_version_line
from diffllama.hub_cards.findings import Finding, FolderError, error_lines
from diffllama.hub_cards.hub_folder import export, write_card
from diffllama.modeling_diff.configuration_diffllama import AUTO_MAP
from support import subprocess_runner
from support.llama_checkpoints import llama, snapshot
from support.tiny_models import EVERY_FEATURE, tiny_model, tiny_tokenizer, tokens


LOAD = """
import json, sys
sys.modules["diffllama"] = None  # from here on importing it fails
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

folders, answer = json.loads(sys.argv[1]), sys.argv[2]
logits, ids = {}, torch.arange(1, 14)[None]
for name, folder in folders.items():
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules"), type(model)
    with torch.no_grad():
        logits[name] = model(ids).logits
    AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
save_file(logits, answer)
"""


def train(model: PreTrainedModel, folder: Path) -> Trainer:
    """Train a model for two steps and save a checkpoint."""
    arguments = TrainingArguments(
        str(folder), max_steps=2, per_device_train_batch_size=2, learning_rate=0.1, save_steps=2, logging_steps=1,
        report_to=[], use_cpu=True,
    )  # fmt: skip
    rows = tokens(4, 8)
    trainer = Trainer(
        model,
        arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        processing_class=tiny_tokenizer(),
    )
    trainer.train()
    return trainer


def add_tensor(folder: Path, name: str, tensor: torch.Tensor) -> None:
    """Add a tensor to a folder's weights, or replace one."""
    file = folder / "model.safetensors"
    save_file(load_file(file) | {name: tensor}, file, {"format": "pt"})


def edit(folder: Path, **fields: Any) -> None:
    """Set fields in a folder's config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


ALIASES = "a: &a [x, x]\nb: [*a, *a]\n"


def logits_of(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(1, 14)[None]).logits


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Models of every origin, saved and exported, and their outputs in a process without the package."""
    work = tmp_path_factory.mktemp("origins")
    expected: dict[str, torch.Tensor] = {}

    trainer = train(tiny_model("v1", attn_implementation="sdpa", **EVERY_FEATURE), work / "trainer")
    trainer.save_model(work / "save_model")
    expected["save_model"] = expected["checkpoint"] = logits_of(trainer.model)

    lora = LoraConfig(r=2, target_modules=["q_proj", "o_proj"], init_lora_weights=False)
    adapted = get_peft_model(tiny_model("v2", attn_implementation="sdpa", gated_mlp=False), lora)
    merged = adapted.merge_and_unload()
    merged.save_pretrained(work / "merged")
    expected["merged"] = logits_of(merged)

    convert(llama(work / "llama"), work / "conversion", source="llama")
    expected["conversion"] = logits_of(AutoModelForCausalLM.from_pretrained(work / "conversion"))

    folders = {name: work / name for name in ("save_model", "merged", "conversion")}
    folders["checkpoint"] = work / "trainer" / "checkpoint-2"
    for name in ("merged", "conversion"):
        tiny_tokenizer().save_pretrained(folders[name])
    before = {name: snapshot(folder) for name, folder in folders.items()}
    exported = {name: export(folder, work / "exported" / name) for name, folder in folders.items()}
    assert {name: snapshot(folder) for name, folder in folders.items()} == before

    places = {f"saved {name}": str(path) for name, path in folders.items()}
    places |= {f"exported {name}": str(path) for name, path in exported.items()}
    env = os.environ | {"HF_MODULES_CACHE": str(work / "modules"), "HF_HOME": str(work / "home")}
    subprocess_runner.run(LOAD, json.dumps(places), work / "logits.safetensors", environment=env, cwd=work)
    return {"work": work, "expected": expected, "computed": load_file(work / "logits.safetensors"), "folders": exported}


ORIGINS = ("save_model", "checkpoint", "merged", "conversion")


@pytest.mark.parametrize("origin", ORIGINS)
class TestOrigins:
    def test_saved_folder_loads_without_the_package(self, origin: str, story: dict[str, Any]) -> None:
        assert torch.equal(story["computed"][f"saved {origin}"], story["expected"][origin])

    def test_exported_folder_computes_the_same_bits(self, origin: str, story: dict[str, Any]) -> None:
        assert torch.equal(story["computed"][f"exported {origin}"], story["expected"][origin])

    def test_exported_folder_is_complete_and_without_errors(self, origin: str, story: dict[str, Any]) -> None:
        folder = story["folders"][origin]
        files = {file.name for file in folder.iterdir()}
        record = {"conversion": {"conversion.json"}, "merged": set()}.get(origin, {"training.json"})
        assert files == record | {
            *package_code(),
            "LICENSE",
            "README.md",
            "chat_template.jinja",
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
        }
        assert [str(finding) for finding in check(folder)] == [
            "README.md:licence: names no licence: `diffllama card --license` does"
        ]
        config = json.loads((folder / "config.json").read_text())
        assert config["auto_map"] == AUTO_MAP
        assert config["use_cache"] is True
        assert all(split_version_line((folder / name).read_text())[1] for name in package_code())

    def test_card_describes_the_origin(self, origin: str, story: dict[str, Any]) -> None:
        card = ModelCard.load(story["folders"][origin] / "README.md")
        assert ("## Conversion" in card.text) == (origin == "conversion")
        assert ("## Training" in card.text) == (origin in ("save_model", "checkpoint"))
        assert ("| steps | 2 |" in card.text) == (origin == "checkpoint")
        assert "messages" in card.text


@pytest.fixture
def source(tmp_path: Path) -> Path:
    tiny_model("v1").save_pretrained(tmp_path / "src")
    tiny_tokenizer().save_pretrained(tmp_path / "src")
    return tmp_path / "src"


def test_every_file_survives_export_in_shards(tmp_path: Path) -> None:
    model = tiny_model("v2", torch.bfloat16, "sdpa", tie_word_embeddings=True, **EVERY_FEATURE)
    model.generation_config.max_new_tokens = 7
    model.save_pretrained(tmp_path / "src")
    (tmp_path / "src" / "LICENSE").write_text("Only for llamas.")
    card = "---\nlicense: other\nlicense_name: llamas\n---\n# Mine\n"
    (tmp_path / "src" / "README.md").write_text(card, encoding="utf-8-sig")
    expected = logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "src"))
    torch.save(load_file(tmp_path / "src" / "model.safetensors"), tmp_path / "src" / "pytorch_model.bin")
    (tmp_path / "src" / "model.safetensors").unlink()
    progress = []
    folder = export(
        tmp_path / "src", tmp_path / "dest", max_shard_size="50KB", progress=lambda *state: progress.append(state)
    )
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert (loaded.dtype, loaded.generation_config.max_new_tokens) == (torch.bfloat16, 7)
    assert torch.equal(logits_of(loaded), expected)
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    assert not list(folder.glob("*.bin"))
    assert progress[-1][0] == progress[-1][1] > 0
    assert (folder / "LICENSE").read_text() == "Only for llamas."
    assert "Apache License" in (folder / "LICENSE-CODE").read_text()
    card = (folder / "README.md").read_text()
    assert "# Mine" in card
    assert "under Apache-2.0 (LICENSE-CODE). The model's licence is llamas." in card


def test_classifier_is_exported_as_a_classifier(tmp_path: Path) -> None:
    DiffLlamaForSequenceClassification(tiny_model().config).save_pretrained(tmp_path / "src")
    folder = export(tmp_path / "src", tmp_path / "dest")
    assert not (folder / "generation_config.json").exists()
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == [DiffLlamaForSequenceClassification.__name__]
    assert ModelCard.load(folder / "README.md").data.pipeline_tag == "text-classification"


def test_private_paths_and_code_of_others_are_not_exported(source: Path, tmp_path: Path) -> None:
    """These are code of others, fields that run more code, and local paths, also in peft's card."""
    more = {"_attn_implementation": "evil/kernel", "custom_pipelines": {"x": {"impl": "evil.P"}}}
    edit(source, auto_map={name: f"alice/model--{reference}" for name, reference in AUTO_MAP.items()}, **more)
    (source / "modeling_diffllama.py").write_text("raise SystemExit('old code')\n")
    file = source / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    paths = {"name_or_path": "/home/me/model", "special_tokens_map_file": "/home/me/x.json"}
    file.write_text(json.dumps(settings | paths))
    (source / "README.md").write_text(
        "---\nbase_model: /tmp/me/model\ntags: [lora, 'base_model:adapter:/tmp/me/model']\n---\n# Mine\n"
    )
    folder = export(source, tmp_path / "dest")
    assert [finding.severity for finding in check(folder)] == ["note"]
    assert json.loads((folder / "config.json").read_text()).keys().isdisjoint(more)
    assert json.loads((folder / "tokenizer_config.json").read_text()).items() <= settings.items()
    assert AutoTokenizer.from_pretrained(folder)("w7 w8").input_ids == tiny_tokenizer()("w7 w8").input_ids
    data = ModelCard.load(folder / "README.md").data
    assert data.base_model is None
    assert data.tags == ["diffllama", "differential-attention", "diff-v1", "lora"]


def test_trained_conversion_is_not_called_a_conversion(tmp_path: Path) -> None:
    folder = convert(llama(tmp_path / "llama"), tmp_path / "ours", source="llama")
    assert "bit-equal" in (export(folder, tmp_path / "before") / "README.md").read_text()
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.embed_tokens.weight[-1, -1] *= 1.01
    model.save_pretrained(folder)
    text = (export(folder, tmp_path / "after") / "README.md").read_text()
    assert "bit-equal" not in text
    assert "not trained further" not in text


def test_handwritten_text_of_a_replaced_folder_stays(source: Path, tmp_path: Path) -> None:
    folder = export(source, tmp_path / "dest", metadata={"license": "mit"})
    card = folder / "README.md"
    card.write_text(f"{card.read_text()}\nIt likes cats.\n")
    export(source, folder, overwrite=True)
    assert "It likes cats." in card.read_text()
    assert "license: mit" in card.read_text()
    (source / "README.md").write_text("It likes dogs.\n")
    with pytest.raises(ValueError, match="The handwritten texts"):
        export(source, folder, overwrite=True)


REFUSED: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    "nothing": (lambda src: shutil.rmtree(src), FileNotFoundError, "src is not a folder"),
    "adapter": (lambda src: (src / "config.json").rename(src / "adapter_config.json"), ValueError, "merge_and_unload"),
    "other model": (lambda src: edit(src, model_type="llama"), ValueError, "must be one of 'diff_llama', got 'llama'"),
    "state": (lambda src: (src / "trainer_state.json").write_text("{"), ValueError, "state.json is not valid JSON"),
    "tokenizer": (lambda src: (src / "tokenizer.json").write_text("{}"), ValueError, "tokenizer in .* does not load"),
    "link": (lambda src: (src / "NOTICE").symlink_to("/etc/hostname"), ValueError, "NOTICE is a link out of"),
    "aliases": (lambda src: (src / "README.md").write_text(f"---\n{ALIASES}---\n"), ValueError, "YAML aliases"),
    "bytes": (lambda src: (src / "README.md").write_bytes(b"\xff"), ValueError, r"README\.md is not text in UTF-8"),
    "rows": (lambda src: (src / "evaluation.json").write_text('{"results": [1]}'), ValueError, "No card can be"),
    "list": (lambda src: (src / "conversion.json").write_text("[]"), ValueError, r"conversion\.json must be"),
    "extra weight": (lambda src: add_tensor(src, "x", torch.zeros(2)), CheckpointError, r"extra: x \[2\]"),
    "NaN": (
        lambda src: add_tensor(src, "model.norm.weight", torch.full([64], torch.nan)), CheckpointError,
        r"\n  model\.safetensors: model\.norm\.weight$",
    ),
    "secret": (
        lambda src: (src / "README.md").write_text("hf_abcdefghijklmnopqrstuvwxyz"), FolderError,
        "README.md:secret: contains a secret: Hugging Face token",
    ),
}  # fmt: skip
"""What spoils a source, and the error. The other errors of sources are those of conversions, which open them alike."""


@pytest.mark.parametrize("what", REFUSED)
def test_invalid_source_is_refused_and_nothing_appears(what: str, source: Path, tmp_path: Path) -> None:
    spoil, error, message = REFUSED[what]
    spoil(source)
    before = snapshot(tmp_path)
    with pytest.raises(error, match=message):
        export(source, tmp_path / "dest")
    assert snapshot(tmp_path) == before


def test_only_a_model_folder_is_overwritten(source: Path, tmp_path: Path) -> None:
    (tmp_path / "dest").mkdir()
    (tmp_path / "dest" / "mine.txt").touch()
    for overwrite in (False, True):
        with pytest.raises(FileExistsError):
            export(source, tmp_path / "dest", overwrite=overwrite)
    with pytest.raises(FileExistsError, match="overlap"):
        export(source, source / "dest")


class TestWriteCard:
    def test_results_are_added_and_handwritten_text_stays(self, source: Path, tmp_path: Path) -> None:
        folder = export(source, tmp_path / "dest", metadata={"license": "mit"})
        card = folder / "README.md"
        card.write_text(card.read_text().replace("<!-- diffllama:usage", "It likes cats.\n\n<!-- diffllama:usage"))
        results = tmp_path / "results_1.json"
        results.write_text(json.dumps({"results": {"piqa": {"acc,none": 0.75}}, "n-shot": {"piqa": 0}}))
        assert write_card(folder, metadata={"language": "en"}, results=[results]) == []
        text = card.read_text()
        assert "| piqa | acc | 0.7500 | 0 |  |" in text
        assert "It likes cats." in text
        assert {"license": "mit", "language": "en"}.items() <= ModelCard(text).data.to_dict().items()
        assert write_card(folder) == []
        assert card.read_text() == text
        assert error_lines(check(folder)) == []

    def test_failure_changes_nothing(self, source: Path, tmp_path: Path) -> None:
        (tmp_path / "results_1.json").write_text("{}")
        (source / "README.md").write_text("---\nmodel-index: [1]\n---\n")
        before = snapshot(tmp_path)
        for folder, results, error, message in (
            (tmp_path, [], FileNotFoundError, r"config\.json"),
            (source, [tmp_path], ValueError, r"results_1\.json"),
            (source, [], ValueError, "model_index"),
        ):
            with pytest.raises(error, match=message):
                write_card(folder, results=results)
        assert snapshot(tmp_path) == before


def test_error_can_be_allowed(source: Path, tmp_path: Path) -> None:
    (source / "README.md").write_text("# Logs are in /home/me/logs\n")
    with pytest.raises(FolderError, match=r"README\.md:path: contains a local path"):
        export(source, tmp_path / "dest")
    shown: list[Finding] = []
    export(source, tmp_path / "dest", allow=["README.md:path"], show=shown.extend)
    assert any(str(finding).endswith("'/home/me/logs' (allowed)") for finding in shown)


IMPORTED = """
import sys
from pathlib import Path
from diffllama.hub_cards.folder_checks import inspect_folder
from diffllama.hub_cards.hub_folder import write_card
from diffllama.hub_cards.upload import push
list(inspect_folder(Path("folder")))
write_card("folder")
facts["imported"] = sorted({"peft", "bitsandbytes"} & set(sys.modules))
"""


def test_check_card_and_push_do_not_import_peft_or_bitsandbytes(source: Path, tmp_path: Path) -> None:
    shutil.copytree(source, tmp_path / "folder")
    torch.save(TrainingArguments("x", use_cpu=True, report_to=[]), tmp_path / "folder" / "training_args.bin")
    assert subprocess_runner.run(IMPORTED, environment=os.environ, cwd=tmp_path)[0] == {"imported": []}
    assert (tmp_path / "folder" / "README.md").is_file()
