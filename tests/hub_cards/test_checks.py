import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from diffllama import DiffLlamaForSequenceClassification, __version__
from diffllama.hub_cards import check, export
from diffllama.hub_cards.findings import Finding
from diffllama.hub_cards.inspection import inspect
from diffllama.hub_cards.secrets import secrets
from diffllama.hub_cards.texts import is_absolute_path
from diffllama.modeling_diff.configuration_diffllama import AUTO_MAP
from support.tiny_models import EVERY_FEATURE, VARIANTS, tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exported folder, in shards."""
    folder = tmp_path_factory.mktemp("good")
    tiny_model("v2", **EVERY_FEATURE).save_pretrained(folder / "src")
    tiny_tokenizer().save_pretrained(folder / "src")
    return export(folder / "src", folder / "dest", metadata={"license": "mit"}, max_shard_size="100KB")


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    """A copy of the good folder, to be spoiled."""
    return shutil.copytree(good, tmp_path / "folder")


def edit(path: Path, change: Callable[[dict], None]) -> None:
    """Changes a JSON file."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def findings(folder: Path, severity: str = "error") -> list[str]:
    """What is wrong (or else, good to know)."""
    found = (finding for finding in inspect(folder) if isinstance(finding, Finding))  # without a process of its own
    return [f"{finding.file}: {finding.message}" for finding in dict.fromkeys(found) if finding.severity == severity]


def the_only(folder: Path, severity: str = "error") -> str:
    (finding,) = findings(folder, severity)
    assert findings(folder, "note" if severity == "error" else "error") == []
    return finding


def test_an_exported_folder_is_faultless(good: Path) -> None:
    assert check(good) == []
    assert len(list(good.glob("model-*.safetensors"))) > 1


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_save_pretrained_leaves_loads_and_lacks_tokenizer_card_and_licence(variant: str, tmp_path: Path) -> None:
    tiny_model(variant).save_pretrained(tmp_path)
    assert findings(tmp_path) == []
    assert [finding.split(":")[0] for finding in findings(tmp_path, severity="note")] == [
        "tokenizer.json",
        "LICENSE",
        "README.md",
    ]


def test_other_architectures_have_other_weights(tmp_path: Path) -> None:
    DiffLlamaForSequenceClassification(tiny_model().config).save_pretrained(tmp_path)
    assert findings(tmp_path) == []
    edit(tmp_path / "config.json", lambda config: config.update(architectures=["DifferentialLlamaForCausalLM"]))
    assert findings(tmp_path) == [
        "model.safetensors: missing: lm_head.weight [97, 64]",
        "model.safetensors: extra: score.weight [2, 64]",
    ]


def test_no_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        check(tmp_path / "nowhere")
    assert "config.json: is not there, so this is no model" in findings(tmp_path)


