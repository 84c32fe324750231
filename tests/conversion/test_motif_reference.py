"""The reference, compared with loops over heads and tokens with explicit indices."""

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from diffllama.conversion import motif_reference


WIDTH = 6  # of a query or key
HIDDEN = 20  # not heads × width, so that wrong shapes do not fit by accident
TOKENS = 7
VOCABULARY = 13
FREQUENCIES = torch.tensor([1.0, 0.31, 0.07], dtype=torch.float64)


class Case(NamedTuple):
    """A layout of heads: for each signal its query, the query of its noise, and the key/value head that both read."""

    heads: int
    key_value_heads: int
    signals: list[tuple[int, int, int]]


CASES = {
    "pairs": Case(6, 3, [(0, 1, 0), (2, 3, 1), (4, 5, 2)]),
    "pairs-grouped-queries": Case(8, 2, [(0, 1, 0), (2, 3, 0), (4, 5, 1), (6, 7, 1)]),
    "groups-of-3": Case(6, 2, [(0, 2, 0), (1, 2, 0), (3, 5, 1), (4, 5, 1)]),
    "groups-of-3-grouped-queries": Case(6, 1, [(0, 2, 0), (1, 2, 0), (3, 5, 0), (4, 5, 0)]),
    "groups-of-5": Case(5, 1, [(0, 4, 0), (1, 4, 0), (2, 4, 0), (3, 4, 0)]),
}
ROTATIONS = {"halves": [(0, 3), (1, 4), (2, 5)], "neighbours": [(0, 1), (2, 3), (4, 5)]}
"""Rotation -> the pairs of a vector's six numbers that turn together."""
each_case = pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES.items()])


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """Check equality up to the order of float64 sums of fewer than a hundred terms of order one."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def attention_weights(case: Case) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Tensor]:
    """Return projections, λ vectors and the head norm's weight."""
    keys, outputs = case.key_value_heads * 2 * WIDTH, len(case.signals) * 2 * WIDTH
    shapes = ((case.heads * WIDTH, HIDDEN), (keys, HIDDEN), (keys, HIDDEN), (HIDDEN, outputs))
    lambdas = tuple(randn(WIDTH) / 2 for _ in range(4))
    return tuple(randn(*shape) / 3 for shape in shapes), lambdas, 1 + randn(2 * WIDTH) / 3


def naive_norm(x: Tensor, eps: float) -> Tensor:
    """Divide each row of [n, size] by its root mean square."""
    return torch.stack([row / math.sqrt(row.dot(row).item() / len(row) + eps) for row in x])


def naive_read(x: Tensor, weight: Tensor, head: int, width: int) -> Tensor:
    """Project each token by one head: [n, hidden] -> [n, width]."""
    return x @ weight[head * width : (head + 1) * width].T


def naive_turned(x: Tensor, pairs: list[tuple[int, int]], scaling: float) -> Tensor:
    """Rotate pairs, as complex numbers, by position × frequency: [n, d] -> [n, d / 2]."""
    a, b = (torch.stack([x[:, pair[part]] for pair in pairs], dim=1) for part in (0, 1))
    return (a + 1j * b) * torch.exp(1j * torch.arange(len(x))[:, None] * FREQUENCIES) * scaling


