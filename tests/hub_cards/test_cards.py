import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from huggingface_hub import ModelCard

from diffllama.hub_cards import cards
from diffllama.hub_cards.cards import (
    TASKS,
    ModelFacts,
    handwritten_text,
    inherited_metadata,
    model_card,
    pin_revision,
    pinned_revision,
    read_card,
    updated_card,
)
from diffllama.modeling_diff import modeling_diffllama
from support.llama_checkpoints import SIZES, save_model
from support.markdown import ROOT, commands
from support.tiny_models import EVERY_FEATURE, VARIANTS, tiny_config, tiny_model, tiny_tokenizer, tokens


COMMIT, OTHER_COMMIT = "0123456789" * 4, "abcdef0123" * 4


def record(result: str = "diff_llama", **source: Any) -> dict[str, Any]:
    return {
        "tool": "diffllama 9.9",
        "source": {"format": "llama", "model_type": "llama", "name": "some-llama", "index_sha256": "abc", **source},
        "result": {"format": result, "variant": "v2"},
        "options": {"variant": None, "gqa_layout": None, "noise_heads": None, "dtype": "auto"},
        "verification": {
            "compared": "logits", "dtype": "float32", "sequences": 3, "length": 32, "max_difference": 0.00123,
            "mean_difference": 0.0, "largest_output": 7.5, "bit_equal": False, "same_top_token": 0.5, "tolerance": 0.1,
            "attn_implementation": "sdpa", "sdpa_difference": None,
        },
    }  # fmt: skip


TRAINING = {
    "arguments": {"learning_rate": 0.0003, "lr_scheduler_type": "cosine", "warmup_steps": 100, "optim": "adamw_torch",
                  "adam_beta1": 0.9, "adam_beta2": 0.95, "weight_decay": 0.1, "per_device_train_batch_size": 4,
                  "gradient_accumulation_steps": 8, "bf16": True, "fp16": False, "seed": 42},
    "processes": 2,
    "state": {"global_step": 12000, "epoch": 1.5, "num_input_tokens_seen": 786432000},
    "losses": {"first": 10.81234, "last": 2.5, "evaluation": 2.61},
}  # fmt: skip

EVALUATION = [
    {"task": "arc_easy", "metric": "acc", "value": 0.51234, "stderr": 0.0102, "shots": 0, "samples": 2376,
     "dataset": "allenai/ai2_arc", "dataset_config": "ARC-Easy", "split": "test", "harness": "0.4.13"},
    {"task": "arc_easy", "metric": "acc", "value": 0.6, "shots": 5, "samples": 2376, "dataset": "allenai/ai2_arc",
     "dataset_config": "ARC-Easy", "split": "test", "harness": "0.4.13"},
    {"task": "wikitext", "metric": "word_perplexity", "value": 21.5},
]  # fmt: skip


def facts(variant: str = "v2", fields: dict[str, Any] | None = None, **known: Any) -> ModelFacts:
    return ModelFacts(tiny_config(variant, **(fields or {})), 12345, "bfloat16", **known)


KINDS = {
    "converted": facts(conversion=record(name="org/llama", revision="0123")),
    "trained": facts("v1", training=TRAINING, evaluation=EVALUATION),
    "trained, of which nothing is known": facts("v1"),
    "fine-tuned": facts(training=TRAINING, chat=True, fields=EVERY_FEATURE),
    "fine-tuned in the folder of a conversion": facts(conversion=record(name="org/llama", revision="0"), training={}),
    "classifier": facts("v1", architecture="DifferentialLlamaForSequenceClassification"),
}
METADATA = {"fine-tuned": {"base_model": "org/base", "datasets": ["org/text"], "license": "mit"}}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


