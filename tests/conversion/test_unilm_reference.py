"""The reference, compared with loops over heads and tokens with explicit indices."""

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from diffllama.conversion import unilm_reference
from diffllama.conversion.unilm_reference import under


WIDTH = 6  # of a query or key
EMBED = 20  # not heads × width, so that wrong shapes do not fit by accident
TOKENS = 7
VOCABULARY = 13
FREQUENCIES = torch.tensor([1.0, 0.31, 0.07], dtype=torch.float64)


class Case(NamedTuple):
    """A layout of heads: for each head the keys that its two maps read, and its values."""

    variant: str
    gqa_layout: str
    key_value_heads: int
    keys: list[tuple[int, int]]
    values: list[tuple[int, int]]


OWN = [(0, 0), (1, 1), (2, 2), (3, 3)]
HALF = [(0, 0), (0, 0), (1, 1), (1, 1)]
ONE = [(0, 0)] * 4
PAIRS = [(0, 1), (2, 3), (4, 5), (6, 7)]
CASES = {
    "v1-grouped-mha": Case("v1", "grouped", 4, PAIRS, OWN),
    "v1-grouped-groups-of-2": Case("v1", "grouped", 2, [(0, 1), (0, 1), (2, 3), (2, 3)], HALF),
    "v1-grouped-groups-of-4": Case("v1", "grouped", 1, [(0, 1)] * 4, ONE),
    "v1-repeated-mha": Case("v1", "repeated", 4, PAIRS, OWN),
    "v1-repeated-groups-of-2": Case("v1", "repeated", 2, OWN, HALF),
    "v1-repeated-groups-of-3": Case("v1", "repeated", 1, [(0, 0), (0, 1), (1, 1)], ONE[:3]),
    "v1-repeated-groups-of-4": Case("v1", "repeated", 1, HALF, ONE),
    "v2-mha": Case("v2", "grouped", 8, PAIRS, PAIRS),
    "v2-groups-of-2": Case("v2", "grouped", 4, OWN, OWN),
    "v2-groups-of-3": Case("v2", "grouped", 2, [(0, 0), (0, 1), (1, 1)], [(0, 0), (0, 1), (1, 1)]),
    "v2-groups-of-4": Case("v2", "grouped", 2, HALF, HALF),
}
each_case = pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES.items()])


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """Check equality up to the order of float64 sums of fewer than a hundred terms of order one."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def hidden() -> Tensor:
    torch.manual_seed(1)
    return randn(2, TOKENS, EMBED)


def attention_weights(case: Case) -> dict[str, Tensor]:
    h, pairs = len(case.keys), case.key_value_heads
    keys, value_width = (2 * pairs, 2 * WIDTH) if case.variant == "v1" else (pairs, WIDTH)
    weights = {
        "q_proj.weight": randn(2 * h * WIDTH, EMBED) / 3,
        "k_proj.weight": randn(keys * WIDTH, EMBED) / 3,
        "v_proj.weight": randn(pairs * value_width, EMBED) / 3,
    }
    if case.variant == "v2":
        return weights | {"o_proj.weight": randn(EMBED, h * WIDTH) / 3, "lambda_proj.weight": randn(h, EMBED) / 3}
    weights |= {"out_proj.weight": randn(EMBED, h * value_width) / 3, "subln.weight": randn(value_width)}
    return weights | {f"lambda_{part}": randn(WIDTH) / 3 for part in ("q1", "k1", "q2", "k2")}


def model_weights(case: Case, layers: int, tied: bool) -> dict[str, Tensor]:
    """Return the names and shapes of a whole model."""
    torch.manual_seed(0)
    weights = {"model.embed_tokens.weight": randn(VOCABULARY, EMBED), "model.norm.weight": randn(EMBED)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        weights |= {f"{prefix}self_attn.{name}": tensor for name, tensor in attention_weights(case).items()}
        weights |= {f"{prefix}{name}_layernorm.weight": randn(EMBED) for name in ("input", "post_attention")}
        weights |= {f"{prefix}mlp.{name}_proj.weight": randn(24, EMBED) / 3 for name in ("gate", "up")}
        weights[prefix + "mlp.down_proj.weight"] = randn(EMBED, 24) / 3
    return weights if tied else weights | {"lm_head.weight": randn(VOCABULARY, EMBED)}


def logits(input_ids: Tensor, weights: dict[str, Tensor], case: Case) -> Tensor:
    """Compute the reference's logits, with ε so large that an omission is visible."""
    return unilm_reference.logits(
        input_ids, weights, rms_norm_eps=0.1, inverse_frequencies=FREQUENCIES, attention_scaling=1.3,
        gqa_layout=case.gqa_layout,
    )  # fmt: skip


def naive_norm(x: Tensor, eps: float) -> Tensor:
    """Divide each row of [n, size] by its root mean square."""
    return torch.stack([row / math.sqrt(row.dot(row).item() / len(row) + eps) for row in x])


