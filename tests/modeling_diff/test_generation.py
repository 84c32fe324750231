from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch._inductor import compile as inductor
from transformers import (
    Cache,
    CompileConfig,
    DynamicCache,
    GenerationConfig,
    QuantizedCache,
    StaticCache,
    cache_utils,
    pipeline,
)

from diffllama import DiffLlamaForCausalLM
from support.tiny_models import EVERY_FEATURE, VARIANTS, paged, tiny_model, tiny_tokenizer, tokens


TOLERANCE = 1e-5  # absolute, on logits of order 1
LENGTH = 12  # tokens of the prompts
PADDING = 4  # tokens of left padding of the shorter prompt


WINDOWS: dict[str, dict[str, Any]] = {
    "whole context": {},
    "window": {"sliding_window": 5},
    "window in one layer, every feature": EVERY_FEATURE,
}
"""What the layers see, all but the first less than `LENGTH` -> fields of the configuration."""
windows = pytest.mark.parametrize("fields", WINDOWS.values(), ids=WINDOWS)

THEIR_FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "max_position_embeddings", "initializer_range", "lambda_std_dev", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip
"""Fields that a configuration of transformers' own `diffllama` has too."""


def comparable_model(
    variant: str, implementation: str, dtype: torch.dtype = torch.float32, **fields: Any
) -> DiffLlamaForCausalLM:
    """Return a model whose logits have a standard deviation of 0.8, and rounding errors of 3e-6 in float32."""
    return tiny_model(variant, dtype, implementation, initializer_range=0.1, **fields)


def caches(model: DiffLlamaForCausalLM) -> dict[str, Cache]:
    """Return an empty cache of every lossless kind that works on this device."""
    config, more = model.config, LENGTH + 3  # a static cache longer than its content
    if model.device.type == "cuda":
        return {
            "dynamic, offloaded": DynamicCache(config=config, offloading=True),
            "static, offloaded": StaticCache(config=config, max_cache_len=more, offloading=True),
        }
    return {
        "dynamic": DynamicCache(config=config),
        "dynamic, layers added as needed": DynamicCache(),
        "static": StaticCache(config=config, max_cache_len=more),
        "static, exactly full": StaticCache(config=config, max_cache_len=LENGTH),
    }