class TestFiles:
    def test_pickles_are_known_by_name_and_by_content(self, folder: Path) -> None:
        (folder / "training_args.bin").write_text("anything")
        (folder / "harmless.model").write_bytes(pickle.dumps({}))
        (folder / "old.dat").write_bytes(b"cos\nsystem\n(S'echo'\ntR.")
        (folder / "native.so").write_bytes(b"\x7fELF")
        torch.save({}, folder / "notes")
        assert [finding.split(",")[0] for finding in findings(folder)] == [
            "harmless.model: is not part of a model folder",
            "native.so: is a program (ELF)",
            "notes: is an archive or compressed (zip)",
            "old.dat: is a pickle",
            "training_args.bin: is a pickle or may be one",
        ]

    def test_a_checkpoint_below_is_looked_into_and_hidden_files_are_not(self, folder: Path) -> None:
        for place in ("checkpoint-5", ".cache"):
            (folder / place).mkdir()
            (folder / place / "optimizer.pt").touch()
        assert the_only(folder).startswith("checkpoint-5/optimizer.pt: is a pickle")

    @pytest.mark.parametrize(
        ("name", "text", "message"),
        [
            ("README.md", "token hf_abcdefghijklmnopqrstuvwxyz", "README.md: holds a Hugging Face token (hf_abc…)"),
            ("serve.py", 'key = "sk-abcdefghijklmnopqrstuvwxyz"', "serve.py: holds an API key (sk-abc…)"),
            ("notes.txt", "-----BEGIN RSA PRIVATE KEY-----", "notes.txt: holds a private key (-----B…)"),
            ("a.json", '{"x": ["ghp_abcdefghijklmnopqrstuvwxyz01234"]}', "a.json: holds a GitHub token (ghp_ab…)"),
            ("train.log", "hf_abcdefghijklmnopqrstuvwxyz", "train.log: holds a Hugging Face token"),
            ("TOKEN", "hf_abcdefghijklmnopqrstuvwxyz", "TOKEN: holds a Hugging Face token"),
            ("a.json", '{"hf_abcdefghijklmnopqrstuvwxyz": 1}', "a.json: holds a Hugging Face token"),
            ("a.json", '{"x": NaN}', "a.json: is no JSON: NaN is no number in JSON"),
            ("preprocessor_config.json", '{"auto_map": {"AutoProcessor": "x.Y"}}', "preprocessor_config.json: `a"),
            ("a.json", '{"hub_token": "abc"}', "a.json: `hub_token` holds a secret"),
            ("a.json", '{"a": {"path": "/data/llama/weights"}}', "a.json: `a.path` holds a path of a machine: '/"),
            ("a.json", '{"cmd": "train --out /home/me/out"}', "a.json: `cmd` holds a path of a machine"),
            ("a.json", '{"cmd": "C:\\\\Users\\\\me\\\\out"}', "a.json: `cmd` holds a path of a machine"),
            ("a.json", '{"cut off', "a.json: is no JSON"),
        ],
    )  # fmt: skip
    def test_secrets_and_paths_are_found_and_not_shown(self, name: str, text: str, message: str, folder: Path) -> None:
        with (folder / name).open("a") as file:
            file.write(text)
        others = ("is not part of a model folder", "belongs to none of the model's classes")
        found = [line for line in findings(folder) if not line.endswith(others)]
        assert len(found) == 1
        assert found[0].startswith(message)
        assert "wxyz" not in found[0]

    @pytest.mark.parametrize("text", ["</s>", "/think", "//", "https://a.org/home/me", "and/or/not", "a: b\\n", ""])
    def test_other_texts_are_no_paths_and_no_secrets(self, text: str, folder: Path) -> None:
        (folder / "training.json").write_text(json.dumps({"bos_token": text}))
        assert check(folder) == []
        assert not is_absolute_path(text)
        assert secrets(text) == []

    def test_tokens_may_look_like_anything(self, folder: Path) -> None:
        text = (folder / "tokenizer.json").read_text()
        (folder / "tokenizer.json").write_text(text.replace('"w96"', '"/home/me/x"'))
        assert check(folder) == []

    def test_links_to_nothing_and_out_of_the_folder_are_wrong(self, folder: Path, tmp_path: Path) -> None:
        (folder / "more.txt").symlink_to(folder / "nowhere")
        (tmp_path / "mine.txt").write_text("private")
        (folder / "notes.txt").symlink_to(tmp_path / "mine.txt")
        assert findings(folder) == [
            "more.txt: is a link to nothing",
            f"notes.txt: is a link out of the folder, to {(tmp_path / 'mine.txt').resolve()}",
        ]

    def test_a_snapshot_in_the_hubs_cache_is_fine(self, folder: Path, tmp_path: Path) -> None:
        (tmp_path / "model" / "snapshots").mkdir(parents=True)
        shutil.move(folder, tmp_path / "model" / "blobs")
        snapshot = tmp_path / "model" / "snapshots" / "0123"
        snapshot.mkdir()
        for blob in (tmp_path / "model" / "blobs").iterdir():
            (snapshot / blob.name).symlink_to(blob)
        assert check(snapshot) == []


