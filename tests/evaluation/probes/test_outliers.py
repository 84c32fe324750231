"""Largest magnitudes and medians of tensors, of planted models, and of whole maps."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from diffllama.evaluation import attention
from diffllama.evaluation.datasets.data import Source
from diffllama.evaluation.probes.outliers import RANKS, Magnitudes, Outliers, magnitudes
from diffllama.evaluation.runs import dumps
from support.planted_attention import planted_model
from support.probe_runs import run_probe
from support.tiny_loaded_models import KINDS, tiny_loaded_model
from support.tiny_models import tiny_model, tokens


RESOLUTION = 2**-8


def test_order_statistics_of_a_thousand_numbers() -> None:
    """Of ±1 to ±1000 in any order, the k-th largest is 1001 - k and the lower median is 500."""
    values = (torch.randperm(1000) + 1) * (-1.0) ** torch.arange(1000)
    found = Magnitudes()
    found.add(values.reshape(10, 4, 25))
    numbers = found.values()
    assert numbers.pop("median") == pytest.approx(500, rel=RESOLUTION)
    assert numbers == {"top-1": 1000, "top-2": 999, "top-3": 998, "top-10": 991, "top-100": 901}
    assert found.top.tolist() == list(range(1000, 900, -1))
    assert found.counts.sum() == 1000


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e4, 1e30])
@pytest.mark.parametrize("count", [1, 2, 999, 1000])
def test_median_is_right_to_its_resolution(count: int, scale: float) -> None:
    values = torch.randn(count, generator=torch.Generator().manual_seed(count)) * scale
    found = Magnitudes()
    found.add(values)
    assert found.median == pytest.approx(values.abs().median().item(), rel=RESOLUTION)  # torch's is the lower too


def test_magnitudes_add_up_and_survive_json() -> None:
    values = torch.randn(5000, generator=torch.Generator().manual_seed(0)).exp()
    whole, parts, total = Magnitudes(), Magnitudes(), Magnitudes()
    whole.add(values)
    for part in values.split(37):  # fewer values than ranks
        parts.add(part)
    for part in values.split(1500):
        one = Magnitudes()
        one.add(part)
        read = Magnitudes(**json.loads(json.dumps(one.detail())))
        total.merge(read.top, read.counts)
    assert whole.detail() == parts.detail() == total.detail()
    assert whole.top.tolist() == values.sort(descending=True).values[:100].tolist()


def test_infinite_magnitude_survives_json() -> None:
    infinite = Magnitudes()
    infinite.add(torch.tensor([1.0, float("inf")]))
    assert Magnitudes(**json.loads(dumps(infinite.detail()))).top.tolist() == [float("inf"), 1.0]


@pytest.mark.parametrize("kind", KINDS)
def test_planted_key_and_state_have_known_magnitudes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of 50 tokens are markers, the 46th and the 49th. 5 + 2 queries see them, in 2 layers and all maps.

    Their score is 12 in signal maps and -3 in noise maps; all other scores are 0.
    """
    monkeypatch.setattr(attention, "BLOCK_BYTES", 7000)
    loaded = planted_model(kind, markers="7", score=12, second=-3)
    embeddings = loaded.model.get_input_embeddings().weight.data
    embeddings[loaded.encode("!"), :2] = torch.tensor([900.0, -900])
    found = magnitudes(loaded.model, loaded.tensor(loaded.encode("!" + "a" * 44 + "7aa7a")))
    maps, high = {"llama": (8, 8), "v1": (12, 8), "v2": (16, 8)}[kind]  # maps of both layers, signal maps among them
    logits, states = found["attention logits"], found["hidden states"]
    assert logits.counts.sum() == maps * 50 * 51 // 2
    expected = [12.0] * 7 * high + [3.0] * 7 * (maps - high) + [0.0] * 100
    assert logits.top.tolist() == pytest.approx(expected[:100], rel=1e-4, abs=1e-5)
    assert logits.median < 1e-38
    assert states.counts.sum() == 2 * 50 * 64
    assert states.top.tolist() == [900.0] * 4 + [1.0] * 96
    assert states.median < 1e-38


