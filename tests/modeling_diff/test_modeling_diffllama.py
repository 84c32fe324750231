import copy
import math
from itertools import cycle, product
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache, StaticCache
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from diffllama import (
    DiffLlamaForCausalLM,
    DiffLlamaForQuestionAnswering,
    DiffLlamaForSequenceClassification,
    DiffLlamaForTokenClassification,
)
from diffllama.modeling_diff.modeling_diffllama import DiffLlamaAttention, eager_attention_forward
from support import reference
from support.attention_masks import KINDS, Batch, batch
from support.tiny_models import EVERY_FEATURE, VARIANTS, tiny_config, tiny_model, tokens


HEADS = 4
MASK = torch.ones(1, 1, 5, 5, dtype=torch.bool)
not_compiled = torch.compiler.set_stance("force_eager")
"""flex_attention is compiled anew for each mask, which takes up to half a minute: one test does so."""


def relative_error(value: torch.Tensor, truth: torch.Tensor) -> float:
    """Compute max|value - reference| / max|reference|, NaN if a value is not finite."""
    return ((value.double() - truth.double()).abs().max() / truth.double().abs().max()).item()


def attention_layer(variant: str, key_value_heads: int, implementation: str, **fields: object) -> DiffLlamaAttention:
    """Return layer 1 of a tiny model, with random norms too."""
    fields = {"num_attention_heads": 2 * HEADS, "num_key_value_heads": key_value_heads} | fields
    config = tiny_config(variant, **fields)
    config._attn_implementation = implementation
    torch.manual_seed(1)
    layer = DiffLlamaAttention(config, layer_idx=1)
    for name, parameter in layer.named_parameters():
        nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.3 if "lambda_" in name else 0.1)
    return layer


def run_layer(layer: DiffLlamaAttention, x: torch.Tensor, given: Batch, **options: Any) -> tuple[Any, Any]:
    """Compute the layer's output and maps for hidden states [b, n, hidden], masked as in the model."""
    width = layer.config.rotary_dim
    frequencies = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = (given.position_ids.double()[..., None] * frequencies).repeat(1, 1, 2)
    create_mask = create_causal_mask if layer.sliding_window is None else create_sliding_window_causal_mask
    mask = create_mask(
        config=layer.config,
        inputs_embeds=x,
        attention_mask=given.attention_mask,
        past_key_values=None,
        position_ids=given.position_ids,
    )
    return layer(x, (angles.cos().to(x.dtype), angles.sin().to(x.dtype)), mask, **options)


def true_layer(weights: dict[str, torch.Tensor], x: torch.Tensor, given: Batch, config: object) -> torch.Tensor:
    """Compute the reference for the same hidden states."""
    rows = [
        reference.attention(
            x[i],
            weights,
            given.position_ids[i],
            given.visible[i],
            variant=config.diff_variant,
            layer=1,
            heads=HEADS,
            key_value_heads=config.num_key_value_heads,
            noise_heads=config.num_noise_heads,
            head_norm_eps=config.head_norm_eps,
            lambda_start=config.lambda_init[1] if isinstance(config.lambda_init, list) else None,
            theta=10000.0 if config.no_rope_layers is None or config.no_rope_layers[1] else None,
            window=config.sliding_window if config.layer_types[1] == "sliding_attention" else None,
            norm_eps=config.rms_norm_eps,
        )[0]
        for i in range(len(x))
    ]
    return torch.stack(rows)