def naive_read(x: Tensor, weight: Tensor, head: int, width: int) -> Tensor:
    """Project each token by one head: [n, embed] -> [n, width]."""
    return x @ weight[head * width : (head + 1) * width].T


def naive_turned(x: Tensor, scaling: float) -> Tensor:
    """Rotate pairs, as complex numbers, by position × frequency: [n, w] -> [n, w / 2]."""
    angles = torch.arange(len(x))[:, None] * FREQUENCIES
    return (x[:, 0::2] + 1j * x[:, 1::2]) * torch.exp(1j * angles) * scaling


def naive_map(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Multiply one softmax map by values, token by token: complex [n, w / 2] twice, [n, v] -> [n, v]."""
    rows = []
    for token in range(len(query)):
        scores = (query[token] * key[: token + 1].conj()).real.sum(-1) / math.sqrt(WIDTH)
        rows.append(scores.exp() @ value[: token + 1] / scores.exp().sum())
    return torch.stack(rows)


def naive_attention(x: Tensor, weights: dict[str, Tensor], case: Case, layer: int = 0, scaling: float = 1.0) -> Tensor:
    """Sum the outputs of the heads of one row: [n, embed] -> [n, embed]."""
    v1 = case.variant == "v1"
    width = 2 * WIDTH if v1 else WIDTH  # of a value
    out_proj = weights["out_proj.weight" if v1 else "o_proj.weight"]
    total = torch.zeros_like(x)
    for head in range(len(case.keys)):
        first, second = (
            naive_map(
                naive_turned(naive_read(x, weights["q_proj.weight"], 2 * head + m, WIDTH), scaling),
                naive_turned(naive_read(x, weights["k_proj.weight"], case.keys[head][m], WIDTH), scaling),
                naive_read(x, weights["v_proj.weight"], case.values[head][m], width),
            )
            for m in (0, 1)
        )
        if v1:
            start = 0.8 - 0.6 * math.exp(-0.3 * layer)
            plus, minus = (math.exp(weights[f"lambda_q{m}"].dot(weights[f"lambda_k{m}"]).item()) for m in (1, 2))
            difference = naive_norm(first - (plus - minus + start) * second, 1e-5)
            difference = difference * weights["subln.weight"] * (1 - start)
        else:
            exponent = naive_read(x, weights["lambda_proj.weight"], head, 1)
            difference = first - second / (1 + torch.exp(-exponent))
        total += difference @ out_proj[:, head * width : (head + 1) * width].T
    return total


def naive_logits(input_ids: Tensor, weights: dict[str, Tensor], case: Case, layers: int) -> Tensor:
    """Compute one row: [n] -> [n, vocabulary]."""
    x = torch.stack([weights["model.embed_tokens.weight"][token] for token in input_ids.tolist()])
    for layer in range(layers):
        own = under(weights, f"model.layers.{layer}.")
        read = naive_norm(x, 0.1) * own["input_layernorm.weight"]
        x = x + naive_attention(read, under(own, "self_attn."), case, layer, scaling=1.3)
        y = naive_norm(x, 0.1) * own["post_attention_layernorm.weight"]
        gate = y @ own["mlp.gate_proj.weight"].T
        x = x + (gate / (1 + torch.exp(-gate)) * (y @ own["mlp.up_proj.weight"].T)) @ own["mlp.down_proj.weight"].T
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return naive_norm(x, 0.1) * weights["model.norm.weight"] @ head.T


@each_case
@pytest.mark.parametrize(("layer", "scaling"), [(0, 1.0), (3, 1.3)])
def test_attention_equals_the_loops(case: Case, layer: int, scaling: float) -> None:
    x, weights = hidden(), attention_weights(case)
    actual = unilm_reference.attention(
        x, weights, layer=layer, inverse_frequencies=FREQUENCIES, attention_scaling=scaling,
        gqa_layout=case.gqa_layout,
    )  # fmt: skip
    assert_same(actual, torch.stack([naive_attention(row, weights, case, layer, scaling) for row in x]))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", ["v1-grouped-groups-of-2", "v1-repeated-groups-of-2", "v2-groups-of-4"])
def test_logits_equal_the_loops_in_the_dtype_of_the_weights(name: str, tied: bool) -> None:
    weights = model_weights(CASES[name], layers=3, tied=tied)
    input_ids = torch.randint(VOCABULARY, (2, TOKENS))
    expected = torch.stack([naive_logits(row, weights, CASES[name], layers=3) for row in input_ids])
    assert_same(logits(input_ids, weights, CASES[name]), expected)
    single = logits(input_ids, {name: tensor.float() for name, tensor in weights.items()}, CASES[name])
    assert single.dtype == torch.float32
    roundings = 100 * torch.finfo(torch.float32).eps  # one per term of the longest sums
    assert (single - expected).abs().max() <= roundings * expected.abs().max()