def padded_batch(device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    """Return two prompts, the second padded on the left, with the positions of `generate`."""
    input_ids, mask = tokens(2, LENGTH), torch.ones(2, LENGTH, dtype=torch.long)
    input_ids[1, :PADDING], mask[1, :PADDING] = 0, 0
    batch = {"input_ids": input_ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    return {name: tensor.to(device) for name, tensor in batch.items()}


def chunked_logits(
    model: DiffLlamaForCausalLM, batch: dict[str, torch.Tensor], cache: Cache, chunks: tuple[int, ...]
) -> torch.Tensor:
    """Compute the logits of all tokens, in chunks of these lengths."""
    logits, start = [], int(cache.get_seq_length())
    for end in (start + torch.tensor(chunks).cumsum(0)).tolist():
        piece = {name: tensor[:, start:end] for name, tensor in batch.items()}
        if "attention_mask" in batch:
            piece["attention_mask"] = batch["attention_mask"][:, :end]
        logits.append(model(**piece, past_key_values=cache, use_cache=True).logits)
        start = end
    return torch.cat(logits, dim=1)


def difference(logits: torch.Tensor, truth: torch.Tensor) -> float:
    """Compute max|logits - reference|, for a reference of order 1."""
    assert 0.5 < truth.std() < 2
    return (logits - truth).abs().max().item()


def check_every_cache(model: DiffLlamaForCausalLM, padded: bool, chunks: tuple[int, ...]) -> None:
    batch = padded_batch(model.device) if padded else {"input_ids": tokens(2, LENGTH).to(model.device)}
    real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    truth = model(**batch, use_cache=False).logits[real]
    kinds = caches(model)
    errors = {kind: difference(chunked_logits(model, batch, kinds[kind], chunks)[real], truth) for kind in kinds}
    assert {kind: error for kind, error in errors.items() if not error <= TOLERANCE} == {}, (padded, chunks)


CHUNKS = {"a prompt, then tokens": (8, 1, 1, 1, 1), "chunked prompt": (1, 2, 5, 3, 1)}


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@windows
@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_cached_decoding_equals_the_full_forward(variant: str, fields: dict[str, Any], implementation: str) -> None:
    model = comparable_model(variant, implementation, **fields)
    for padded, chunks in product([False, True], CHUNKS.values()):
        check_every_cache(model, padded, chunks)


@pytest.mark.gpu
@pytest.mark.parametrize("padded", [False, True], ids=["unpadded", "left padded"])
@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_decoding_with_an_offloaded_cache_equals_the_full_forward(variant: str, padded: bool) -> None:
    # Offloading moves layers on CUDA streams, so transformers has none on the CPU. float64, because
    # kernels for one query and for many round differently
    model = comparable_model(variant, "sdpa", torch.float64).to("cuda")
    check_every_cache(model, padded, CHUNKS["a prompt, then tokens"])


QUANTIZED = {  # backend -> its package, and options that keep some tokens exact (fp8 has none)
    "quanto": ("optimum.quanto", {"nbits": 4, "q_group_size": 16, "residual_length": LENGTH}),
    "hqq": ("hqq", {"nbits": 4, "axis_key": 1, "axis_value": 1, "q_group_size": 16, "residual_length": LENGTH}),
    "fp8": (None, {}),
}


class RoundedCache(DynamicCache):
    """A dynamic cache that rounds the prompt and new tokens like a quantized cache."""

    def __init__(self, quantized: QuantizedCache) -> None:
        stored = [(layer._quantized_keys, layer._quantized_values) for layer in quantized.layers]
        prompt = [
            tuple(layer._dequantize(states) for states in pair)
            for layer, pair in zip(quantized.layers, stored, strict=True)
        ]
        super().__init__(prompt)
        self.stored, self.quantized = stored, quantized

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any) -> Any:
        layer = self.quantized.layers[layer_idx]
        if not hasattr(layer, "residual_length"):  # no token is exact: new ones are rounded with the prompt's scale
            (_, key_scale), (_, value_scale) = self.stored[layer_idx]
            keys = layer._dequantize(layer._quantize(keys, key_scale))
            values = layer._dequantize(layer._quantize(values, value_scale))
        return super().update(keys, values, layer_idx, *args)


@pytest.mark.parametrize("backend", QUANTIZED)
@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_quantized_cache_changes_nothing_but_the_rounding_of_what_it_stores(variant: str, backend: str) -> None:
    package, options = QUANTIZED[backend]
    if package:
        pytest.importorskip(package, reason=f"caches quantized by {backend} need its package")
    elif not hasattr(cache_utils, "Fp8QuantizedLayer"):
        pytest.skip("this transformers has no fp8 cache")
    model, batch, prompt = comparable_model(variant, "sdpa"), padded_batch(), 8
    real = batch["attention_mask"].bool()
    exact, quantized = DynamicCache(config=model.config), QuantizedCache(backend, model.config, **options)
    truth = chunked_logits(model, batch, exact, (prompt,))
    logits = chunked_logits(model, batch, quantized, (prompt,))
    assert difference(logits[real[:, :prompt]], truth[real[:, :prompt]]) <= TOLERANCE  # nothing is rounded yet

    rounded, single = RoundedCache(quantized), (1,) * (LENGTH - prompt)
    assert not torch.equal(rounded.layers[0].keys, exact.layers[0].keys)
    logits, truth = (chunked_logits(model, batch, cache, single) for cache in (quantized, rounded))
    assert difference(logits, truth) <= TOLERANCE
    assert not torch.allclose(logits, chunked_logits(model, batch, exact, single), atol=10 * TOLERANCE)


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "diff_attention"])
@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_packed_sequences_do_not_see_each_other(variant: str, implementation: str) -> None:
    model = comparable_model(variant, implementation)
    input_ids, lengths = tokens(2, 13), [(4, 1, 8), (6, 5, 2)]
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    packed = model(input_ids, position_ids=positions, use_cache=False).logits
    for options in ({}, {"past_key_values": DynamicCache()}):  # with a cache, as by default
        assert torch.equal(model(input_ids, position_ids=positions, **options).logits, packed)
    alone = [
        torch.cat([model(ids[None], use_cache=False).logits[0] for ids in row.split(sizes)])
        for row, sizes in zip(input_ids, lengths, strict=True)
    ]
    assert difference(packed, torch.stack(alone)) <= TOLERANCE
    assert difference(packed, model(input_ids, use_cache=False).logits) > 0.1  # a single sequence gives other logits


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "diff_attention"])
@torch.no_grad()
def test_packed_sequences_that_would_see_each_other_are_refused(implementation: str) -> None:
    model, rule = tiny_model(attn_implementation=implementation), "`position_ids` restart .*: they need an empty `Dyn"
    positions, cache = torch.tensor([[3, 4, 0, 1, 2]]), DynamicCache()
    model(tokens(1, 3), past_key_values=cache)
    for past_key_values in (cache, StaticCache(model.config, max_cache_len=8)):
        with pytest.raises(ValueError, match=rule):
            model(tokens(1, 5), position_ids=positions, past_key_values=past_key_values)
    model(tokens(1, 5), position_ids=torch.tensor([[3, 4, 6, 7, 9]]), past_key_values=cache)  # gaps are no restarts