class TestText:
    @pytest.mark.parametrize("pins", [{}, {"repo": "me/model", "revision": COMMIT}], ids=["local", "on the Hub"])
    def test_card_has_no_holes_and_its_code_compiles(self, kind: str, pins: dict[str, str]) -> None:
        card = model_card(KINDS[kind], "model", METADATA.get(kind), **pins)
        text = re.sub(r"<!-- .*? -->\n", "", str(card))
        assert not re.search(r"\{\{|\{%|Undefined|None|[^\n]\n## | \n|—", text), text
        assert "\n\n\n" not in card.text
        (snippet,) = re.findall(r"```python\n(.*?)```", card.text, re.DOTALL)
        compile(snippet, "card", "exec")
        assert "trust_remote_code=True" in snippet
        assert ("messages" in snippet) == KINDS[kind].chat
        assert (f'"me/model", revision="{COMMIT}"' in snippet) == bool(pins)
        assert ("vllm serve" in card.text) == (kind != "classifier")
        assert "transformers" in text
        assert "`torch>=" in text

    def test_conversion_is_described(self) -> None:
        card = model_card(facts(conversion=record()), "model")
        for row in (
            "| source | some-llama |",
            "| SHA-256 of the source's index | `abc` |",
            "| tool | diffllama 9.9 |",
            "| dtype | auto |",
            "| verified | logits of 3 sequences of 32 tokens in float32, sdpa attention, with and without cache |",
            "| bit-equal | no |",
            "| max, mean difference | 0.00123, 0 (largest of logits: 7.5) |",
            "| same top token | 50.0 % |",
            "| parameters | 12,345 |",
            "| layers | 2 |",
            "| hidden width d_model | 64 |",
            "| differential heads h (softmax maps 2h) | 4 (8) |",
            "| head width d, of a query and a key | 16 |",
            "| width of a value | 16 |",
            "| key/value heads | 2 |",
            "| dtype of the weights | bfloat16 |",
        ):
            assert f"\n{row}\n" in card.text, row

    def test_training_is_described_as_far_as_it_is_known(self) -> None:
        card = model_card(facts("v1", training=TRAINING), "model")
        for row in (
            "| steps | 12,000 |",
            "| epochs | 1.5 |",
            "| sequences per step | 64 (4 per process × 8 accumulated × 2 processes) |",
            "| tokens seen | 786,432,000 |",
            "| learning rate | 0.0003, cosine, warm-up 100 |",
            "| optimizer | adamw_torch |",
            "| β1, β2 | 0.9, 0.95 |",
            "| weight decay | 0.1 |",
            "| mixed precision | bf16 |",
            "| seed | 42 |",
            "| training loss, first and last logged | 10.81, 2.5 |",
            "| evaluation loss | 2.61 |",
        ):
            assert f"\n{row}\n" in card.text, row
        assert "label smoothing" not in card.text
        assert "No evaluation is recorded" in card.text
        less = model_card(facts("v1", training={"state": {"global_step": 7}}), "model").text
        assert re.findall(r"## Training\n\n\| \| \|\n\| --- \| --- \|\n(.*?)\n\n", less, re.DOTALL) == ["| steps | 7 |"]
        assert "## Training" not in model_card(facts("v1"), "model").text

    def test_evaluation_is_a_table_and_a_model_index(self) -> None:
        card = model_card(facts("v1", evaluation=EVALUATION), "model")
        for row in (
            "| arc_easy | acc | 0.5123 ± 0.0102 | 0 | 2376 |",
            "| arc_easy | acc | 0.6000 | 5 | 2376 |",
            "| wikitext | word_perplexity | 21.5000 |  |  |",
        ):
            assert f"\n{row}\n" in card.text, row
        assert "lm-evaluation-harness 0.4.13;" in card.text
        (entry,) = yaml.safe_load(str(card).split("---\n")[1])["model-index"]
        assert entry["name"] == "model"
        arc, wikitext = entry["results"]
        dataset = {"name": "arc_easy", "type": "allenai/ai2_arc", "config": "ARC-Easy", "split": "test"}
        assert (arc["dataset"], wikitext["dataset"]) == (dataset, {"name": "wikitext", "type": "wikitext"})
        values = [(metric["name"], metric["value"]) for metric in arc["metrics"]]
        assert values == [("acc, 0-shot", 0.51234), ("acc, 5-shot", 0.6)]
        assert arc["source"]["name"] == "lm-evaluation-harness 0.4.13"

    @pytest.mark.parametrize("variant", VARIANTS)
    def test_architecture_is_described_in_the_terms_of_the_paper(self, variant: str) -> None:
        text = model_card(facts(variant, EVERY_FEATURE), "model").text
        width = {"v1": "| head width d, of a query and a key | 8 |\n| width 2d of a value | 16 |",
                 "v2": "| head width d, of a query and a key | 16 |\n| width of a value | 16 |"}  # fmt: skip
        assert width[variant] in text
        assert ("| λ_init | -0.01, 0.2 in layers 1 to 2 |" in text) == (variant == "v1")
        assert "| sliding window | 5 tokens in 1 of 2 layers |" in text
        assert "| differential heads h (softmax maps) | 4 (6) |\n| noise heads, each shared by 2 signal heads (" in text
        assert "arxiv.org/abs/2510.06949)) | 2 |\n" in text
        assert "| feed-forward width | 96 |\n| activation | PolyNorm (" in text
        assert "with grouped differential attention (DIFF" in text
        cited = ["ye2025differential", "lim2025grouped", "zhuo2025polynomial"]
        assert re.findall(r"^@\w+\{(\w+),$", text, re.MULTILINE) == cited
        text = model_card(facts(variant), "model").text
        assert ("| λ_init | 0.8 - 0.6·exp(-0.3·(l - 1)) in layer l |" in text) == (variant == "v1")
        assert not re.search("rouped|PolyNorm|without a gate|" + "|".join(cited[1:]), text)
        plain = model_card(facts("v1", {"lambda_init": 0.5, "head_norm": False, "gated_mlp": False}), "model").text
        assert "| λ_init | 0.5 |" in plain
        assert "| feed-forward width | 96, without a gate |" in plain
        assert "| headwise normalization | none |" in plain

    @pytest.mark.parametrize("variant", VARIANTS)
    @pytest.mark.parametrize("result", ["transformers", "unilm-v1", "unilm-v2", "motif"])
    def test_other_formats_do_not_load_with_our_code(self, result: str, variant: str) -> None:
        card = model_card(facts(variant, conversion=record(result, format="diff_llama")), "model")
        assert f"converted to {result}" in card.text
        assert "trust_remote_code" not in card.text
        assert "Licence" not in card.text
        languages, library = ({"bibtex", "python"}, "transformers") if result == "transformers" else ({"bibtex"}, None)
        assert set(re.findall(r"```(\w+)", card.text)) == languages
        assert card.data.library_name == library

    @pytest.mark.parametrize(
        ("variant", "fields", "source", "warm"),
        [("v2", {}, "llama", False), ("v1", {}, "llama", True), ("v2", EVERY_FEATURE, "llama", True),
         ("v1", EVERY_FEATURE, "motif", False)],
    )  # fmt: skip
    def test_warm_start_says_so(self, variant: str, fields: dict[str, Any], source: str, warm: bool) -> None:
        text = model_card(facts(variant, fields, conversion=record(format=source)), "model").text
        assert ("a warm start, not an exact conversion" in text) == warm
        assert ("stay identical until you train" in text) == (source == "llama" and not warm)

    def test_unverified_attention_alone_is_described(self) -> None:
        unverified = record(format="unilm-v1") | {"verification": {"skipped": "not asked for"}}
        card = model_card(facts("v1", conversion=unverified, part=True), "model")
        assert card.data.library_name is None  # transformers loads no part of a model
        text = card.text
        assert "attention.safetensors" in text
        assert "| verification | none: not asked for |" in text
        assert not re.search(r"pipeline\(|\| vocabulary \||bit-equal", text)

    def test_conversion_with_a_record_of_training_is_called_trained(self) -> None:
        kinds = ("converted", "fine-tuned in the folder of a conversion")
        texts = [model_card(KINDS[kind], "model").text for kind in kinds]
        assert ["not trained further" in text for text in texts] == [True, False]

    def test_names_are_escaped_in_tables(self) -> None:
        row = EVALUATION[2] | {"task": "a | b\n<!-- /diffllama:evaluation --><script>"}
        text, _ = updated_card("", replace(KINDS["trained"], evaluation=[row]), "model")
        assert "| a \\| b &lt;!-- /diffllama:evaluation --&gt;&lt;script&gt; | word_perplexity |" in text
        assert updated_card(text, KINDS["trained"], "model")[1] == []


