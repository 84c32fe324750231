import pytest

from benchmarks.cost import backward, floors, units


def test_units_are_those_of_the_design() -> None:
    assert units("transformer", "prefill") == 4
    assert units("v1 padded call", "prefill") == 8
    assert units("v1 fused", "prefill") == 6
    assert units("v1 blocked", "prefill") == 4
    assert units("v1 fused", "decode") == units("v1 blocked", "decode") == units("transformer", "decode") == 4
    assert backward(2, 2) == 10
    assert units("v1 fused", "train") - units("v1 fused", "prefill") == 10
    assert units("v1 padded call", "train") == 2 * units("transformer", "train") == 28


def test_a_fused_training_step_costs_16_parts_of_14() -> None:
    assert floors("train")["v1 fused"] == pytest.approx(16 / 14)
    assert floors("train")["v1 blocked"] == 1.0


def test_v2_has_twice_the_maps() -> None:
    assert floors("prefill") == {
        "v1 padded call": 2.0,
        "v1 fused": 1.5,
        "v1 blocked": 1.0,
        "v2 one call": 2.0,
        "v2 fused": 2.0,
        "v2 blocked": 1.5,
    }