def test_packed_sequences_in_several_rows_are_refused_by_flash_attention() -> None:
    model, positions = tiny_model(), torch.tensor([[0, 1, 0, 1, 2]])
    model.config._attn_implementation = "flash_attention_2"  # not installed here, and not reached
    with pytest.raises(ValueError, match=r"`position_ids` restart .*: flash attention needs one row, got 2"):
        model(tokens(2, 5), position_ids=positions)


def greedy(model: DiffLlamaForCausalLM, input_ids: torch.Tensor, new_tokens: int = 16, **options: Any) -> Any:
    """Generate without sampling."""
    return model.generate(input_ids, do_sample=False, max_new_tokens=new_tokens, **options)


@pytest.fixture(params=VARIANTS)
def model(request: pytest.FixtureRequest) -> DiffLlamaForCausalLM:
    return tiny_model(request.param, attn_implementation="sdpa")


@pytest.fixture
def calls(model: DiffLlamaForCausalLM) -> list[int]:
    """List of the numbers of tokens of the model's forward calls."""
    lengths: list[int] = []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append(args[0].shape[1]), with_kwargs=True
    )
    return lengths


class TestGreedy:
    def test_takes_the_most_likely_token_of_the_full_forward(self, model: DiffLlamaForCausalLM) -> None:
        generated = greedy(model, tokens(2, 5))
        with torch.no_grad():
            predicted = model(generated, use_cache=False).logits.argmax(-1)
        assert generated.shape == (2, 21)
        assert torch.equal(generated[:, 5:], predicted[:, 4:-1])
        assert len(set(generated[0, 5:].tolist())) > 4  # not one repeated token

    @pytest.mark.gpu
    @pytest.mark.parametrize("cache", ["offloaded", "offloaded_static"])
    def test_generates_the_same_with_an_offloaded_cache(self, model: DiffLlamaForCausalLM, cache: str) -> None:
        model, prompt = model.double().cuda(), tokens(2, 8).cuda()
        generated = greedy(model, prompt, disable_compile=True, cache_implementation=cache)
        assert torch.equal(generated, greedy(model, prompt))

    def test_embeddings_generate_what_their_tokens_generate(self, model: DiffLlamaForCausalLM) -> None:
        prompt = tokens(2, 6)
        embeds = model.get_input_embeddings()(prompt)
        generated = model.generate(inputs_embeds=embeds, do_sample=False, max_new_tokens=16)
        assert torch.equal(generated, greedy(model, prompt)[:, 6:])

    @pytest.mark.parametrize("kind", ["dynamic", "static"])
    def test_goes_on_from_a_kept_cache(self, model: DiffLlamaForCausalLM, kind: str, calls: list[int]) -> None:
        whole = greedy(model, tokens(1, 6), 16)
        cache = DynamicCache(config=model.config) if kind == "dynamic" else StaticCache(model.config, max_cache_len=22)
        half = greedy(model, tokens(1, 6), 8, past_key_values=cache)
        calls.clear()
        assert torch.equal(greedy(model, half, 8, past_key_values=cache), whole)
        assert calls == [1] * 8

    def test_stops_at_the_end_token_and_pads(self, model: DiffLlamaForCausalLM) -> None:
        free = greedy(model, tokens(2, 5))
        end = free[0, 8].item()  # the fourth new token
        stopped = greedy(model, tokens(2, 5), eos_token_id=end)
        for row, expected in zip(stopped[:, 5:].tolist(), free[:, 5:].tolist(), strict=True):
            kept = expected[: expected.index(end) + 1] if end in expected else expected
            assert row == kept + [0] * (len(row) - len(kept))
        assert 0 in stopped[0]

    def test_generated_maps_are_differential_and_those_of_the_full_forward(self, model: DiffLlamaForCausalLM) -> None:
        model.set_attn_implementation("eager")
        generated = greedy(model, tokens(2, 5), 4, return_dict_in_generate=True, output_attentions=True)
        with torch.no_grad():
            full = model(generated.sequences, output_attentions=True).attentions
        assert len(generated.attentions) == 4
        for step, layers in enumerate(generated.attentions):
            seen = 5 + step
            queries = slice(0, 5) if step == 0 else slice(seen - 1, seen)
            assert len(layers) == 2
            for maps, truth in zip(layers, full, strict=True):
                assert maps.shape == (2, 4, queries.stop - queries.start, seen)
                assert (maps - truth[:, :, queries, :seen]).abs().max() <= TOLERANCE
                assert maps.min() < 0