def naive_map(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Multiply one softmax map by values, token by token: complex [n, d / 2] twice, [n, 2d] -> [n, 2d]."""
    rows = []
    for token in range(len(query)):
        scores = ((query[token] * key[: token + 1].conj()).real.sum(-1) / math.sqrt(WIDTH)).exp()
        rows.append(scores @ value[: token + 1] / scores.sum())
    return torch.stack(rows)


def naive_attention(
    x: Tensor, case: Case, weights: tuple, pairs: list[tuple[int, int]], lambda_init: float, eps: float, scaling: float
) -> Tensor:
    """Sum the outputs of the signal heads of one row: [n, hidden] -> [n, hidden]."""
    (q_proj, k_proj, v_proj, o_proj), (q1, k1, q2, k2), subln = weights
    scale = math.exp(q1.dot(k1).item()) - math.exp(q2.dot(k2).item()) + lambda_init
    total = torch.zeros_like(x)
    for head, (signal, noise, read) in enumerate(case.signals):
        value = naive_read(x, v_proj, read, 2 * WIDTH)
        first, second = (
            naive_map(
                naive_turned(naive_read(x, q_proj, query, WIDTH), pairs, scaling),
                naive_turned(naive_read(x, k_proj, key, WIDTH), pairs, scaling),
                value,
            )
            for query, key in ((signal, 2 * read), (noise, 2 * read + 1))
        )
        normed = naive_norm(first - scale * second, eps) * subln * (1 - lambda_init)
        total += normed @ o_proj[:, head * 2 * WIDTH : (head + 1) * 2 * WIDTH].T
    return total


@pytest.mark.parametrize("rotation", ROTATIONS)
@each_case
def test_attention_equals_the_loops(case: Case, rotation: str) -> None:
    torch.manual_seed(0)
    x, weights = randn(2, TOKENS, HIDDEN), attention_weights(case)
    actual = motif_reference.attention(
        x, *weights, lambda_init=-0.3, eps=0.1, rotation=getattr(motif_reference, f"rotate_{rotation}"),
        inverse_frequencies=FREQUENCIES, attention_scaling=1.3,
    )  # fmt: skip
    assert_same(
        actual, torch.stack([naive_attention(row, case, weights, ROTATIONS[rotation], -0.3, 0.1, 1.3) for row in x])
    )


def naive_poly_norm(x: Tensor, cubic: float, quadratic: float, linear: float, bias: float) -> Tensor:
    """Compute PolyNorm of each row of [n, size], number by number."""
    rows = []
    for row in x.tolist():
        sizes = [math.sqrt(sum(z ** (2 * power) for z in row) / len(row) + 1e-6) for power in (3, 2, 1)]
        rows.append([cubic * z**3 / sizes[0] + quadratic * z**2 / sizes[1] + linear * z / sizes[2] + bias for z in row])
    return torch.tensor(rows, dtype=torch.float64)


def test_poly_norm_equals_the_published_case_and_the_loops() -> None:
    weight, bias, x, expected = (
        torch.tensor(numbers, dtype=torch.float64)
        for numbers in ([0.2, 0.3, 0.5], [0.125], [-1.5, -0.5, 0.0], [-0.5263191243, -0.1043004407, 0.125])
    )
    torch.testing.assert_close(motif_reference.poly_norm(x, weight, bias), expected, rtol=0, atol=1e-10)
    x = 0.01 * randn(4, 9)  # so small that ε matters
    assert_same(motif_reference.poly_norm(x, weight, bias), naive_poly_norm(x, 0.2, 0.3, 0.5, 0.125))


def model_weights(case: Case, names: dict[str, str], layer: str, gated: bool, tied: bool) -> dict[str, Tensor]:
    """Return random weights of two layers, under each model's names."""
    torch.manual_seed(0)
    weights = {names["embedding"]: randn(VOCABULARY, HIDDEN), names["norm"]: 1 + randn(HIDDEN) / 3}
    for i in range(2):
        projections, lambdas, subln = attention_weights(case)
        tensors = dict(zip("qkvo", projections, strict=True)) | {"subln": subln}
        tensors |= dict(zip(("q1", "k1", "q2", "k2"), lambdas, strict=True))
        tensors |= {"attention norm": 1 + randn(HIDDEN) / 3, "mlp norm": 1 + randn(HIDDEN) / 3}
        tensors |= {"up": randn(24, HIDDEN) / 3, "down": randn(HIDDEN, 24) / 3, "poly": randn(3), "bias": randn(1)}
        tensors |= {"gate": randn(24, HIDDEN) / 3} if gated else {}
        weights |= {layer.format(i) + names[name]: tensor for name, tensor in tensors.items()}
    return weights if tied else weights | {"lm_head.weight": randn(VOCABULARY, HIDDEN)}


MOTIF = {
    "embedding": "model.embed_tokens.weight", "norm": "model.norm.weight",
    **{name: f"self_attn.{name}_proj.weight" for name in "qkvo"},
    **{name: f"self_attn.lambda_{name}" for name in ("q1", "k1", "q2", "k2")}, "subln": "self_attn.subln.weight",
    "attention norm": "input_layernorm.weight", "mlp norm": "post_attention_layernorm.weight",
    **{name: f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
    "poly": "mlp.act_fn.weight", "bias": "mlp.act_fn.bias",
}  # fmt: skip
PERDIX = {
    "embedding": "tok_emb.weight", "norm": "final_norm.weight", **{name: f"attn.w{name}.weight" for name in "qkvo"},
    **{name: f"attn.lambda_{name}" for name in ("q1", "k1", "q2", "k2")}, "subln": "attn.subln.weight",
    "attention norm": "attn_norm.weight", "mlp norm": "ffn_norm.weight", "up": "ffn.up.weight",
    "down": "ffn.down.weight", "poly": "ffn.act.weight", "bias": "ffn.act.bias",
}  # fmt: skip


def naive_logits(input_ids: Tensor, weights: dict[str, Tensor], case: Case, perdix: bool) -> Tensor:
    """Compute one row, [n] -> [n, vocabulary], with ε = 0.1 in all norms except Motif's head norm, which has 0.2."""
    names, layer = (PERDIX, "blocks.{}.") if perdix else (MOTIF, "model.layers.{}.")
    x = torch.stack([weights[names["embedding"]][token] for token in input_ids.tolist()])
    for i in range(2):
        own = {name: weights[layer.format(i) + key] for name, key in names.items() if layer.format(i) + key in weights}
        attention = tuple(own[n] for n in "qkvo"), tuple(own[n] for n in ("q1", "k1", "q2", "k2")), own["subln"]
        pairs, lambda_init = ROTATIONS["halves"], (0.8 - 0.6 * math.exp(0.3), 0.2)[i]
        if perdix:
            pairs, lambda_init = ROTATIONS["neighbours"], (0.2, 0.8 - 0.6 * math.exp(-0.3))[i]
        read = naive_norm(x, 0.1) * own["attention norm"]
        x = x + naive_attention(read, case, attention, pairs, lambda_init, 0.1 if perdix else 0.2, 1.0)
        y = naive_norm(x, 0.1) * own["mlp norm"]
        a, b, c = own["poly"].tolist()
        cubic, quadratic, linear = (c, b, a) if perdix else (a, b, c)
        inner = naive_poly_norm(y @ own["up" if perdix else "gate"].T, cubic, quadratic, linear, own["bias"].item())
        x = x + (inner if perdix else inner * (y @ own["up"].T)) @ own["down"].T
    head = weights.get("lm_head.weight", weights[names["embedding"]])
    return naive_norm(x, 0.1) * weights[names["norm"]] @ head.T


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", ["motif-pairs", "motif-groups-of-3", "perdix-pairs"])
def test_logits_equal_the_loops_in_the_dtype_of_the_weights(name: str, tied: bool) -> None:
    model, _, layout = name.partition("-")
    case, perdix = CASES[layout], model == "perdix"
    names, layer = (PERDIX, "blocks.{}.") if perdix else (MOTIF, "model.layers.{}.")
    weights = model_weights(case, names, layer, gated=not perdix, tied=tied)
    input_ids = torch.randint(VOCABULARY, (2, TOKENS))

    def logits(weights: dict[str, Tensor]) -> Tensor:
        if perdix:
            return motif_reference.perdix_logits(input_ids, weights, norm_eps=0.1, inverse_frequencies=FREQUENCIES)
        return motif_reference.motif_logits(
            input_ids, weights, rms_norm_eps=0.1, attn_rms_norm_eps=0.2, inverse_frequencies=FREQUENCIES
        )

    assert_same(logits(weights), torch.stack([naive_logits(row, weights, case, perdix) for row in input_ids]))
    single = logits({name: tensor.float() for name, tensor in weights.items()})
    assert single.dtype == torch.float32
