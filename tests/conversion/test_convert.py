import gc
import hashlib
import json
import os
import signal
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard, snapshot_download
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, normalizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaForCausalLM,
    MistralConfig,
    PreTrainedModel,
)

import diffllama
from diffllama import DiffLlamaForCausalLM, __version__
from diffllama.checkpoints import models as source_models
from diffllama.checkpoints import writing
from diffllama.checkpoints.errors import CheckpointError, VerificationError
from diffllama.checkpoints.options import DTYPES
from diffllama.checkpoints.reading import fingerprint, open_checkpoint
from diffllama.cli import main
from diffllama.conversion import engine
from diffllama.conversion import llama as llama_map
from diffllama.conversion.transformers_models import TransformersModel
from diffllama.conversion.verification import Verification
from diffllama.conversion.weight_map import Rule
from diffllama.hub_cards.code import split_version_line
from diffllama.modeling_diff import modeling_diffllama
from support.llama_checkpoints import (
    CHAT_TEMPLATE,
    REFUSALS,
    SIZES,
    Q,
    add_tokenizer,
    edit_config,
    edit_weights,
    llama,
    prepared,
    save_model,
    snapshot,
    verification,
)
from support.tiny_models import tokens


EMBEDDING, ONE = "model.embed_tokens.weight", "model.layers.{i}.self_attn."
CODE = tuple(sorted(file.name for file in Path(modeling_diffllama.__file__).parent.glob("[!_]*.py")))
convert = partial(diffllama.convert, source="llama")


@torch.no_grad()
def assert_same_logits(folder: Path, source: Path) -> None:
    """Check that a converted folder and its source compute equal bits."""
    models = DiffLlamaForCausalLM.from_pretrained(folder), LlamaForCausalLM.from_pretrained(source)
    assert torch.equal(*(model(input_ids=tokens(2, 24)).logits for model in models))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A Llama with a tokenizer and generation settings."""
    folder = llama(tmp_path / "src")
    add_tokenizer(folder)
    GenerationConfig(do_sample=True, temperature=0.6, top_p=0.9, eos_token_id=[2, 3]).save_pretrained(folder)
    return folder


def by_columns(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values in a tensor that is not contiguous."""
    return tensor.T.contiguous().T if tensor.ndim == 2 else tensor