@windows
@pytest.mark.parametrize("variant", VARIANTS)
class TestWindow:
    def test_generates_the_same_however_keys_and_values_are_kept(self, variant: str, fields: dict[str, Any]) -> None:
        model, prompt = tiny_model(variant, attn_implementation="sdpa", **fields), tokens(2, LENGTH)
        expected = greedy(model, prompt, use_cache=False)
        for options in ({}, {"cache_implementation": "static"}, {"prefill_chunk_size": 7}):
            assert torch.equal(greedy(model, prompt, disable_compile=True, **options), expected), options

    def test_left_padded_batch_equals_each_prompt_alone(self, variant: str, fields: dict[str, Any]) -> None:
        model, batch = tiny_model(variant, attn_implementation="sdpa", **fields), padded_batch()
        prompts = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
        alone = [greedy(model, row[mask.bool()][None])[0, -16:] for row, mask in zip(*prompts.values(), strict=True)]
        for kind in ("dynamic", "static"):
            together = greedy(model, **prompts, cache_implementation=kind, disable_compile=True)[:, LENGTH:]
            assert torch.equal(together, torch.stack(alone)), kind


class TestDrafts:
    def test_drafts_of_an_assistant_do_not_change_the_tokens(
        self, model: DiffLlamaForCausalLM, calls: list[int]
    ) -> None:
        expected = greedy(model, tokens(1, 7), 24)
        assistant = tiny_model(model.config.diff_variant, attn_implementation="sdpa")
        with torch.no_grad():
            assistant.lm_head.weight += 0.1 * torch.randn(97, 64, generator=torch.Generator().manual_seed(1))
        calls.clear()
        assert torch.equal(greedy(model, tokens(1, 7), 24, assistant_model=assistant), expected)
        assert 3 < len(calls) < 20  # some drafts were right, some wrong

    def test_drafts_of_the_first_layer_do_not_change_the_tokens(self, model: DiffLlamaForCausalLM) -> None:
        expected, runs = greedy(model, tokens(1, 7), 24), [0, 0]
        for i, layer in enumerate(model.model.layers):
            layer.register_forward_hook(lambda *_, i=i: runs.__setitem__(i, runs[i] + 1))
        assert torch.equal(greedy(model, tokens(1, 7), 24, assistant_early_exit=1), expected)
        assert runs[0] > runs[1] > 0

    def test_drafts_from_the_prompt_do_not_change_the_tokens(
        self, model: DiffLlamaForCausalLM, calls: list[int]
    ) -> None:
        prompt = tokens(1, 4).repeat(1, 5)
        expected = greedy(model, prompt, 24, eos_token_id=2)
        calls.clear()
        assert torch.equal(greedy(model, prompt, 24, eos_token_id=2, prompt_lookup_num_tokens=3), expected)
        assert max(calls[1:]) > 1  # drafts were checked


