import pytest
import torch

from diffllama import DiffLlamaConfig
from diffllama.checkpoints.errors import CheckpointError
from diffllama.conversion.weight_map import Rule, WeightMap, inverse, plan
from support.llama_checkpoints import apply
from support.tiny_models import tiny_config


CONFIG = tiny_config("v2")


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor on the meta device."""
    return torch.empty(shape, dtype=dtype, device="meta")


def increase(tensor: torch.Tensor, config: DiffLlamaConfig) -> torch.Tensor:
    return tensor + 1


def double(tensor: torch.Tensor, config: DiffLlamaConfig) -> torch.Tensor:
    return tensor * 2


def append(tensor: torch.Tensor, config: DiffLlamaConfig, *others: torch.Tensor) -> torch.Tensor:
    return torch.cat((tensor, *others))


def test_inverse_gives_old_names_again_and_leaves_out_what_was_dropped() -> None:
    weight_map: WeightMap = {"{i}.a": Rule("layers.{i}.b"), "c": Rule("c", (double,)), "d": None}
    assert inverse(weight_map) == {"layers.{i}.b": Rule("{i}.a"), "c": Rule("c")}


# plan: names


@pytest.mark.parametrize(
    ("source", "weight_map", "steps"),
    [
        (
            [f"layers.{i}.q.weight" for i in (0, 7, 10, 123)],
            {"layers.{i}.q.weight": Rule("blocks.{i}.query")},
            {f"blocks.{i}.query": f"layers.{i}.q.weight" for i in (0, 7, 10, 123)},
        ),
        (["layers.0.x"], {"layers.{i}.x": Rule("x")}, {"x": "layers.0.x"}),
        (
            ["c", "b", "a"],
            {"a": Rule("a"), "b": (Rule("z"), Rule("y"), Rule("x")), "c": Rule("c")},
            {"c": "c", "z": "b", "y": "b", "x": "b", "a": "a"},
        ),
        (["a", "l.3.a", "b", "c"], {"a": None, "l.{i}.a": None, "b": Rule("b"), "c": ()}, {"b": "b"}),
        ([], {"a": Rule("a")}, {}),
    ],
    ids=["layers", "no layer in the target", "order", "dropped", "nothing"],
)
def test_step_for_every_rule_in_the_order_of_the_source(
    source: list[str], weight_map: WeightMap, steps: dict[str, str]
) -> None:
    planned = plan({name: meta(2) for name in source}, weight_map, CONFIG)
    assert [(name, step.inputs) for name, step in planned.items()] == [(name, (old,)) for name, old in steps.items()]


def test_symbols_of_regular_expressions_are_ordinary_letters() -> None:
    name = "a.*[0]+(b)|^$\\d?"
    assert list(plan({name: meta(2)}, {name: Rule(name)}, CONFIG)) == [name]
    with pytest.raises(CheckpointError, match="no entry"):
        plan({"axxx0b": meta(2)}, {"a.*[0]+(b)": Rule("c")}, CONFIG)


@pytest.mark.parametrize(
    "name",
    [
        *("layers.0.q.weightx", "xlayers.0.q.weight", "layers.0.q.weight\n", "layersx0.q.weight", "Layers.0.q.weight"),
        *("layers.a.q.weight", "layers..q.weight", "layers.-1.q.weight", "layers.0.1.q.weight", "layers.{i}.q.weight"),
        *("layers.\u0663.q.weight", ""),  # an Arabic digit
    ],
)
def test_tensors_that_no_entry_names_exactly_are_refused_with_their_shapes(name: str) -> None:
    with pytest.raises(CheckpointError) as error:
        plan({name: meta(2, 3), "y": meta()}, {"layers.{i}.q.weight": Rule("q")}, CONFIG)
    assert str(error.value) == f"The weight map has no entry for these tensors:\n  {name} [2, 3]\n  y []"


@pytest.mark.parametrize(
    ("source", "weight_map", "second"),
    [
        (("layers.0.x", "layers.1.x"), {"layers.{i}.x": Rule("x")}, "layers.1.x"),
        (("a", "b"), {"a": Rule("x"), "b": Rule("x")}, "b"),
        (("a",), {"a": (Rule("x"), Rule("x"))}, "a"),
    ],
    ids=["layers", "names", "rules"],
)
def test_one_tensor_made_of_two_is_refused(source: tuple[str, ...], weight_map: WeightMap, second: str) -> None:
    with pytest.raises(CheckpointError, match=f"two sources for 'x', the second is '{second}'"):
        plan({name: meta(2) for name in source}, weight_map, CONFIG)


# plan: operations


def test_operations_are_given_tensor_and_configuration_in_their_order() -> None:
    def widen(tensor: torch.Tensor, config: DiffLlamaConfig) -> torch.Tensor:
        return tensor * config.head_dim

    a = torch.tensor([1.0, 5.0])
    rules = (Rule("x", (increase, double)), Rule("y", (double, increase)), Rule("z"), Rule("w", (widen,)))
    results = apply({"a": a}, {"a": rules}, CONFIG)
    expected = {"x": [4, 12], "y": [3, 11], "z": [1, 5], "w": [16, 80]}
    assert {name: tensor.tolist() for name, tensor in results.items()} == expected
    assert results["z"] is a


def test_every_operation_is_given_the_other_tensors_of_its_own_layer() -> None:
    source = {"0.a": torch.zeros(1), "1.a": torch.ones(1), "0.x": torch.full((2,), 5.0), "1.x": torch.full((1,), 6.0)}
    source["y"] = torch.full((1,), 9.0)
    weight_map: WeightMap = {"{i}.a": Rule("{i}.b", (append, append), ("{i}.x", "y")), "{i}.x": None, "y": None}
    assert {name: tensor.tolist() for name, tensor in apply(source, weight_map, CONFIG).items()} == {
        "0.b": [0, 5, 5, 9, 5, 5, 9],
        "1.b": [1, 6, 9, 6, 9],
    }


@pytest.mark.parametrize("dtype", [None, torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_floating_point_results_have_the_dtype_that_is_asked_for(
    stored: torch.dtype, dtype: torch.dtype | None
) -> None:
    weight_map: WeightMap = {"a": (Rule("x"), Rule("y", (double,)))}
    expected = stored if dtype is None or not stored.is_floating_point else dtype
    steps = plan({"a": meta(3, dtype=stored)}, weight_map, CONFIG, dtype)
    assert [step.result.dtype for step in steps.values()] == [expected] * 2
    results = apply({"a": torch.arange(3).to(stored)}, weight_map, CONFIG, dtype)
    assert [tensor.dtype for tensor in results.values()] == [expected] * 2


def test_operations_compute_before_the_cast() -> None:
    tensor = torch.tensor([-1.001])
    result = apply({"a": tensor}, {"a": Rule("a", (increase,))}, CONFIG, torch.bfloat16)["a"]
    assert torch.equal(result, (tensor + 1).bfloat16())
    assert not torch.equal(result, tensor.bfloat16() + 1)


def test_plan_computes_shapes_and_no_values() -> None:
    devices = []

    def transpose(tensor: torch.Tensor, config: DiffLlamaConfig, other: torch.Tensor) -> torch.Tensor:
        devices.extend([tensor.device.type, other.device.type])
        return tensor.T

    source = {"a": meta(10**7, 10**6), "t": meta(5, 10**7, dtype=torch.bfloat16)}  # 40 TB
    weight_map: WeightMap = {"a": (Rule("a", (double,)), Rule("t", (transpose, append), ("t",))), "t": None}
    steps = plan(source, weight_map, CONFIG, torch.float16)
    assert {name: list(step.result.shape) for name, step in steps.items()} == {
        "a": [10**7, 10**6],
        "t": [10**6 + 5, 10**7],
    }
    assert {step.result.device.type for step in steps.values()} == set(devices) == {"meta"}
    assert {step.result.dtype for step in steps.values()} == {torch.float16}