def loss_direction(weights: dict[str, torch.Tensor], x: torch.Tensor, given: Batch, config: object) -> torch.Tensor:
    """Return random weights of the outputs, for a loss whose gradient of λ does not cancel.

    V1's λ is one number, and its gradient a sum over all tokens and heads. Under purely random weights the terms
    cancel, and float32's rounding of them counts a hundredfold against the small rest. So the weights have the signs
    with which a larger λ moves the outputs.
    """
    with torch.no_grad():
        direction = torch.randn(x.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
        if config.diff_variant == "v1":
            more = weights | {"lambda_q1": weights["lambda_q1"] + weights["lambda_k1"]}
            shift = true_layer(more, x, given, config) - true_layer(weights, x, given, config)
            direction = direction.abs() * shift.sign()
    return direction[given.real]


def outputs_and_gradients(
    output: torch.Tensor, direction: torch.Tensor, x: torch.Tensor, weights: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the outputs, and the gradients of their sum weighted by `direction`."""
    gradients = torch.autograd.grad((output * direction.to(output.dtype)).sum(), [x, *weights.values()])
    return {"output": output.detach(), "hidden_states": gradients[0], **dict(zip(weights, gradients[1:], strict=True))}


GROUPS = {4: "MHA", 2: "groups of 2", 1: "groups of 4"}
WINDOW = {"sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"]}
FEATURES = {
    "normed queries and keys": {"use_qk_norm": True, "rms_norm_eps": 1e-3},
    "no rotation": {"no_rope_layers": [1, 0], "attention_bias": False},  # without rotation a key bias has no gradient
    "normed, not rotated": {"use_qk_norm": True, "no_rope_layers": [1, 0]},
    "bias of the output": {"attention_out_bias": True},
    "no bias of the output": {"attention_out_bias": False},
    "two signals for each noise": {"num_attention_heads": 6, "num_noise_heads": 2},
    "other λ_init and ε of head norms": {"lambda_init": [0.5, -0.4], "head_norm_eps": 0.1},
}
LAYERS = [
    *(
        pytest.param(kind, key_value_heads, n, {}, id=f"{kind}-{GROUPS[key_value_heads]}-{n}")
        for kind, key_value_heads, n in (
            ("causal", 4, 7), ("causal", 1, 13), ("left", 2, 13), ("left", 1, 7), ("right", 1, 13), ("packed", 4, 13),
            ("holes", 2, 13),
        )
    ),
    *(pytest.param(kind, 2, 13, WINDOW, id=f"{kind}-window of 4") for kind in (*KINDS, "holes")),
    *(pytest.param("left", 2, 13, fields, id=name) for name, fields in FEATURES.items()),
    pytest.param("packed", 1, 13, {"num_attention_heads": 5, "num_noise_heads": 1}, id="four signals for each noise"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "key_value_heads", "n", "fields"), LAYERS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("implementation", "dtype", "tolerance"),
    [
        ("eager", torch.float64, 1e-10),
        ("eager", torch.float32, 2e-6),
        ("sdpa", torch.float32, 2e-6),
        ("diff_attention", torch.float64, 1e-10),
        ("diff_attention", torch.float32, 2e-6),
    ],
    ids=["eager-float64", "eager-float32", "sdpa-float32", "diff_attention-float64", "diff_attention-float32"],
)
def test_attention_and_every_gradient_equal_the_papers_formulas(
    implementation: str,
    dtype: torch.dtype,
    tolerance: float,
    variant: str,
    kind: str,
    key_value_heads: int,
    n: int,
    fields: dict[str, Any],
) -> None:
    # A key bias shifts all scores of a query almost equally, so its gradient nearly cancels: float64 only
    fields = {"head_dim": 12, "attention_bias": dtype == torch.float64, **fields}
    layer = attention_layer(variant, key_value_heads, implementation, **fields).to(dtype)
    given, config, weights = batch(kind, n), layer.config, dict(layer.named_parameters())
    x = torch.randn(2, n, 64, generator=torch.Generator().manual_seed(n)).to(dtype).requires_grad_()
    true_x = x.detach().double().requires_grad_()
    true_weights = {name: p.detach().double().requires_grad_() for name, p in weights.items()}

    direction = loss_direction(true_weights, true_x, given, config)
    ours = outputs_and_gradients(run_layer(layer, x, given)[0][given.real], direction, x, weights)
    true_output = true_layer(true_weights, true_x, given, config)[given.real]
    truth = outputs_and_gradients(true_output, direction, true_x, true_weights)
    errors = {name: relative_error(ours[name], truth[name]) for name in truth}
    assert {name: error for name, error in errors.items() if not error <= tolerance} == {}


@pytest.mark.slow
@torch.no_grad()
def test_flex_attention_equals_the_papers_formulas() -> None:
    # torch has no backward of flex_attention on the CPU; its gradients are compared on a GPU (test_gpu.py)
    layer, given = attention_layer("v2", 2, "flex_attention", **WINDOW).eval(), batch("left", 13)
    x = torch.randn(2, 13, 64, generator=torch.Generator().manual_seed(3))
    weights = {name: p.double() for name, p in layer.named_parameters()}
    truth = true_layer(weights, x.double(), given, layer.config)[given.real]
    assert relative_error(run_layer(layer, x, given)[0][given.real], truth) <= 2e-6


def true_logits(model: DiffLlamaForCausalLM, input_ids: torch.Tensor, given: Batch, dtype: torch.dtype) -> torch.Tensor:
    """Compute the reference's logits with the model's weights, in `dtype`."""
    weights = {k: p.detach().to(dtype) for k, p in model.state_dict().items()}
    rows = [
        reference.language_model(input_ids[i], weights, given.position_ids[i], given.visible[i], model.config)
        for i in range(len(input_ids))
    ]
    return torch.stack(rows)


optional_features = pytest.mark.parametrize("fields", [{}, EVERY_FEATURE], ids=["plain", "every feature"])


@pytest.mark.parametrize(
    ("variant", "kind", "implementation", "fields"),
    [
        *product(VARIANTS, KINDS, ["eager", "sdpa", "diff_attention"], [EVERY_FEATURE]),
        *product(VARIANTS, ["causal"], ["eager", "sdpa", "diff_attention"], [{}]),
        pytest.param("v1", "packed", "flex_attention", {}, marks=pytest.mark.slow),
    ],
)
@torch.no_grad()
@not_compiled
def test_whole_model_equals_the_papers_formulas(
    variant: str, kind: str, implementation: str, fields: dict[str, Any]
) -> None:
    model = tiny_model(variant, attn_implementation=implementation, **fields)
    given, input_ids = batch(kind, 13), tokens(2, 13)
    logits = model(
        input_ids, attention_mask=given.attention_mask, position_ids=given.position_ids, use_cache=False
    ).logits
    truth = true_logits(model, input_ids, given, torch.float64)
    assert relative_error(logits[given.real], truth[given.real]) <= 1e-5


@pytest.mark.parametrize("variant", VARIANTS)
def test_bfloat16_loses_at_most_twice_what_plain_pytorch_loses(variant: str) -> None:
    # An ordinary initialization, a wide model and several texts: the error of λ's gradient is one number per layer and
    # text, and the ratio of two such errors is random: another CPU sums in another order
    model = tiny_model(variant, torch.bfloat16, hidden_size=128, head_dim=32, initializer_range=0.05)
    given = batch("causal", 65)

    def logits_and_gradients(input_ids: torch.Tensor, dtype: torch.dtype, ours: bool) -> dict[str, torch.Tensor]:
        weights = {k: p.detach().to(dtype).requires_grad_() for k, p in model.named_parameters()}
        if ours:
            logits = torch.func.functional_call(model, weights, (input_ids,), {"use_cache": False}).logits
        else:
            rows = [
                reference.language_model(input_ids[i], weights, given.position_ids[i], given.visible[i], model.config)
                for i in range(2)
            ]
            logits = torch.stack(rows)
        loss = nn.functional.cross_entropy(logits[:, :-1].double().flatten(0, 1), input_ids[:, 1:].flatten())
        gradients = torch.autograd.grad(loss, list(weights.values()))
        return {"logits": logits.detach(), **dict(zip(weights, gradients, strict=True))}

    texts = [tokens(2, 65, seed=seed) for seed in range(12)]
    truth, plain = (
        [logits_and_gradients(text, dtype, False) for text in texts] for dtype in (torch.float64, torch.bfloat16)
    )

    def error(values: list[dict[str, torch.Tensor]], name: str) -> float:
        pairs = zip(values, truth, strict=True)
        return torch.stack([value[name].double() - true[name] for value, true in pairs]).norm().item()

    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        ours = [logits_and_gradients(text, torch.bfloat16, True) for text in texts]
        errors = {name: (error(ours, name), error(plain, name)) for name in truth[0]}
        assert {name: pair for name, pair in errors.items() if not pair[0] <= 2 * pair[1]} == {}, implementation


@pytest.mark.parametrize("variant", VARIANTS)
def test_output_attentions_are_the_signed_differential_maps(variant: str) -> None:
    model, input_ids = tiny_model(variant), tokens(1, 9)
    with torch.no_grad():
        outputs = model.model(input_ids, output_attentions=True, output_hidden_states=True)
        pairs = model.model(input_ids, output_attentions=True, output_softmax_maps=True).attentions
    given = batch("causal", 9)
    for i, layer in enumerate(model.model.layers):
        x = layer.input_layernorm(outputs.hidden_states[i])[0].detach().double()
        _, differential, softmaxes = reference.attention(
            x,
            {k: p.detach().double() for k, p in layer.self_attn.named_parameters()},
            given.position_ids[0],
            given.visible[0],
            variant=variant,
            layer=i,
            heads=4,
            key_value_heads=2,
        )
        assert outputs.attentions[i].shape == (1, 4, 9, 9)
        assert pairs[i].shape == (1, 8, 9, 9)
        assert relative_error(outputs.attentions[i][0], torch.stack(differential)) <= 1e-5
        assert relative_error(pairs[i][0], torch.stack(softmaxes)) <= 1e-5
    assert min(maps.min() for maps in outputs.attentions) < 0


def test_maps_are_returned_only_when_asked_for() -> None:
    model = tiny_model()
    assert model(tokens(1, 5)).attentions is None
    model.config.output_attentions = True
    assert model(tokens(1, 5)).attentions[0].shape == (1, 4, 5, 5)


@pytest.mark.parametrize("output_softmax_maps", [False, True], ids=["differential", "softmax"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_has_the_truths_gradient_by_the_returned_maps(variant: str, output_softmax_maps: bool) -> None:
    layer, given = attention_layer(variant, 2, "eager").double(), batch("left", 9)
    x, weights = torch.randn(2, 9, 64, dtype=torch.float64), dict(layer.named_parameters())
    direction = torch.randn(2, 9, 64, dtype=torch.float64) * given.real[..., None]
    output, maps = run_layer(layer, x, given, output_attentions=True, output_softmax_maps=output_softmax_maps)
    maps.retain_grad()
    (output * direction).sum().backward()
    for i in range(2):
        true_output, _, softmax_maps = reference.attention(
            x[i], weights, given.position_ids[i], given.visible[i],
            variant=variant, layer=1, heads=HEADS, key_value_heads=2,
        )  # fmt: skip
        gradients = torch.stack(torch.autograd.grad((true_output * direction[i]).sum(), softmax_maps))
        truth = gradients if output_softmax_maps else gradients[::2]  # the gradient of A1 - λ·A2 equals that of A1
        seen = given.visible[i]
        assert maps.grad.shape[1:] == truth.shape
        assert relative_error(maps.grad[i][:, seen], truth[:, seen]) <= 1e-10


def test_eager_returns_the_maps_that_it_used_after_dropout_of_each() -> None:
    layer = attention_layer("v2", 4, "eager").train()
    query, key, value = (torch.randn(2, heads, 50, 16) for heads in (2 * HEADS, HEADS, HEADS))
    results = []
    for softmax_maps in (False, True):
        torch.manual_seed(0)
        results.append(
            eager_attention_forward(
                layer, query, key, value, None, 0.25, 0.3, torch.tensor([0.5]),
                output_attentions=True, output_softmax_maps=softmax_maps,
            )
        )  # fmt: skip
    (output, maps), (_, softmax_maps) = results
    assert torch.equal(output, (maps @ value).transpose(1, 2))
    assert torch.equal(maps, softmax_maps[:, ::2] - 0.5 * softmax_maps[:, 1::2])
    first, second = softmax_maps[:, ::2] == 0, softmax_maps[:, 1::2] == 0
    for dropped, share in ((first, 0.3), (second, 0.3), (first & second, 0.09)):
        assert dropped.double().mean().item() == pytest.approx(share, abs=0.02)


every_implementation = pytest.mark.parametrize("implementation", ["eager", "sdpa", "diff_attention"])


@every_implementation
@pytest.mark.parametrize(("variant", "kind"), zip(cycle(VARIANTS), [*KINDS, "holes"], strict=False))
@torch.no_grad()
def test_where_attention_is_not_causal_tokens_see_those_behind_them(
    variant: str, kind: str, implementation: str
) -> None:
    model, given, input_ids = tiny_model(variant, attn_implementation=implementation), batch(kind, 13), tokens(2, 13)
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    both = Batch(given.attention_mask, given.position_ids, given.visible | given.visible.mT, given.real)
    logits = model(input_ids, attention_mask=given.attention_mask, position_ids=given.position_ids).logits
    truth = true_logits(model, input_ids, both, torch.float64)
    assert relative_error(logits[given.real], truth[given.real]) <= 1e-5


@every_implementation
@torch.no_grad()
def test_only_the_layers_that_are_not_causal_look_ahead_and_only_in_their_window(implementation: str) -> None:
    model, input_ids = tiny_model(attn_implementation=implementation, **WINDOW), tokens(1, 13)
    assert [layer.self_attn.sliding_window for layer in model.model.layers] == [None, 4]  # passed to flash attention
    model.model.layers[1].self_attn.is_causal = False  # the one with a window of 4
    logits, seen = model(input_ids).logits[0, 4], []
    for i in range(13):
        other = input_ids.clone()
        other[0, i] = other[0, i] % 96 + 1
        seen.append(not torch.equal(model(other).logits[0, 4], logits))
    assert seen == [i < 8 for i in range(13)]


@every_implementation
@torch.no_grad()
def test_is_causal_of_a_call_goes_before_that_of_the_layers(implementation: str) -> None:
    model, given, input_ids = tiny_model(attn_implementation=implementation), batch("causal", 9), tokens(2, 9)
    packed, room = batch("packed", 9), StaticCache(model.config, max_cache_len=12)  # no token sees its free slots
    for kind, options in ((given, {}), (packed, {}), (given, {"past_key_values": room})):
        both = Batch(None, kind.position_ids, kind.visible | kind.visible.mT, kind.real)
        logits = model(input_ids, position_ids=kind.position_ids, is_causal=False, **options).logits
        assert relative_error(logits, true_logits(model, input_ids, both, torch.float64)) <= 1e-5
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    every = Batch(None, given.position_ids, torch.ones_like(given.visible), given.real)
    logits = model(input_ids, attention_mask={"full_attention": None}).logits  # prepared masks, of which none is needed
    assert relative_error(logits, true_logits(model, input_ids, every, torch.float64)) <= 1e-5
    logits = model(input_ids, is_causal=True).logits
    assert relative_error(logits, true_logits(model, input_ids, given, torch.float64)) <= 1e-5


def four_dimensional(kind: str, visible: torch.Tensor) -> torch.Tensor:
    """Return a mask of visible keys [b, n, n] as users pass it."""
    if kind == "boolean":
        return visible[:, None]
    lowest = -math.inf if kind == "infinite" else torch.finfo(torch.float32).min
    return torch.where(visible[:, None], 0.0, lowest)


@every_implementation
@pytest.mark.parametrize(("variant", "rows"), [("v1", 2), ("v2", 1)], ids=["each row's", "one for all rows"])
@pytest.mark.parametrize("kind", ["boolean", "lowest number", "infinite"])
@torch.no_grad()
def test_masks_of_four_dimensions_say_which_keys_are_seen(
    variant: str, rows: int, kind: str, implementation: str
) -> None:
    model, given, input_ids = tiny_model(variant, attn_implementation=implementation), batch("left", 13), tokens(2, 13)
    visible = given.visible[:rows].clone()  # padded queries see nothing
    visible[:, 9:, 6] = False
    mask = four_dimensional(kind, visible)
    given = Batch(
        mask, given.position_ids[:rows].expand(2, -1), visible.expand(2, -1, -1), given.real[:rows].expand(2, -1)
    )
    truth = true_logits(model, input_ids, given, torch.float64)[given.real]
    for prepared in (mask, {"full_attention": mask}):
        logits = model(input_ids, attention_mask=prepared, position_ids=given.position_ids).logits[given.real]
        assert relative_error(logits, truth) <= 1e-5


@pytest.mark.slow
@torch.no_grad()
@not_compiled
def test_flex_attention_reads_masks_as_the_others_do() -> None:
    model, given, input_ids = tiny_model(num_hidden_layers=1), batch("holes", 13), tokens(2, 13)
    for options in (
        {"attention_mask": given.attention_mask},
        {"attention_mask": given.attention_mask, "is_causal": False},
    ):
        logits = []
        for implementation in ("flex_attention", "eager"):
            model.set_attn_implementation(implementation)
            logits.append(model(input_ids, **options).logits[given.real])
        assert relative_error(*logits) <= 1e-5


@every_implementation
@torch.no_grad()
def test_mask_of_all_queries_and_one_of_each_head_are_spread_or_kept(implementation: str) -> None:
    model, input_ids = tiny_model(attn_implementation=implementation), tokens(2, 150)  # longer than a block
    visible = torch.ones(2, 150, 150, dtype=torch.bool)
    visible[0, :, 5] = False
    given = Batch(None, torch.arange(150).expand(2, -1), visible, torch.ones(2, 150, dtype=torch.bool))
    truth = true_logits(model, input_ids, given, torch.float64)
    for mask in (visible[:, None, :1], visible[:, None].expand(2, 8, 150, 150)):
        assert relative_error(model(input_ids, attention_mask=mask).logits, truth) <= 1e-5


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "diff_attention"])
def test_integers_in_four_dimensions_are_refused(implementation: str) -> None:
    model, mask = tiny_model(attn_implementation=implementation), MASK.int()
    with pytest.raises(ValueError, match=r"`attention_mask` of four dimensions must be boolean .* got torch\.int32"):
        model(tokens(1, 5), attention_mask=mask)


@pytest.mark.parametrize("mask", [MASK, MASK.float(), {"full_attention": MASK}], ids=["boolean", "added", "prepared"])
def test_tensors_of_four_dimensions_are_refused_by_flex_attention(mask: Any) -> None:
    model = tiny_model(attn_implementation="flex_attention")
    with pytest.raises(ValueError, match=r"flex_attention needs .* got a tensor \[1, 1, 5, 5\]. Use .* `sdpa`"):
        model(tokens(1, 5), attention_mask=mask)


@pytest.mark.parametrize(
    ("cached", "shape"),
    [
        (0, (2, 4)),
        (0, (2, 6)),
        (0, (1, 5)),
        (0, (4, 5)),
        (0, (5,)),
        (0, (2, 5, 5)),
        (3, (2, 5)),
        (3, (2, 7)),
        (3, (2, 9)),
    ],
)
@pytest.mark.parametrize("cache_class", [DynamicCache, StaticCache])
@torch.no_grad()
def test_mask_of_another_length_is_refused(cache_class: Any, cached: int, shape: tuple[int, ...]) -> None:
    model = tiny_model(attn_implementation="sdpa", **WINDOW)
    room = {"max_cache_len": 12} if cache_class is StaticCache else {}
    cache = cache_class(config=model.config, **room)
    if cached:
        model(tokens(2, cached), past_key_values=cache)
    rule = rf"`attention_mask` must be \[2, {cached + 5}\], with a 1 for each of the {cached} tokens in the cache and "
    with pytest.raises(
        ValueError, match=rule + rf"the 5 new ones and a 0 for padding, got \[{', '.join(map(str, shape))}\]"
    ):
        model(tokens(2, 5), attention_mask=torch.ones(shape), past_key_values=cache)
    whole = [cached + 5, *room.values()]  # and the whole length of a static cache
    masks = [(torch.arange(length) < cached + 5).expand(2, -1) for length in whole]
    expected = model(torch.cat((tokens(2, cached), tokens(2, 5)), dim=1)).logits[:, cached:]
    for mask in masks:
        again = cache_class(config=model.config, **room)
        if cached:
            model(tokens(2, cached), past_key_values=again)
        torch.testing.assert_close(
            model(tokens(2, 5), attention_mask=mask, past_key_values=again).logits, expected, rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("mask", ["prepared for each type of layer", "one for all layers"])
@torch.no_grad()
def test_prepared_masks_are_taken_as_they_are(mask: str) -> None:
    model, given, n = tiny_model(**EVERY_FEATURE), batch("causal", 13), 13
    full = torch.where(given.visible[:, None], 0.0, torch.finfo(torch.float32).min)
    window = full.masked_fill(~torch.ones(n, n, dtype=torch.bool).triu(1 - 5), torch.finfo(torch.float32).min)
    if mask == "one for all layers":
        logits = model(tokens(2, n), attention_mask=full).logits
        expected = tiny_model(**EVERY_FEATURE | {"sliding_window": n})(tokens(2, n)).logits
    else:
        logits = model(
            tokens(2, n), attention_mask={"full_attention": full, "sliding_attention": window}, use_cache=False
        ).logits
        expected = model(tokens(2, n), use_cache=False).logits
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_gradient_checkpointing_changes_no_gradient(variant: str, use_reentrant: bool) -> None:
    input_ids = tokens(2, 11)

    def gradients(checkpointing: bool) -> dict[str, torch.Tensor]:
        model = tiny_model(variant, attn_implementation="sdpa").train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
            model.enable_input_require_grads()
            assert model.model.layers[0].gradient_checkpointing
        model(input_ids, labels=input_ids).loss.backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    plain, checkpointed = gradients(False), gradients(True)
    assert [name for name in plain if not torch.equal(plain[name], checkpointed[name])] == []


@optional_features
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_two_optimizer_steps_reduce_the_loss_and_reach_every_parameter(
    variant: str, implementation: str, fields: dict[str, Any]
) -> None:
    model = tiny_model(variant, attn_implementation=implementation, **fields).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    input_ids, losses = tokens(4, 17), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(input_ids, labels=input_ids).loss
        loss.backward()
        without = [name for name, p in model.named_parameters() if p.grad is None or not torch.any(p.grad)]
        assert without == []
        losses.append(loss.item())
        optimizer.step()
    assert losses[0] > losses[1] > losses[2]


def test_attention_dropout_acts_in_training_only() -> None:
    model, input_ids = tiny_model(attention_dropout=0.5), tokens(1, 9)
    with torch.no_grad():
        assert torch.equal(model(input_ids).logits, model(input_ids).logits)
        model.train()
        assert not torch.equal(model(input_ids).logits, model(input_ids).logits)


@pytest.mark.parametrize("variant", VARIANTS)
def test_float64_model_is_exact_up_to_its_rotary_tables(variant: str) -> None:
    model, given, input_ids = tiny_model(variant, torch.float64), batch("causal", 2), tokens(2, 2)
    given = Batch(None, torch.zeros_like(given.position_ids), given.visible, given.real)  # no rotation, so no positions
    with torch.no_grad():
        mask = torch.where(given.visible[:, None], 0.0, -math.inf).double()
        logits = model(input_ids, attention_mask=mask, position_ids=given.position_ids, use_cache=False).logits
    assert relative_error(logits, true_logits(model, input_ids, given, torch.float64)) <= 1e-13


class TestInitialization:
    @staticmethod
    def model(variant: str) -> DiffLlamaForCausalLM:
        torch.manual_seed(0)
        return DiffLlamaForCausalLM(
            tiny_config(variant, hidden_size=512, head_dim=128, initializer_range=0.02, lambda_std_dev=0.1)
        )

    @pytest.mark.parametrize("variant", VARIANTS)
    def test_matrices_have_the_configured_standard_deviation_and_norms_are_one(self, variant: str) -> None:
        for name, parameter in self.model(variant).named_parameters():
            if "norm" in name:
                assert torch.equal(parameter, torch.ones_like(parameter)), name
            elif parameter.dim() == 2:
                assert parameter.std().item() == pytest.approx(0.02, rel=0.05), name
                assert abs(parameter.mean().item()) < 0.02 / math.sqrt(parameter.numel()) * 5, name

    def test_lambda_vectors_have_their_own_standard_deviation(self) -> None:
        vectors = torch.stack([p for name, p in self.model("v1").named_parameters() if ".lambda_" in name])
        assert vectors.shape == (8, 64)  # two layers, four vectors of width d = D/2
        assert vectors.std().item() == pytest.approx(0.1, rel=0.15)
        assert len({tuple(v.tolist()) for v in vectors}) == 8

    def test_lambda_starts_near_lambda_init_in_every_layer(self) -> None:
        model = self.model("v1")
        for i, layer in enumerate(model.model.layers):
            assert layer.self_attn.lambda_init == pytest.approx(reference.lambda_init(i))
            value = layer.self_attn.differential_lambda(torch.zeros(1, 1, 512)).item()
            assert value == pytest.approx(reference.lambda_init(i), abs=0.5)

    def test_constant_lambda_init_is_used_in_all_layers(self) -> None:
        model = tiny_model(lambda_init=0.8)
        assert [layer.self_attn.lambda_init for layer in model.model.layers] == [0.8, 0.8]


def test_without_head_norm_heads_are_the_plain_difference() -> None:
    with_norm = attention_layer("v1", 2, "eager", head_norm_affine=False)
    without = attention_layer("v1", 2, "eager", head_norm=False)
    without.load_state_dict(with_norm.state_dict())
    seen: list[torch.Tensor] = []
    for layer in (with_norm, without):
        layer.o_proj.register_forward_pre_hook(lambda module, args: seen.append(args[0].unflatten(-1, (HEADS, 16))))
        run_layer(layer, torch.randn(2, 7, 64, generator=torch.Generator().manual_seed(0)), batch("causal", 7))
    normed, plain = seen
    expected = reference.rms_norm(plain, None, 1e-5) * (1 - reference.lambda_init(1))
    torch.testing.assert_close(normed, expected)


class TestTaskHeads:
    @pytest.mark.parametrize("variant", VARIANTS)
    def test_sequence_classification_reads_the_last_real_token(self, variant: str) -> None:
        torch.manual_seed(0)
        model = DiffLlamaForSequenceClassification(tiny_config(variant, num_labels=3)).eval()
        input_ids = tokens(2, 6)
        input_ids[0, 4:] = 0  # padding
        outputs = model(input_ids, attention_mask=(input_ids != 0).long(), labels=torch.tensor([0, 2]))
        alone = model(input_ids[:1, :4]).logits
        assert outputs.logits.shape == (2, 3)
        torch.testing.assert_close(outputs.logits[:1], alone)
        outputs.loss.backward()
        assert torch.any(model.score.weight.grad)

    def test_other_heads_have_an_output_and_a_loss_for_each_token(self) -> None:
        labels = torch.tensor([[0, 1, 2, 3, 4, 0]] * 2)
        classified = DiffLlamaForTokenClassification(tiny_config(num_labels=5))(tokens(2, 6), labels=labels)
        assert classified.logits.shape == (2, 6, 5)
        assert classified.loss.isfinite()
        ends = {"start_positions": torch.tensor([0, 1]), "end_positions": torch.tensor([2, 5])}
        answered = DiffLlamaForQuestionAnswering(tiny_config())(tokens(2, 6), **ends)
        assert answered.start_logits.shape == answered.end_logits.shape == (2, 6)
        assert answered.loss.isfinite()


def test_inputs_embeds_give_the_same_logits_and_both_or_neither_are_refused() -> None:
    model, input_ids = tiny_model(), tokens(2, 5)
    embeds = model.get_input_embeddings()(input_ids)
    assert torch.equal(model(inputs_embeds=embeds).logits, model(input_ids).logits)
    for arguments in ({}, {"input_ids": input_ids, "inputs_embeds": embeds}):
        with pytest.raises(ValueError, match="exactly one of `input_ids` and `inputs_embeds`"):
            model(**arguments)


def test_logits_to_keep_computes_the_last_logits_only() -> None:
    model, input_ids = tiny_model(), tokens(2, 7)
    torch.testing.assert_close(model(input_ids, logits_to_keep=2).logits, model(input_ids).logits[:, -2:])


def test_config_is_not_changed_by_the_model() -> None:
    config = tiny_config()
    before = copy.deepcopy(config.to_dict())
    DiffLlamaForCausalLM(config)
    assert config.to_dict() == before