def test_several_samples_of_each_prompt_differ(model: DiffLlamaForCausalLM) -> None:
    torch.manual_seed(0)
    samples = model.generate(tokens(2, 5), do_sample=True, num_return_sequences=3, max_new_tokens=16)
    assert samples.shape == (6, 21)
    assert torch.equal(samples[:, :5], tokens(2, 5).repeat_interleave(3, dim=0))
    assert len({tuple(row.tolist()) for row in samples}) == 6


def test_scores_of_beams_are_the_mean_log_probabilities_of_the_full_forward(model: DiffLlamaForCausalLM) -> None:
    beams = {"num_beams": 3, "num_return_sequences": 3, "return_dict_in_generate": True, "output_scores": True}
    found = greedy(model, tokens(2, 5), 8, **beams)
    with torch.no_grad():
        log_probabilities = model(found.sequences, use_cache=False).logits.log_softmax(-1)[:, 4:-1]
    truth = log_probabilities.gather(-1, found.sequences[:, 5:, None]).squeeze(-1).mean(-1)
    assert len({tuple(row.tolist()) for row in found.sequences}) == 6
    assert (found.sequences_scores - truth).abs().max() <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "fields", "compiled_graphs"),
    [("v1", EVERY_FEATURE, 2), ("v2", {}, 1)],
    ids=["v1, every feature", "v2, plain"],
)
def test_compiled_decoding_with_a_static_cache_generates_the_same(
    variant: str, fields: dict[str, Any], compiled_graphs: int
) -> None:
    model, batch = tiny_model(variant, attn_implementation="sdpa", **fields), padded_batch()
    prompts = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    expected = greedy(model, **prompts)
    torch.compiler.reset()
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return inductor(graph, inputs)

    # transformers' static cache of a window counts tokens in a Python integer, a constant of the first graph only
    dynamic = None if "sliding_window" in fields else False
    compiling = CompileConfig(fullgraph=True, dynamic=dynamic, mode="default", backend=backend)
    compiling._compile_all_devices = True  # `generate` compiles only on accelerators by itself
    compiled = greedy(model, **prompts, cache_implementation="static", compile_config=compiling)
    assert torch.equal(compiled, expected)
    assert len(graphs) == compiled_graphs  # a decoding step is one graph