class TestCode:
    def test_code_that_differs_is_wrong_unless_it_is_allowed(self, folder: Path) -> None:
        with (folder / "differential_attention.py").open("a") as file:
            file.write("x = 1\n")
        (folder / "handler.py").write_text("import flask\n")
        differs, other = findings(folder)
        assert differs.startswith(
            f"differential_attention.py: is not that of diffllama {__version__} but from diffllama"
        )
        assert ": +1 -0 lines. `diffllama export` writes the package's code" in differs
        assert other == "handler.py: belongs to none of the model's classes"
        allow = ["differential_attention.py:code-differs", "handler.py:other-code"]
        assert {finding.severity for finding in check(folder, allow=allow)} == {"note"}

    def test_what_the_loader_cannot_follow_is_wrong(self, folder: Path) -> None:
        (folder / "differential_attention.py").write_text("from diffllama import x\nfrom ..y import z\n")
        assert sorted(findings(folder)) == [
            "differential_attention.py: line 1: imports diffllama, which is not on the Hub",
            "differential_attention.py: line 2: `from ..y import z` must have the form `from .file import name`",
        ]

    def test_it_is_not_run(self, folder: Path) -> None:
        for file in folder.glob("*.py"):
            file.write_text(file.read_text() + f"\nopen({str(folder / 'run')!r}, 'w')\n")
        check(folder)
        assert not (folder / "run").exists()

    def test_without_it_the_folder_is_not_fit(self, folder: Path) -> None:
        (folder / "modeling_diffllama.py").unlink()
        assert the_only(folder).startswith("modeling_diffllama.py: [Errno 2] No such file")


class TestConfiguration:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"model_type": "llama"}, "`model_type` must be 'diff_llama', got 'llama'"),
            ({"num_attention_heads": 7}, "StrictDataclassFieldValidationError"),
            ({"architectures": ["LlamaForCausalLM"]}, "`architectures` in config.json must be one of Diff"),
        ],
    )
    def test_what_does_not_load_is_wrong(self, change: dict, message: str, folder: Path) -> None:
        edit(folder / "config.json", lambda config: config.update(change))
        found = the_only(folder)
        assert found.startswith("config.json: ")
        assert message in found

    def test_code_in_another_repository_is_wrong(self, folder: Path) -> None:
        edit(
            folder / "config.json",
            lambda c: c["auto_map"].update(AutoModel="me/x--modeling_diffllama.DifferentialLlamaModel"),
        )
        assert the_only(folder).endswith("got 'me/x--modeling_diffllama.DifferentialLlamaModel'")

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"_attn_implementation": "evil/kernel"}, "`_attn_implementation` makes transformers run more: remove it"),
            (
                {"custom_pipelines": {"x": {"impl": "evil.P"}}},
                "`custom_pipelines` makes transformers run more: remove it",
            ),
            (
                {"auto_map": AUTO_MAP | {"AutoModelForMaskedLM": "a.B"}},
                "`auto_map` must not have AutoModelForMaskedLM, got 'a.B'",
            ),
        ],
    )
    def test_more_code_than_the_models_is_wrong_and_is_not_fetched(
        self, change: dict, message: str, folder: Path
    ) -> None:
        edit(folder / "config.json", lambda config: config.update(change))
        assert the_only(folder) == f"config.json: {message}"