@pytest.mark.parametrize("layout", [None, torch.Tensor.clone, by_columns], ids=["shards", "pickle", "not contiguous"])
def test_shards_and_pickles_become_shards_of_safetensors(
    layout: Callable[[torch.Tensor], torch.Tensor] | None, tmp_path: Path
) -> None:
    source = llama(tmp_path / "src", {"max_shard_size": "30KB"} if layout is None else None)
    if layout is None:
        assert len(list(source.glob("model-*.safetensors"))) > 2
    else:
        weights = load_file(source / "model.safetensors")
        (source / "model.safetensors").unlink()
        torch.save({name: layout(tensor) for name, tensor in weights.items()}, source / "pytorch_model.bin")
    (tmp_path / "dest").mkdir()  # an empty folder may be the destination
    folder = convert(source, tmp_path / "dest", max_shard_size="50KB", verify=True)
    shards = sorted(file.name for file in folder.iterdir() if file.suffix in (".bin", ".safetensors"))
    assert shards == [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    assert len(shards) > 3
    assert_same_logits(folder, source)


@pytest.mark.parametrize("equal", [True, False])
def test_output_layer_beside_tied_embeddings_is_kept_if_it_differs(equal: bool, tmp_path: Path) -> None:
    source = llama(tmp_path / "src", tie_word_embeddings=True)
    head = load_file(source / "model.safetensors")[EMBEDDING].clone() if equal else torch.randn(97, 64)
    edit_weights(source, lambda weights: weights.update({"lm_head.weight": head}))
    folder = convert(source, tmp_path / "dest", verify=True)
    assert DiffLlamaForCausalLM.from_pretrained(folder).config.tie_word_embeddings is equal
    assert ("lm_head.weight" in load_file(folder / "model.safetensors")) is not equal
    assert_same_logits(folder, source)


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_keep_their_dtype_unless_another_is_asked_for(stored: torch.dtype, dtype: str, tmp_path: Path) -> None:
    source = llama(tmp_path / "src")
    edit_config(source, dtype=str(stored).removeprefix("torch."))

    edit_weights(  # norms stay in float32
        source,
        lambda weights: weights.update({name: w.to(stored) for name, w in weights.items() if "norm" not in name}),
    )
    folder = convert(source, tmp_path / "dest", dtype=dtype, verify=False)
    weights = load_file(folder / "model.safetensors")
    for name, tensor in weights.items():
        kept = torch.float32 if "norm" in name else stored
        assert tensor.dtype == (kept if dtype == "auto" else getattr(torch, dtype)), name
    assert DiffLlamaForCausalLM.from_pretrained(folder).dtype == weights["lm_head.weight"].dtype


def test_folder_is_complete(source: Path, tmp_path: Path) -> None:
    before = snapshot(source)
    counts: list[tuple[int, int]] = []
    folder = convert(str(source), str(tmp_path / "new" / "dest"), progress=lambda *count: counts.append(count))
    total = (folder / "model.safetensors").stat().st_size
    assert counts == sorted(counts)
    assert counts[-1][0] == counts[-1][1] == pytest.approx(total, rel=0.01)
    assert folder == tmp_path / "new" / "dest"
    assert snapshot(source) == before
    copied = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"}
    written = {"LICENSE", "README.md", "config.json", "conversion.json", "model.safetensors"}
    assert {file.name for file in folder.iterdir()} == {*CODE, *copied, *written}
    for name in CODE:
        text, origin = split_version_line((folder / name).read_text())
        assert text == Path(modeling_diffllama.__file__).with_name(name).read_text()
        assert origin.startswith(__version__)
    for name in copied:
        assert (folder / name).read_bytes() == (source / name).read_bytes()


def test_record_and_card_tell_source_result_and_verification_and_no_path(source: Path, tmp_path: Path) -> None:
    folder = convert(source, tmp_path / "dest", dtype="bfloat16")
    record = json.loads((folder / "conversion.json").read_text())
    content = (source / "model.safetensors").read_bytes()
    header = content[8 : 8 + int.from_bytes(content[:8], "little")]
    assert record["tool"] == f"diffllama {__version__}"
    sha256, digest = hashlib.sha256(header).hexdigest(), fingerprint(open_checkpoint(folder))
    assert record["source"] == {"format": "llama", "model_type": "llama", "name": "src", "index_sha256": sha256}
    assert record["result"] == {"format": "diff_llama", "variant": "v2", "fingerprint": digest}
    assert record["options"] == {"variant": None, "gqa_layout": None, "noise_heads": None, "dtype": "bfloat16"}
    assert record["verification"].items() >= {
        "compared": "logits", "dtype": "bfloat16", "bit_equal": True, "max_difference": 0.0, "passed": True,
        "attn_implementation": "sdpa", "sdpa_difference": None,
    }.items()  # fmt: skip
    assert not [file for file in folder.iterdir() if str(tmp_path).encode() in file.read_bytes()]
    card = ModelCard.load(folder / "README.md")
    for text in ("tokens in bfloat16, sdpa attention", "| bit-equal | yes |", sha256, "messages = ["):
        assert text in card.text
    assert f"| parameters | {DiffLlamaForCausalLM.from_pretrained(folder).num_parameters():,} |" in card.text
    assert "{" + "{" not in card.text
    assert (card.data.library_name, card.data.pipeline_tag) == ("transformers", "text-generation")
    assert card.data.tags == ["diffllama", "differential-attention", "diff-v2"]


def test_model_that_does_not_fit_into_memory_is_not_verified_unless_asked_for(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1000))
    for verify in (None, False, True):
        folder = convert(source, tmp_path / f"dest-{verify}", verify=verify)
        if verify:
            assert verification(folder)["passed"] is True
        else:
            (reason,) = verification(folder).values()
            assert ("not asked for" if verify is False else "GB of memory") in reason
            assert reason in (folder / "README.md").read_text()