@pytest.mark.parametrize(
    ("variant", "implementation", "fields"),
    [
        *product(["v1"], ["eager", "sdpa", "diff_attention"], [EVERY_FEATURE]),
        *product(["v2"], ["eager", "sdpa", "diff_attention"], [{}]),
        ("v1", "diff_attention", {}),
        ("v2", "sdpa", {"sliding_window": 5}),
    ],
)
def test_continuous_batching_generates_what_each_prompt_generates_alone(
    variant: str, implementation: str, fields: dict[str, Any]
) -> None:
    if fields and Version(transformers.__version__) < Version("5.19"):
        pytest.skip("transformers 5.6 batches continuously with wrong windows (Mistral's too), 5.19 with right ones")
    model = tiny_model(variant, attn_implementation=implementation, **fields)
    prompts = [tokens(n, seed=n).tolist() for n in (3, 21, 7, 20, 12)]
    end = greedy(model, torch.tensor(prompts[:1]), 5)[0, -1].item()
    settings = GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=end, pad_token_id=0)
    alone = [model.generate(torch.tensor([ids]), generation_config=settings)[0, len(ids) :].tolist() for ids in prompts]
    assert len({len(ids) for ids in alone}) > 1  # some end early
    batching = paged(16, 16, use_async_batching=False)  # pages and batches shorter than the longest prompts
    outputs = model.generate_batch(
        prompts, generation_config=settings, continuous_batching_config=batching, progress_bar=False
    )
    assert [output.generated_tokens for output in outputs.values()] == alone
    if Version(transformers.__version__) >= Version("5.19"):  # before, a model stays at `paged|…`
        assert model.config._attn_implementation == implementation


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"), reason="README compares with transformers 5.23"
)
def test_only_our_model_generates_in_continuous_batching_what_it_generates_alone() -> None:
    settings = GenerationConfig(max_new_tokens=8, do_sample=False, pad_token_id=0)
    prompts = [tokens(n, seed=n).tolist() for n in (3, 12)]
    config = transformers.DiffLlamaConfig(**{k: getattr(tiny_model().config, k) for k in THEIR_FIELDS})
    torch.manual_seed(0)
    equal = []
    for model in (transformers.DiffLlamaForCausalLM(config).eval(), tiny_model(attn_implementation="sdpa")):
        model.set_attn_implementation("sdpa")
        alone = [model.generate(torch.tensor([p]), generation_config=settings)[0, len(p) :].tolist() for p in prompts]
        outputs = model.generate_batch(prompts, generation_config=settings, continuous_batching_config=paged(16, 64))
        equal.append([output.generated_tokens for output in outputs.values()] == alone)
    assert equal == [False, True]  # theirs calls attention twice per layer, and each call writes to the pages


def test_longrope_is_refused_in_continuous_batching() -> None:
    rope = {
        "rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 16,
        "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
    }  # fmt: skip
    model = tiny_model(attn_implementation="sdpa", rope_parameters=rope, max_position_embeddings=32)
    with pytest.raises(ValueError, match=r"does not support LongRoPE.*Use `generate`"):
        model.generate_batch([[5, 6]], continuous_batching_config=paged(8, 64), max_new_tokens=2)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_text_generation_pipeline_answers_chats(model: DiffLlamaForCausalLM, batch_size: int) -> None:
    tokenizer = tiny_tokenizer()
    chats = [
        [{"role": "user", "content": "w15 w60 w17"}],
        [
            {"role": "user", "content": "w19"},
            {"role": "assistant", "content": "w31 w18"},
            {"role": "user", "content": "w44 w70"},
        ],
    ]
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    answers = generator(chats, do_sample=False, max_new_tokens=8, batch_size=batch_size)
    for chat, (answer,) in zip(chats, answers, strict=True):
        prompt = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).input_ids
        text = tokenizer.decode(greedy(model, prompt, 8)[0, prompt.shape[1] :], skip_special_tokens=True)
        *question, reply = answer["generated_text"]
        assert question == chat
        assert reply == {"role": "assistant", "content": reply["content"]}
        assert reply["content"].split() == text.split()  # versions differ in the space before the first word
