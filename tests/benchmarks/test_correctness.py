import pytest
import torch

from benchmarks.correctness import CorrectnessError, compare, errors


TRUTH = {"layers.0.weight": torch.tensor([3.0, 0.0]), "layers.1.weight": torch.tensor([0.0, 4.0])}


def off(by: float) -> dict[str, torch.Tensor]:
    """Return values with a known relative error over both layers."""
    return {"layers.0.weight": TRUTH["layers.0.weight"] + torch.tensor([0.0, 5 * by]), **{
        name: tensor for name, tensor in TRUTH.items() if name != "layers.0.weight"
    }}  # fmt: skip


def test_errors_are_relative_and_of_all_layers_together() -> None:
    assert errors(off(0.25), TRUTH) == {"layers.*.weight": pytest.approx(0.25)}


@pytest.mark.parametrize("kind", ["output", "gradient"])
def test_float32_has_one_limit(kind: str) -> None:
    limit = {"output": 1e-4, "gradient": 1e-3}[kind]
    compare(kind, off(0.9 * limit), TRUTH)
    with pytest.raises(CorrectnessError, match=rf"{kind} layers\.\*\.weight differs .* by 1\.1e-0\d, more than"):
        compare(kind, off(1.1 * limit), TRUTH)


@pytest.mark.parametrize(("kind", "factor"), [("output", 2), ("gradient", 3)])
def test_lower_precision_may_lose_so_many_times_what_plain_pytorch_loses(kind: str, factor: int) -> None:
    plain = {name: tensor.bfloat16() for name, tensor in off(0.125).items()}
    compare(kind, off(0.99 * factor * 0.125), TRUTH, plain)
    with pytest.raises(CorrectnessError):
        compare(kind, off(1.01 * factor * 0.125), TRUTH, plain)
    exact = {name: tensor.bfloat16() for name, tensor in TRUTH.items()}
    compare(kind, off(0.99 * factor * 2**-7), TRUTH, exact)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_nonfinite_values_are_refused(wrong: float) -> None:
    with pytest.raises(CorrectnessError):
        compare("output", off(wrong), TRUTH)


def test_missing_values_and_a_truth_of_zeros_are_refused() -> None:
    with pytest.raises(CorrectnessError, match=r"layers\.1\.weight has no gradient"):
        compare("gradient", {"layers.0.weight": TRUTH["layers.0.weight"]}, TRUTH)
    zeros = {"x": torch.zeros(2)}
    with pytest.raises(CorrectnessError):
        compare("gradient", zeros, zeros)
