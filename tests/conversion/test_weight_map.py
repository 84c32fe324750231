from dataclasses import FrozenInstanceError

import pytest
import torch
from tiny import tiny_config

from diffllama import DiffLlamaConfig
from diffllama.conversion.weight_map import Rule, WeightMap, apply_weight_map


CONFIG = tiny_config("v2")


def one_hot(n: int) -> torch.Tensor:
    """A tensor that is told from others."""
    return torch.eye(8)[n]


def test_a_rule_without_operation_passes_the_tensor_itself() -> None:
    tensor = one_hot(0)
    assert apply_weight_map({"a": tensor}, {"a": Rule("b")}, CONFIG)["b"] is tensor


def test_an_operation_is_given_the_tensor_and_the_configuration() -> None:
    def scale(tensor: torch.Tensor, config: DiffLlamaConfig) -> torch.Tensor:
        return tensor * config.head_dim

    made = apply_weight_map({"a": one_hot(0)}, {"a": Rule("a", scale)}, CONFIG)
    assert torch.equal(made["a"], 16 * one_hot(0))


def test_the_layers_number_goes_from_source_to_target() -> None:
    source = {f"layers.{i}.q.weight": one_hot(n) for n, i in enumerate((0, 7, 10, 123))}
    made = apply_weight_map(source, {"layers.{i}.q.weight": Rule("blocks.{i}.query")}, CONFIG)
    assert list(made) == ["blocks.0.query", "blocks.7.query", "blocks.10.query", "blocks.123.query"]
    assert all(torch.equal(tensor, one_hot(n)) for n, tensor in enumerate(made.values()))


def test_a_target_may_leave_the_layers_number_out() -> None:
    assert list(apply_weight_map({"layers.0.x": one_hot(0)}, {"layers.{i}.x": Rule("x")}, CONFIG)) == ["x"]


def test_two_tensors_never_become_one() -> None:
    with pytest.raises(ValueError, match=r"'x' of two tensors, the second of them 'layers.1.x'"):
        apply_weight_map({"layers.0.x": one_hot(0), "layers.1.x": one_hot(1)}, {"layers.{i}.x": Rule("x")}, CONFIG)


def test_none_drops_a_tensor() -> None:
    rules: WeightMap = {"a": None, "layers.{i}.a": None, "b": Rule("b")}
    source = {"a": one_hot(0), "layers.3.a": one_hot(1), "b": one_hot(2)}
    assert list(apply_weight_map(source, rules, CONFIG)) == ["b"]


@pytest.mark.parametrize(
    "name",
    [
        "layers.0.q.weightx",
        "xlayers.0.q.weight",
        "layers.0.q.weight\n",
        "layers.a.q.weight",
        "layers..q.weight",
        "layers.-1.q.weight",
        "layers.0.1.q.weight",
        "layersx0.q.weight",
        "layers.{i}.q.weight",
        "Layers.0.q.weight",
        "",
    ],
)
def test_a_tensor_that_no_rule_names_exactly_is_refused_with_name_and_shape(name: str) -> None:
    with pytest.raises(ValueError, match="no rule for tensor") as error:
        apply_weight_map({name: torch.zeros(2, 3)}, {"layers.{i}.q.weight": Rule("q")}, CONFIG)
    assert repr(name) in str(error.value)
    assert "(2, 3)" in str(error.value)


def test_symbols_of_regular_expressions_are_ordinary_letters() -> None:
    made = apply_weight_map({"a.*[0]+(b)": one_hot(0)}, {"a.*[0]+(b)": Rule("c")}, CONFIG)
    assert list(made) == ["c"]


def test_progress_counts_every_tensor_even_those_dropped() -> None:
    told: list[tuple[int, int]] = []
    source = {name: one_hot(0) for name in "abc"}
    apply_weight_map(source, {"a": Rule("a"), "b": None, "c": Rule("c")}, CONFIG, lambda *count: told.append(count))
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_no_tensor_makes_no_tensor() -> None:
    assert apply_weight_map({}, {"a": Rule("a")}, CONFIG) == {}


def test_a_rule_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        Rule("a").target = "b"