def true_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Compute the magnitudes of all visible scores from the weights, without rotation."""
    states = model(ids, output_hidden_states=True).hidden_states
    n, found = ids.shape[1], []
    for layer, x in zip(model.model.layers, states[:-1], strict=True):
        own = layer.self_attn
        width = own.map_dim if model.config.model_type == "diff_llama" else own.head_dim
        queries, keys = (
            projection(layer.input_layernorm(x))[0].unflatten(-1, (-1, width)).transpose(0, 1)
            for projection in (own.q_proj, own.k_proj)
        )  # [maps, n, width], [keys, n, width]
        pairs = 2 if model.config.model_type == "diff_llama" and own.diff_variant == "v1" else 1
        group = len(queries) * pairs // len(keys)  # queries per key/value head, which has two keys in V1
        for index, query in enumerate(queries):
            noise = pairs == 2 and index % (own.signals_per_noise + 1) == own.signals_per_noise
            scores = query @ keys[index // group * pairs + noise].T / width**0.5
            found.append(scores[torch.ones(n, n).tril().bool()].abs())
    return torch.cat(found)


@pytest.mark.parametrize("kind", KINDS)
def test_magnitudes_equal_those_of_all_scores_and_states(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "BLOCK_BYTES", 5000)
    model, ids = tiny_loaded_model(kind).model, tokens(1, 40)
    model.model.rotary_emb.inv_freq.zero_()
    found = magnitudes(model, ids)
    assert not any(module._forward_hooks for module in model.modules())
    model.model.norm = torch.nn.Identity()  # the last hidden states are then the last layer's output
    with torch.no_grad():
        states = torch.stack(model(ids, output_hidden_states=True).hidden_states[1:])
        expected = {"attention logits": true_logits(model, ids), "hidden states": states.flatten().abs()}
    for what, values in expected.items():
        assert found[what].counts.sum() == len(values)
        torch.testing.assert_close(found[what].top, values.sort(descending=True).values[:100], rtol=1e-4, atol=1e-4)
        assert found[what].median == pytest.approx(values.median().item(), rel=RESOLUTION + 1e-4)


def test_pairs_outside_a_window_are_not_counted() -> None:
    window = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
    found = magnitudes(tiny_model("v1", **window), tokens(1, 20))
    assert found["attention logits"].counts.sum() == 8 * ((1 + 2 + 3 + 17 * 4) + 20 * 21 // 2)


def test_at_most_one_block_is_observed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block has ten of 300 queries, with 300 keys and 8 maps."""
    monkeypatch.setattr(attention, "BLOCK_BYTES", 10 * 8 * 300 * 4)
    sizes: list[int] = []
    add = Magnitudes.add
    monkeypatch.setattr(Magnitudes, "add", lambda self, values: (sizes.append(values.numel()), add(self, values))[1])
    magnitudes(tiny_model("v2"), tokens(1, 300))
    assert len(sizes) == 2 * 30 + 2
    assert max(sizes) <= 10 * 8 * 300


def texts_of(folder: Path, **texts: str) -> Path:
    folder.mkdir()
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text)
    return folder


def test_pieces_are_of_every_text_in_turn(tmp_path: Path) -> None:
    loaded = tiny_loaded_model("llama")
    data = texts_of(tmp_path / "texts", a="abcdefgh" * 8, b="ijklmnop" * 3, c="q" * 15)

    def pieces(tokens: int) -> dict[str, str]:
        samples = Outliers(tokens=tokens, length=16).samples(Source(data, built_in=False), loaded)
        return {name: loaded.tokenizer.decode(ids) for name, ids in samples.items()}

    whole = {"a.txt 0": "abcdefgh" * 2, "b.txt 0": "ijklmnop" * 2, "a.txt 16": "abcdefgh" * 2}
    assert pieces(1) == pieces(16) == dict(list(whole.items())[:1])
    assert pieces(17) == dict(list(whole.items())[:2])
    assert pieces(64) == whole  # a fourth piece would be of text c


def test_magnitudes_of_two_models_are_compared(tmp_path: Path) -> None:
    models = planted_model("llama", markers=" ", score=12), planted_model("v1", markers=" ", score=12, second=-3)
    report = run_probe(Outliers(tokens=96, length=32), *models, output=tmp_path)
    assert [row["condition"]["activation"] for row in report.rows] == ["attention logits", "hidden states"]
    for row in report.rows:
        assert row["samples"] == 3
        for metrics in row["models"]:
            assert list(metrics) == [*(f"top-{rank}" for rank in RANKS), "median"]
            assert all(set(number) == {"mean"} for number in metrics.values())
    numbers = report.rows[0]
    assert numbers["models"][0]["top-1"]["mean"] == pytest.approx(12, rel=1e-4)
    assert numbers["difference"]["top-1"]["mean"] == pytest.approx(0, abs=1e-3)


def test_all_pieces_count_together(tmp_path: Path) -> None:
    """Of three pieces of 16 letters, the 7th of one and the 1st of another count: 10 and 16 queries in 4 · 2 maps."""
    data = texts_of(tmp_path / "texts", a="abcdef7hijklmnop" + "7bcdefghijklmnop" + "abcdefghijklmnop")
    report = run_probe(
        Outliers(tokens=48, length=16), planted_model("llama", markers="7", score=5), output=tmp_path / "out", data=data
    )
    numbers = report.rows[0]["models"][0]
    assert numbers["top-100"]["mean"] == pytest.approx(5, rel=1e-4)
    counts: dict[int, int] = {}
    for outcome in report.outcomes[0].values():
        detail = outcome.detail["attention logits"]
        for bits, count in zip(detail["bits"], detail["counts"], strict=True):
            counts[bits] = counts.get(bits, 0) + count
    assert sum(count for bits, count in counts.items() if bits > 16000) == 26 * 8
    assert sum(counts.values()) == 3 * 8 * 16 * 17 // 2


def test_length_beyond_all_texts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"No text in .* has 100,000 tokens. Lower --length"):
        run_probe(Outliers(length=100_000), tiny_loaded_model("llama"), output=tmp_path)


def test_failing_model_keeps_no_hook_and_is_restored() -> None:
    model = tiny_loaded_model("v1").model
    with pytest.raises(IndexError):
        magnitudes(model, torch.full((1, 20), 10_000))
    assert not any(module._forward_hooks for module in model.modules())
    assert model.config._attn_implementation == "sdpa"
