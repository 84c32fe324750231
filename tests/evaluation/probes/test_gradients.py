"""The probe of gradients: norms by arithmetic, by forward-mode differentiation, and during training."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from diffllama.evaluation.datasets.data import find
from diffllama.evaluation.probes.gradients import Gradients, norms
from diffllama.evaluation.probes.model_pair import Pair
from diffllama.evaluation.runs import Report
from support.probe_runs import run_probe
from support.tiny_models import VARIANTS, tiny_model, tokens


SHARED = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "all parameters"]
OWN = {"v1": ["lambda vectors", "head_norm"], "v2": ["lambda_proj"]}


def made(**settings: Any) -> Gradients:
    return Gradients(**({"steps": 1, "batch": 2, "length": 16, "device": "cpu"} | settings))


def measured(output: Path, data: Path | None = None, **settings: Any) -> Report:
    return run_probe(made(**settings), output=output, data=data)


@pytest.mark.parametrize("variant", VARIANTS)
def test_norms_are_those_of_autograd(variant: str) -> None:
    model, ids = tiny_model(variant), tokens(2, 12)
    model(ids, labels=ids).loss.backward()
    found = norms(model)
    assert {*found} == {*SHARED, *OWN[variant]} - {"all parameters"}
    for index, layer in enumerate(model.model.layers):
        names, parameters = zip(*layer.named_parameters(), strict=True)
        grads = dict(zip(names, torch.autograd.grad(model(ids, labels=ids).loss, parameters), strict=True))
        assert found["o_proj"][index] == pytest.approx(grads["self_attn.o_proj.weight"].square().sum().sqrt().item())
        if variant == "v1":
            joined = torch.cat([grads[f"self_attn.lambda_{name}"] for name in ("q1", "q2", "k1", "k2")])
            assert found["lambda vectors"][index] == pytest.approx(joined.norm().item(), rel=1e-4)
        else:
            assert found["lambda_proj"][index] == pytest.approx(grads["self_attn.lambda_proj.weight"].norm().item())


def by_hand(model: PreTrainedModel, batches: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    """Return the gradients before each step of a plain AdamW."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    first, second = ([torch.zeros_like(one) for one in parameters] for _ in range(2))
    found = []
    for step, ids in enumerate(batches.long(), 1):
        logits = model(ids).logits[:, :-1]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        grads = torch.autograd.grad(loss, parameters)
        found.append(dict(zip(names, grads, strict=True)))
        scale = min(1.0, 1 / torch.cat([grad.flatten() for grad in grads]).norm().item())
        with torch.no_grad():
            for parameter, grad, m, v in zip(parameters, grads, first, second, strict=True):
                m.lerp_(scale * grad, 1 - 0.9)
                v.lerp_((scale * grad).square(), 1 - 0.98)
                parameter *= 1 - 1e-2 * 0.05
                parameter -= 1e-2 * (m / (1 - 0.9**step)) / ((v / (1 - 0.98**step)).sqrt() + 1e-8)
    return found


@pytest.mark.parametrize("variant", VARIANTS)
def test_training_equals_a_plain_loop(variant: str, tmp_path: Path) -> None:
    probe = made(variant=variant, steps=3, learning_rate=1e-2)
    report = run_probe(probe, output=tmp_path)
    pair: Pair = probe.specs()[0].load()
    batches = probe.samples(find("novels", None), pair)["step 3"]
    assert batches.shape == (4, 2, 16)
    expected = {name: by_hand(model, batches) for name, model in pair.items()}
    assert [outcome.sample for outcome in report.outcomes[0].values()] == ["step 0", "step 1", "step 3"]
    for step in (0, 1, 3):
        rows = {row["condition"]["gradient of"]: row["models"][0] for row in report.select(step=step)}
        assert list(rows) == SHARED + OWN[variant]
        for name, found in expected.items():
            for part, place in (("v_proj", "self_attn"), ("down_proj", "mlp")):
                layers = [found[step][f"model.layers.{layer}.{place}.{part}.weight"].norm() for layer in (0, 1)]
                assert rows[part][name]["mean"] == pytest.approx(sum(layers).item() / 2, rel=1e-4)
            total = torch.cat([grad.flatten() for grad in found[step].values()]).norm().item()
            assert rows["all parameters"][name]["mean"] == pytest.approx(total, rel=1e-4)
        numbers = rows["q_proj"]
        assert numbers["ratio"]["mean"] == numbers["diff"]["mean"] / numbers["transformer"]["mean"]
        assert set(rows[OWN[variant][0]]) == {"diff"}


@pytest.mark.parametrize(("steps", "expected"), [(0, [0]), (1, [0, 1]), (10, [0, 1, 10]), (250, [0, 1, 10, 100, 250])])
def test_measured_steps(steps: int, expected: list[int]) -> None:
    assert made(steps=steps).measured_steps == expected


def test_too_short_texts_are_refused(tmp_path: Path) -> None:
    for size in (0, 15):
        (tmp_path / "1.txt").write_text("a" * size)
        with pytest.raises(ValueError, match=rf" {size} bytes of text.*--data.*--length"):
            measured(tmp_path / "out", tmp_path / "1.txt", length=16)
