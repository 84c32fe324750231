"""The classes' names are not those of transformers."""

import json
import logging
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from transformers import PreTrainedModel
from transformers.modelcard import TASK_MAPPING
from transformers.utils.generic import find_labels

import diffllama
from diffllama.modeling_diff import modeling_diffllama
from diffllama.modeling_diff.configuration_diffllama import AUTO_MAP
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
    """Return a tiny model of the class that an Auto class loads."""
    torch.manual_seed(0)
    return getattr(transformers, auto_class).from_config(tiny_config(variant)).eval()


@torch.no_grad()
def outputs(model: PreTrainedModel) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in model(tokens(2, 7), use_cache=False).to_tuple()])


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Warnings and errors that transformers logs."""
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


@pytest.mark.parametrize("auto_class", AUTO_CLASSES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_saved_folder_loads_as_our_class_of_which_transformers_has_no_name(
    variant: str, auto_class: str, tmp_path: Path
) -> None:
    model = tiny(auto_class, variant)
    model.save_pretrained(tmp_path)
    loaded = getattr(transformers, auto_class).from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    assert torch.equal(outputs(loaded), outputs(model))
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
        assert getattr(modeling_diffllama, model_class.__name__) is model_class  # so that it can be pickled


def test_pickled_model_is_the_same(tmp_path: Path) -> None:
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
    tasks = [task for task, names in TASK_MAPPING.items() if type(model).__name__ in names.values()]
    assert tasks == [TASKS[head]]  # a Trainer writes them into its card
    answers = ["start_positions", "end_positions"]
    assert find_labels(type(model)) == (answers if head == "AutoModelForQuestionAnswering" else ["labels"])


@pytest.mark.parametrize("head", PIPELINES)
def test_pipelines_know_what_each_head_is_for(head: str, logged: pytest.LogCaptureFixture) -> None:
    pipeline = transformers.pipeline(PIPELINES[head], model=tiny(head), tokenizer=tiny_tokenizer())
    assert type(pipeline.model).__name__ == AUTO_MAP[head].partition(".")[2]
    assert [message for message in logged.messages if "not supported" in message] == []