@pytest.mark.parametrize("fields", [{}, EVERY_FEATURE], ids=["plain", "every feature"])
@pytest.mark.parametrize(("variant", "dtype"), [("v1", torch.bfloat16), ("v2", torch.float32)])
@torch.no_grad()
def test_cache_memory_is_that_of_its_tensors(variant: str, dtype: torch.dtype, fields: dict[str, Any]) -> None:
    model = tiny_model(variant, dtype, **fields)
    known = ModelFacts(model.config, 1, str(dtype).removeprefix("torch."))
    held = [layer.keys.nbytes + layer.values.nbytes for layer in model(tokens(1, 64)).past_key_values.layers]
    slides = [layer_type == "sliding_attention" for layer_type in model.config.layer_types]
    full = sum(nbytes for nbytes, sliding in zip(held, slides, strict=True) if not sliding)
    assert known.cache_bytes * 64 * slides.count(False) == full
    text = model_card(known, "model").text
    assert f"takes {full * 16 / 2**20:g} MiB per 1,024 tokens" in text
    assert ("sliding window (1) take" in text) == any(slides)
    if any(slides):
        window = sum(held) - full
        assert known.cache_bytes * 4 == window  # the window of five includes the current token


SERVE = next(line for line, _ in commands(ROOT / "docs/serve.md") if line.startswith("vllm serve "))
"""A command that tests/engines runs."""


