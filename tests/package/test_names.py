"""The classes' names are not those of transformers."""

import json
import logging
import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from transformers import PreTrainedModel
from transformers.utils.generic import find_labels

import diffllama
from diffllama.modeling_diff import modeling_diffllama
from diffllama.modeling_diff.configuration_diffllama import AUTO_MAP
from support import subprocess_runner
from support.tiny_models import VARIANTS, tiny_config, tiny_tokenizer, tokens


AUTO_CLASSES = [name for name in AUTO_MAP if name != "AutoConfig"]
HEADS = [name for name in AUTO_CLASSES if name != "AutoModel"]
PIPELINES = {
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
}
TASKS = PIPELINES | {"AutoModelForQuestionAnswering": "question-answering"}


def tiny(auto_class: str, variant: str = "v1") -> PreTrainedModel:
    """A tiny model of the class that an Auto class loads."""
    torch.manual_seed(0)
    return getattr(transformers, auto_class).from_config(tiny_config(variant)).eval()


@torch.no_grad()
def outputs(model: PreTrainedModel) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in model(tokens(2, 7), use_cache=False).to_tuple()])


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What transformers logs as a warning or worse."""
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


@pytest.mark.parametrize("auto_class", AUTO_CLASSES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_transformers_has_no_class_of_a_name_in_a_saved_folder(variant: str, auto_class: str, tmp_path: Path) -> None:
    tiny(auto_class, variant).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (architecture,) = config["architectures"]
    assert config["auto_map"] == AUTO_MAP
    assert AUTO_MAP[auto_class] == f"modeling_diffllama.{architecture}"
    names = [architecture, *(reference.partition(".")[2] for reference in config["auto_map"].values())]
    assert [name for name in names if hasattr(transformers, name)] == []


def test_classes_are_imported_by_the_names_that_transformers_has_too() -> None:
    for auto_class in AUTO_CLASSES:
        name = auto_class.replace("AutoModel", "DiffLlama" if "For" in auto_class else "DiffLlamaModel")
        model_class = getattr(diffllama, name)
        assert hasattr(transformers, name)
        assert model_class.__name__ == model_class.__qualname__ == name.replace("Diff", "Differential")
        assert getattr(modeling_diffllama, model_class.__name__) is model_class  # so it can be pickled


def test_a_pickled_model_is_the_same(tmp_path: Path) -> None:
    model = tiny("AutoModelForCausalLM")
    again = pickle.loads(pickle.dumps(model))
    assert type(again) is type(model)
    assert torch.equal(outputs(again), outputs(model))


@pytest.mark.parametrize("head", HEADS)
def test_transformers_finds_loss_and_labels_of_each_head_by_its_name(
    head: str, logged: pytest.LogCaptureFixture
) -> None:
    model = tiny(head)
    assert model.loss_type == head.removeprefix("AutoModel")
    assert callable(model.loss_function)
    assert logged.messages == []
    answers = ["start_positions", "end_positions"]
    assert find_labels(type(model)) == (answers if head == "AutoModelForQuestionAnswering" else ["labels"])


@pytest.mark.parametrize("head", PIPELINES)
def test_pipelines_know_what_each_head_is_for(head: str, logged: pytest.LogCaptureFixture) -> None:
    pipeline = transformers.pipeline(PIPELINES[head], model=tiny(head), tokenizer=tiny_tokenizer())
    assert type(pipeline.model).__name__ == AUTO_MAP[head].partition(".")[2]
    assert [message for message in logged.messages if "not supported" in message] == []


PROCESS = """
import json, sys
from pathlib import Path
if sys.argv[1] == "remote code":
    sys.modules["diffllama"] = None
else:
    import diffllama
import torch, transformers
from transformers.modelcard import TASK_MAPPING  # a Trainer's, also for smoothed labels
trust = {"trust_remote_code": True} if sys.argv[1] == "remote code" else {}
facts |= {"modules": {}, "names": {}, "tasks": {}}
for folder in sorted(Path().iterdir()):
    model = getattr(transformers, folder.name).from_pretrained(folder, **trust).eval()
    with torch.no_grad():
        found = model(torch.tensor(json.loads(sys.argv[2])), use_cache=False).to_tuple()
    facts["modules"][folder.name] = type(model).__module__
    facts["names"][folder.name] = name = type(model).__name__
    facts["tasks"][folder.name] = [task for task, names in TASK_MAPPING.items() if name in names.values()]
    torch.save(torch.cat([tensor.flatten() for tensor in found]), folder / "outputs")
    if folder.name in PIPELINES:
        transformers.pipeline(PIPELINES[folder.name], model=str(folder), **trust)
"""


@pytest.mark.parametrize("by", ["remote code", "package"])
def test_folders_load_by_their_code_and_by_the_package_without_a_complaint(by: str, tmp_path: Path) -> None:
    folders = tmp_path / "folders"
    expected, names, tasks = {}, {}, {}
    for variant, auto_class in zip(VARIANTS * 3, AUTO_CLASSES, strict=False):
        model = tiny(auto_class, variant)
        model.save_pretrained(folders / auto_class)
        tiny_tokenizer().save_pretrained(folders / auto_class)
        expected[auto_class] = outputs(model)
        names[auto_class] = AUTO_MAP[auto_class].partition(".")[2]
        tasks[auto_class] = [TASKS[auto_class]] if auto_class in TASKS else []
    known, printed = subprocess_runner.run(
        f"PIPELINES = {PIPELINES}\n{PROCESS}",
        by,
        json.dumps(tokens(2, 7).tolist()),
        cwd=folders,
        environment=os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"},
    )
    assert "not supported" not in printed
    home = "transformers_modules." if by == "remote code" else "diffllama."
    assert [module for module in known["modules"].values() if not module.startswith(home)] == []
    assert known["names"] == names
    assert known["tasks"] == tasks
    for folder, values in expected.items():  # V1's attention functions differ: `diff_attention`, remote code `sdpa`
        tolerance = 0.0 if by == "package" else 1e-5
        torch.testing.assert_close(torch.load(folders / folder / "outputs"), values, rtol=tolerance, atol=tolerance)