class TestWeights:
    def shard(self, folder: Path) -> Path:
        return min(folder.glob("model-*.safetensors"))

    def test_shapes_and_names_must_be_the_configurations(self, folder: Path) -> None:
        edit(folder / "config.json", lambda config: config.update(intermediate_size=95, vocab_size=98))
        assert "misshapen: model.embed_tokens.weight [97, 64], must be [98, 64]" in findings(folder)[0]
        weights = load_file(self.shard(folder))
        name = next(iter(weights))
        save_file({f"{name}.old": weights.pop(name), **weights}, self.shard(folder))
        assert any(f"extra: {name}.old" in line for line in findings(folder))

    def test_a_file_that_is_cut_off_or_missing_is_wrong(self, folder: Path) -> None:
        shard = self.shard(folder)
        shard.write_bytes(shard.read_bytes()[:-1])
        assert any(line.startswith(f"{shard.name}: cannot be read") for line in findings(folder))
        shard.unlink()
        assert shard.name in the_only(folder)

    def test_the_index_must_agree_with_the_files(self, folder: Path) -> None:
        index = folder / "model.safetensors.index.json"
        first, last = min(folder.glob("model-*.safetensors")).name, max(folder.glob("model-*.safetensors")).name
        moved = []

        def move(content: dict) -> None:
            name = next(name for name, home in content["weight_map"].items() if home == first)
            content["weight_map"][name] = last
            content["metadata"]["total_size"] += 1
            moved.append(name)

        edit(index, move)
        found = findings(folder)
        assert found[0] == f"{index.name}: does not say where these tensors are: {moved[0]}"
        assert found[1].startswith(f"{index.name}: `total_size` must be ")

    def test_other_weights_are_wrong_and_other_dtypes_good_to_know(self, folder: Path) -> None:
        save_file({"x": torch.zeros(1)}, folder / "adapter.safetensors")
        edit(folder / "config.json", lambda config: config.update(dtype="bfloat16"))
        assert findings(folder) == ["adapter.safetensors: is not part of a model folder"]
        assert findings(folder, severity="note") == [
            "model.safetensors.index.json: has torch.float32, and `dtype` in config.json is torch.bfloat16",
        ]

    def test_pickled_weights_are_wrong(self, tmp_path: Path) -> None:
        tiny_model().save_pretrained(tmp_path)
        torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
        (tmp_path / "model.safetensors").unlink()
        pickled, missing = findings(tmp_path)
        assert pickled.startswith("pytorch_model.bin: is a pickle")
        assert missing.startswith("model.safetensors: is not there")


class TestTokenizerAndGeneration:
    def test_more_tokens_than_the_model_has_are_wrong(self, folder: Path) -> None:
        tokenizer = tiny_tokenizer()
        tokenizer.add_tokens(["w97", "w98"])
        tokenizer.save_pretrained(folder)
        assert the_only(folder) == "tokenizer_config.json: the tokenizer has 99 tokens, the model only 97"

    def test_a_tokenizer_that_does_not_load_is_wrong(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")
        assert the_only(folder).startswith("tokenizer_config.json: ")

    def test_a_tokenizers_own_code_is_wrong(self, folder: Path) -> None:
        edit(folder / "tokenizer_config.json", lambda c: c.update(auto_map={"AutoTokenizer": ["x.Y", None]}))
        assert "tokenizer_config.json: `auto_map` names code of its own" in findings(folder)[0]

    def test_settings_must_load_and_should_not_contradict_each_other(self, folder: Path) -> None:
        edit(folder / "generation_config.json", lambda c: c.update(do_sample=False, temperature=0.5))
        assert the_only(folder, severity="note").startswith("generation_config.json: GenerationConfig is invalid")
        edit(folder / "generation_config.json", lambda c: c.update(max_new_tokens="many"))
        assert the_only(folder).startswith("generation_config.json: ")
        (folder / "generation_config.json").unlink()
        assert the_only(folder, severity="note") == "generation_config.json: is not there"


def test_a_card_without_readable_metadata_is_wrong_and_without_a_licence_good_to_know(folder: Path) -> None:
    card = folder / "README.md"
    text = card.read_text()
    card.write_text(text.replace("license: mit\n", ""))
    assert the_only(folder, severity="note").startswith("README.md: names no licence")
    card.write_text(text.replace("license: mit\n", "license: [\n"))
    assert the_only(folder).startswith(
        "README.md: cannot be read: ValueError: The metadata of README.md cannot be read"
    )