class TestCommands:
    """The commands in cards run: the Python code here, the shell command by tests/engines."""

    @pytest.fixture(scope="class")
    def folders(self, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
        """A model of each class, and one that a conversion to transformers' `diffllama` writes."""
        work = tmp_path_factory.mktemp("cards")
        for name in TASKS:
            getattr(modeling_diffllama, name)(tiny_config("v2")).save_pretrained(work / name)
            tiny_tokenizer().save_pretrained(work / name)
        save_model(work / "transformers", transformers.DiffLlamaConfig(**SIZES))
        tiny_tokenizer().save_pretrained(work / "transformers")
        return {folder.name: folder for folder in work.iterdir()}

    CARDS = {
        **{name: (facts(architecture=name), name) for name in TASKS},
        "chat": (facts(chat=True), "DifferentialLlamaForCausalLM"),
        "to transformers": (facts("v1", conversion=record("transformers", format="diff_llama")), "transformers"),
    }

    @pytest.mark.parametrize("which", CARDS)
    def test_python(self, which: str, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
        known, folder = self.CARDS[which]
        text = model_card(known, "model").text
        (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        assert "PATH_OR_REPOSITORY" in code
        exec(code.replace("PATH_OR_REPOSITORY", str(folders[folder])), {})
        assert bool(capsys.readouterr().out.strip()) == ("print(" in code)

    @pytest.mark.parametrize("pins", [{}, {"repo": "me/model", "revision": COMMIT}], ids=["local", "on the Hub"])
    def test_shell(self, kind: str, pins: dict[str, str]) -> None:
        text = model_card(KINDS[kind], "model", METADATA.get(kind), **pins).text
        words = " ".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL)).replace("\\\n", "").split()
        if kind == "classifier":
            assert words == []
            return
        run, _, _, *options = SERVE.split()
        expected = [run, "serve", pins.get("repo", "PATH_OR_REPOSITORY"), *options[: options.index("--max-model-len")]]
        pin = pins.get("revision")
        assert words == [*expected, *(["--revision", pin, "--code-revision", pin] if pin else [])]


class TestPackage:
    def test_no_registry_is_named_while_the_package_is_not_public(self, kind: str) -> None:
        assert cards.PACKAGE_URL == ""
        text = str(model_card(KINDS[kind], "model", METADATA.get(kind)))
        assert "diffllama" in text
        assert not re.search(r"pypi|pip install|\]\(https://[^)]*diffllama", text)

    def test_public_package_is_linked(self, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cards, "PACKAGE_URL", "https://example.org/diffllama")
        assert "[diffllama](https://example.org/diffllama)" in model_card(KINDS[kind], "model", METADATA.get(kind)).text

    def test_no_text_names_a_registry(self) -> None:
        files = subprocess.run(["git", "ls-files", "*.py", "*.md"], cwd=ROOT, capture_output=True, check=True)
        for name in files.stdout.decode().split():
            if name != "tests/hub_cards/test_cards.py" and (ROOT / name).is_file():
                text = (ROOT / name).read_text(encoding="utf-8")
                assert not re.search(r"pypi\.org/project/diffllama|pip3? install ['\"]?diffllama", text), name


class TestMetadata:
    def test_library_task_and_tags_are_set(self, kind: str) -> None:
        data = model_card(KINDS[kind], "model", METADATA.get(kind)).data
        assert data.library_name == "transformers"
        assert data.pipeline_tag == ("text-classification" if kind == "classifier" else "text-generation")
        assert {"diffllama", "differential-attention", f"diff-{KINDS[kind].config.diff_variant}"} == set(data.tags)

    def test_pipeline_tags_are_tasks_of_transformers(self) -> None:
        from transformers.pipelines import SUPPORTED_TASKS

        tags = {task.pipeline_tag for task in TASKS.values()}
        assert tags - {"question-answering"} <= set(SUPPORTED_TASKS)  # transformers 5 dropped it, the Hub has it

    def test_base_model_has_a_relation(self) -> None:
        converted = model_card(KINDS["converted"], "model").data
        assert (converted.base_model, converted.base_model_relation) == ("org/llama", "finetune")
        tuned = model_card(KINDS["fine-tuned"], "model", METADATA["fine-tuned"])
        assert (tuned.data.base_model, tuned.data.base_model_relation) == ("org/base", "finetune")
        assert "fine-tuned from\norg/base on org/text." in tuned.text
        merged = {"base_model": ["a/b", "c/d"], "base_model_relation": "merge"}
        assert model_card(facts(), "model", merged).data.base_model_relation == "merge"
        assert "base_model" not in model_card(KINDS["trained"], "model").data.to_dict()

    def test_licence_and_language_of_a_source_are_inherited(self, tmp_path: Path) -> None:
        card = tmp_path / "README.md"
        assert inherited_metadata(card) == {}
        card.write_text("---\nlicense: other\nlicense_name: mine\nlanguage: [en, de]\ntags: [x]\n---\n# Hello\n")
        assert inherited_metadata(card) == {"license": "other", "license_name": "mine", "language": ["en", "de"]}
        card.write_text("---\nlicense: [\n---\n")
        assert inherited_metadata(card) == {}


class TestUpdate:
    def test_unedited_card_is_replaced(self, kind: str) -> None:
        first, _ = updated_card("", KINDS[kind], "model", METADATA.get(kind))
        again, edited = updated_card(first, KINDS[kind], "model")
        assert (again, edited) == (first, [])
        assert handwritten_text(first) == ""
        changed, _ = updated_card(first, replace(KINDS[kind], parameters=54321), "model")
        assert changed.replace("54,321", "12,345") != first  # the sections' hashes differ
        assert "| parameters | 54,321 |" in changed
        assert "12,345" not in changed

    def test_text_around_sections_stays(self) -> None:
        text, _ = updated_card("", facts(), "model")
        edited_text = text.replace("<!-- diffllama:usage", "## My notes\n\nIt likes cats.\n\n<!-- diffllama:usage")
        edited_text += "\nThe end.\n"
        assert handwritten_text(edited_text).split() == ["##", "My", "notes", "It", "likes", "cats.", "The", "end."]
        new, edited = updated_card(edited_text, replace(facts(), parameters=54321, evaluation=EVALUATION), "model")
        assert edited == []
        assert new.index("## Evaluation") < new.index("## My notes") < new.index("## Use") < new.index("The end.")
        assert "| parameters | 54,321 |" in new

    def test_edited_section_stays_and_is_named(self) -> None:
        text, _ = updated_card("", facts(), "model")
        edited_text = text.replace("| parameters | 12,345 |", "| parameters | about 12,000 |")
        new, edited = updated_card(edited_text, replace(facts(), parameters=54321), "model")
        assert edited == ["architecture"]
        assert "| parameters | about 12,000 |" in new
        assert "54,321" not in new
        assert updated_card(new, facts(), "model")[1] == ["architecture"]

    def test_removed_section_stays_removed(self) -> None:
        text, _ = updated_card("", facts(), "model")
        edited_text = re.sub(r"<!-- diffllama:citation .*?<!-- /diffllama:citation -->\n", "", text, flags=re.DOTALL)
        assert "bibtex" not in updated_card(edited_text, facts(), "model")[0]

    def test_handwritten_card_is_kept(self) -> None:
        handwritten = "---\nlicense: mit\nmy_field: 1\n---\n\n# My model\n\nHello.\n"
        new, _ = updated_card(handwritten, facts(), "model")
        assert new.index("# My model\n\nHello.") < new.index("## Use")
        assert ModelCard(new).data.to_dict().items() >= {"license": "mit", "my_field": 1}.items()
        assert updated_card(new, facts(), "model")[0] == new
        plain, _ = updated_card("Only text.\n", facts(), "model")
        assert "Only text." in ModelCard(plain).text

    def test_handwritten_metadata_and_comments_stay(self) -> None:
        text, _ = updated_card("", facts("v1", evaluation=EVALUATION), "model", {"license": "mit", "datasets": ["a/b"]})
        edited_text = text.replace("license: mit", "# do not change:\nlicense: mit\nthumbnail: cat.png")
        edited_text = edited_text.replace("- diffllama\n", "- diffllama\n- cats\n")
        better = [EVALUATION[0] | {"value": 0.9, "harness": "0.5"}]
        new, _ = updated_card(edited_text, facts("v2", evaluation=better), "model", {"license": "apache-2.0"})
        data = ModelCard(new).data
        assert (data.license, data.thumbnail, data.datasets) == ("apache-2.0", "cat.png", ["a/b"])
        assert data.tags == ["diffllama", "differential-attention", "diff-v2", "cats"]
        assert "# do not change:" in new.split("---\n")[1]
        assert sorted(result.metric_value for result in data.eval_results) == [0.6, 0.9, 21.5]

    def test_line_endings_of_windows_are_not_edits(self, tmp_path: Path) -> None:
        text, _ = updated_card("", facts(), "model")
        (tmp_path / "README.md").write_bytes(text.replace("\n", "\r\n").encode())
        old = read_card(tmp_path / "README.md")
        windows, edited = updated_card(old, replace(facts(), parameters=54321), "model")
        assert edited == []
        assert windows.count("## Use") == 1

    @pytest.mark.parametrize(
        ("front", "message"),
        [
            ("a: &a [x]\nb: [*a, *a]", r"README\.md cannot be read: it has YAML aliases"),
            ("model-index: [{name: x}]", "model_index"),
        ],
        ids=["aliases", "model-index"],
    )
    def test_unreadable_metadata_is_an_error(self, front: str, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            updated_card(f"---\n{front}\n---\n", facts(), "model")

    def test_comments_are_kept_once(self) -> None:
        old = "---\n# a comment\nlicense: mit\nextra_gated_prompt: |\n  # Terms\n\n  Be good.\n---\n# Mine\n"
        text, _ = updated_card(old, facts(), "model")
        again, _ = updated_card(text, facts(), "model")
        assert again == text
        assert text.count("# a comment") == text.count("# Terms") == 1


class TestPin:
    def test_code_and_server_load_the_pinned_commit(self) -> None:
        unpinned, _ = updated_card("", KINDS["converted"], "model")
        assert pinned_revision(unpinned) is None
        assert pin_revision(unpinned, COMMIT) == unpinned
        text, _ = updated_card("", KINDS["converted"], "model", None, "me/model", COMMIT)
        assert pinned_revision(text) == COMMIT
        assert f"--revision {COMMIT} --code-revision {COMMIT}" in text
        again = pin_revision(text, OTHER_COMMIT)
        assert pinned_revision(again) == OTHER_COMMIT
        assert COMMIT not in again
        assert updated_card(again, KINDS["converted"], "model", None, "me/model", OTHER_COMMIT) == (again, [])

    def test_pins_in_edited_sections_and_revisions_of_sources_stay(self) -> None:
        source = facts(conversion=record(name="org/llama", revision=COMMIT))
        text, _ = updated_card("", source, "model", None, "me/model", COMMIT)
        edited_text = text.replace("vllm serve", "sudo vllm serve")
        new = pin_revision(edited_text, OTHER_COMMIT)
        assert f"org/llama, revision {COMMIT} |" in new
        assert f"--revision {COMMIT}" in new
        assert f'revision="{OTHER_COMMIT}"' in new