def test_one_model_at_a_time_is_in_memory_when_verifying(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, loaded, alive = TransformersModel.load, [], []

    def counting(*args: Any) -> PreTrainedModel:
        alive.append(sum(ref() is not None for ref in loaded))
        model = load(*args)
        loaded.append(weakref.ref(model))
        return model

    monkeypatch.setattr(TransformersModel, "load", counting)
    gc.disable()  # reference counting must suffice
    try:
        convert(source, tmp_path / "dest", verify=True)
    finally:
        gc.enable()
    assert alive == [0, 0]


def test_equal_bits_under_eager_attention_only_are_reported_as_that(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = engine.measure

    def other_kernels(*sides: Any) -> Verification:
        result = measure(*sides)
        return result if sides[-1] == "eager" else replace(result, bit_equal=False, max_difference=0.00125)

    monkeypatch.setattr(engine, "measure", other_kernels)
    folder = convert(source, tmp_path / "dest")
    expected = {"attn_implementation": "eager", "bit_equal": True, "sdpa_difference": 0.00125, "passed": True}
    assert verification(folder).items() >= expected.items()
    card = (folder / "README.md").read_text()
    assert "tokens in float32, eager attention" in card
    assert "| bit-equal | yes, under eager attention only: under sdpa the largest difference is 0.00125 |" in card


@pytest.mark.parametrize("implementation", ["owner/kernel", "flash_attention_2"])
def test_attention_function_of_the_source_is_neither_used_nor_carried_over(
    implementation: str, source: Path, tmp_path: Path
) -> None:
    edit_config(source, _attn_implementation=implementation)
    steps: list[tuple[str, dict[str, Any]]] = [
        ("ours", {"source": "llama"}),
        ("unilm", {"source": None, "target": "unilm-v2"}),
        ("again", {"source": "unilm-v2"}),
    ]
    for name, options in steps:
        edit_config(source, _attn_implementation=implementation)
        source = convert(source, tmp_path / name, **options)
        assert implementation not in (source / "config.json").read_text()
        assert verification(source)["passed"] is True


def test_result_that_computes_something_else_is_not_kept(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = {**llama_map.WEIGHT_MAPS["v2"], f"{ONE}o_proj.weight": Rule(f"{ONE}o_proj.weight")}  # not doubled
    monkeypatch.setitem(llama_map.WEIGHT_MAPS, "v2", wrong)
    before = snapshot(tmp_path)
    with pytest.raises(VerificationError, match=r"WRONG, promised: bit-equal.* max difference [1-9]"):
        convert(source, tmp_path / "dest")
    assert snapshot(tmp_path) == before
    assert convert(source, tmp_path / "dest", verify=False).is_dir()


@pytest.mark.parametrize(("name", "value", "verify"), [(Q, torch.nan, True), ("model.norm.weight", torch.inf, False)])
def test_nonfinite_weights_are_refused_by_tensor_and_file(
    name: str, value: float, verify: bool, source: Path, tmp_path: Path
) -> None:
    edit_weights(source, lambda weights: weights[name].view(-1)[-1:].fill_(value))
    before = snapshot(tmp_path)
    with pytest.raises(CheckpointError, match=rf"NaN or infinite values .*:\n  model\.safetensors: {name}$"):
        convert(source, tmp_path / "dest", verify=verify)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(("value", "fault", "verify"), [(40_000.0, "o_proj", True), (1e6, "q_proj", False)])
def test_cast_that_overflows_is_refused_by_tensor(
    value: float, fault: str, verify: bool, source: Path, tmp_path: Path
) -> None:
    name = f"{ONE.format(i=1)}{fault}.weight"
    edit_weights(source, lambda weights: weights[name].view(-1)[-1:].fill_(value))
    before = snapshot(tmp_path)
    with pytest.raises(CheckpointError, match=f"{name} becomes infinite: the largest float16 is .* such as bfloat16"):
        convert(source, tmp_path / "dest", dtype="float16", verify=verify)
    assert snapshot(tmp_path) == before
    assert convert(source, tmp_path / "dest", dtype="bfloat16", verify=False).is_dir()


def test_tokenizer_that_encodes_otherwise_in_the_result_is_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copy(src: Path, folder: Path) -> None:
        add_tokenizer(folder)
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer | {"pre_tokenizer": None}))

    monkeypatch.setattr(source_models, "copy_auxiliary_files", copy)
    with pytest.raises(VerificationError, match=r"tokenizer of .* encodes text differently"):
        convert(source, tmp_path / "dest")
    assert not (tmp_path / "dest").exists()


def test_repository_of_the_hub_is_found_in_the_cache_by_name_and_revision(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "hub" / "models--some--llama"
    (repository / "snapshots").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    source.rename(repository / "snapshots" / commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.snapshot_download", partial(snapshot_download, cache_dir=tmp_path / "hub"))
    for revision in (None, commit):
        folder = convert("some/llama", tmp_path / f"dest-{revision}", revision=revision)
        record = json.loads((folder / "conversion.json").read_text())["source"]
        assert (record["name"], record["revision"]) == ("some/llama", commit)
        assert ModelCard.load(folder / "README.md").data.base_model == "some/llama"
    with pytest.raises(FileNotFoundError, match="repository some/other cannot be downloaded from the Hub"):
        convert("some/other", tmp_path / "dest")


def test_contradicting_generation_settings_are_no_obstacle(source: Path, tmp_path: Path) -> None:
    settings = {"do_sample": False, "temperature": 0.9, "top_p": 0.6}  # as in meta-llama/Llama-2-7b-hf
    (source / "generation_config.json").write_text(json.dumps(settings))
    written = json.loads((convert(source, tmp_path / "dest") / "generation_config.json").read_text())
    assert written == settings


@pytest.mark.parametrize("tokenizer", ["with chat template", "without chat template", "none"])
def test_card_shows_chat_only_where_the_tokenizer_has_a_template(tokenizer: str, tmp_path: Path) -> None:
    source = llama(tmp_path / "src")
    if tokenizer != "none":
        add_tokenizer(source, CHAT_TEMPLATE if tokenizer == "with chat template" else None)
    folder = convert(source, tmp_path / "dest", verify=False)
    assert ("messages = [" in (folder / "README.md").read_text()) is (tokenizer == "with chat template")
    assert bool(list(folder.glob("token*"))) is (tokenizer != "none")


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_converted_is_refused_and_nothing_changes(name: str, tmp_path: Path) -> None:
    refusal = REFUSALS[name]
    source, dest = prepared(refusal, tmp_path)
    for older in (False, True):
        if older and refusal.dest == "dest":
            dest.mkdir(exist_ok=True)
            (dest / "config.json").write_text("an older model")
        before = snapshot(tmp_path)
        with pytest.raises(refusal.error, match=f"(?s){refusal.message}"):
            convert(source, dest, overwrite=older and refusal.even_to_overwrite)
        assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, "`dtype` must be one of auto, float32, bfloat16, float16, got 'int8'"),
        ({"max_shard_size": "5 apples"}, "`max_shard_size` must be a number of bytes or a text like '5GB', got"),
        ({"revision": "main"}, "`revision` is only for a repository of the Hub, .* got 'main'"),
        ({"source": "gpt2"}, "Unknown source 'gpt2'. Known: llama, transformers, unilm-v1, unilm-v2"),
        ({"source": None}, r"Give `source` \(one of llama, .*\) or `target` \(one of transformers, unilm-v1, unilm-v2"),
        ({"target": "transformers"}, "Give `source` .* or `target`"),
        ({"source": None, "target": "llama"}, "cannot be converted to 'llama'.* is V1 only"),
        ({"variant": "v3"}, "`variant` must be one of v1, v2 and needs source='llama', got 'v3'"),
        ({"source": "unilm-v1", "variant": "v1"}, "`variant` .* needs source='llama', got 'v1' with 'unilm-v1'"),
        ({"gqa_layout": "repeated"}, "`gqa_layout` .* needs source='unilm-v1', got 'repeated' with 'llama'"),
        ({"source": "motif", "noise_heads": 8}, "`noise_heads` needs source='llama', got 8 with 'motif'"),
        ({"source": None, "target": "unilm-v1", "gqa_layout": "grouped"}, "`gqa_layout` .* got 'grouped' with 'unilm"),
    ],
    ids=str,
)
def test_unknown_option_is_refused_with_the_known_ones(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        convert(tmp_path, tmp_path / "dest", **options)
    assert not (tmp_path / "dest").exists()


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_gguf_file_without_its_packages_says_what_to_install(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_models, f"is_{package}_available", lambda: False)
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(ImportError, match=r"pip install '\.\[gguf\]'"):
        convert(tmp_path / "x.gguf", tmp_path / "dest")


@pytest.mark.parametrize(("inside", "around"), [("src", "src/new"), ("folder/src", "folder")])
def test_overlap_of_source_and_destination_behind_a_link_is_refused(inside: str, around: str, tmp_path: Path) -> None:
    llama(tmp_path / "real" / inside)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    before = snapshot(tmp_path)
    with pytest.raises(FileExistsError, match="overlap"):
        convert(tmp_path / "link" / inside, tmp_path / "real" / around, overwrite=True)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    ("step", "error"),
    [
        ("checkpoints.writing.save_file", KeyboardInterrupt()),
        ("conversion.transformers_models.write_code", OSError("disk full")),
        ("conversion.engine.measure", KeyboardInterrupt()),
        ("conversion.engine.updated_card", SystemExit(1)),
    ],
    ids=repr,
)
def test_failure_in_the_middle_changes_nothing(
    step: str, error: BaseException, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    (tmp_path / "dest").mkdir()
    (tmp_path / "dest" / "config.json").write_text("an older model")
    before = snapshot(tmp_path)
    monkeypatch.setattr(f"diffllama.{step}", fail)
    with pytest.raises(type(error)):
        convert(source, tmp_path / "dest", overwrite=True)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("refused", ["other model", "quantized", "partly rotated", "occupied dest", "dest in src"])
def test_no_weights_are_read_before_it_is_refused(
    refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, dest = prepared(REFUSALS[refused], tmp_path)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda **_: pytest.fail("weights were read"))
    monkeypatch.setattr(source_models, "open_checkpoint", lambda _: pytest.fail("weights were opened"))
    with pytest.raises(REFUSALS[refused].error, match=REFUSALS[refused].message):
        convert(source, dest)


def sentencepiece_like(folder: Path) -> None:
    """Return a tokenizer.json like Mistral's and Phi-3's, which `LlamaTokenizer` would load as another tokenizer."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(97, 123))]
    backend = Tokenizer(
        models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.add_special_tokens(["<unk>", "<s>", "</s>", "<|user|>"])
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "LlamaTokenizer", "legacy": True, "bos_token": "<s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def test_tokenizer_whose_class_depends_on_the_model_type_stays_what_it_was(tmp_path: Path) -> None:
    source = save_model(tmp_path / "src", MistralConfig(**SIZES | {"vocab_size": 320, "sliding_window": None}))
    sentencepiece_like(source)
    folder = convert(source, tmp_path / "dest", verify=False)
    old, new = AutoTokenizer.from_pretrained(source), AutoTokenizer.from_pretrained(folder)
    for text in ("<s><|user|> hello", "  leading", "a\n\nb 7"):
        assert new(text).input_ids == old(text).input_ids
    assert new.backend_tokenizer.to_str() == old.backend_tokenizer.to_str()


def test_pipes_and_loops_of_links_beside_a_source_are_passed_over(source: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.model", "README.md", "LICENSE.txt", "1.bin"):
        os.mkfifo(source / name)
    for name in ("NOTICE", "vocab.txt", "additional_chat_templates"):
        (source / name).symlink_to(name)
    folder = convert(source, tmp_path / "dest")
    assert not {"tokenizer.model", "LICENSE.txt", "1.bin", "NOTICE", "vocab.txt"} & {f.name for f in folder.iterdir()}


def test_peft_is_not_followed_to_another_model(source: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    other = llama(tmp_path / "other")
    edit_config(other, auto_map={"AutoConfig": "evil.Config"})
    (other / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    adapter = {"base_model_name_or_path": str(other), "peft_type": "LORA"}
    (source / "adapter_config.json").write_text(json.dumps(adapter))
    with pytest.raises(ValueError, match=r"adapter_config\.json.*merge_and_unload"):
        convert(source, tmp_path / "dest")
    assert not (tmp_path / "ran").exists()


def test_code_of_a_tokenizer_does_not_come_along(source: Path, tmp_path: Path) -> None:
    (source / "tokenizer_mine.py").write_text("raise SystemExit('code of the source ran')")
    file = source / "tokenizer_config.json"
    settings = json.loads(file.read_text()) | {"auto_map": {"AutoTokenizer": ["tokenizer_mine.Mine", None]}}
    file.write_text(json.dumps(settings))
    folder = convert(source, tmp_path / "dest")
    assert not (folder / "tokenizer_mine.py").exists()
    assert "auto_map" not in json.loads((folder / "tokenizer_config.json").read_text())
    assert AutoTokenizer.from_pretrained(folder)("w13").input_ids == [13]


def test_what_transformers_cannot_load_is_not_compared_with_noise(source: Path, tmp_path: Path) -> None:
    weights = load_file(source / "model.safetensors")
    torch.save({"model": weights}, source / "pytorch_model.bin")
    (source / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"(?s)does not find these tensors.*--no-verify.*lm_head\.weight"):
        convert(source, tmp_path / "dest")
    converted = DiffLlamaForCausalLM.from_pretrained(convert(source, tmp_path / "dest", verify=False))
    assert torch.equal(converted.lm_head.weight, weights["lm_head.weight"])


# Faults of the machine


def stop_while_writing(folder: Path, number: signal.Signals) -> int:
    """Run `diffllama convert` in a copy of this process, signal it while it writes weights, and return its status."""
    reading, writing_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        status: Any = "did not exit"
        try:

            def save(*args: Any, save_file: Callable[..., None] = writing.save_file, **options: Any) -> None:
                save_file(*args, **options)
                os.write(writing_end, b"!")
                time.sleep(60)

            writing.save_file = save
            os.chdir(folder)
            signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background jobs
            sys.argv = ["diffllama", "convert", "src", "dest", "--from", "llama"]
            main()
        except SystemExit as error:
            status = error.code
        finally:
            os._exit(status if isinstance(status, int) else 1)
    assert os.read(reading, 1) == b"!"
    os.kill(pid, number)
    for end in (reading, writing_end):
        os.close(end)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_stopped_process_leaves_no_result_and_the_next_one_works(
    number: signal.Signals, status: int, source: Path, tmp_path: Path
) -> None:
    before = snapshot(tmp_path)
    assert stop_while_writing(tmp_path, number) == status
    if number == signal.SIGKILL:  # leftovers are hidden, and removed by the next run
        after = snapshot(tmp_path)
        assert {name for name in after.keys() - before.keys() if not name.startswith(".dest.")} == set()
        assert {name: after[name] for name in before} == before
    else:
        assert snapshot(tmp_path) == before
    assert_same_logits(convert(source, tmp_path / "dest"), source)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dest", "src"]


def test_disk_that_is_too_small_is_reported_before_anything_is_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "disk" / "model").mkdir(parents=True)
    (tmp_path / "link").symlink_to("disk/model")
    places: list[Path] = []
    monkeypatch.setattr("shutil.disk_usage", lambda place: places.append(place) or SimpleNamespace(free=262_000))
    before = snapshot(tmp_path)
    for dest in ("link", "new/folder/dest"):
        with pytest.raises(OSError, match=r"has 0\.000262 GB left and the result needs 0\.00138 GB"):
            convert(source, tmp_path / dest)
    assert places == [tmp_path / "disk", tmp_path]  # the disk of the destination
    assert snapshot(tmp_path) == before


def test_place_that_may_not_be_written_to_is_named() -> None:
    with tempfile.TemporaryDirectory() as root:  # other users cannot enter pytest's folders
        source, place = llama(Path(root) / "src"), Path(root) / "place"
        place.mkdir()
        for path in (root, place, *source.iterdir()):
            os.chmod(path, 0o555)
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)  # root may write anywhere
        try:
            with pytest.raises(PermissionError, match="place"):
                convert(source, place / "dest")
        finally:
            os.seteuid(user)
            for folder in (root, place):
                os.chmod(folder, 0o755)
        assert list(place.iterdir()) == []
