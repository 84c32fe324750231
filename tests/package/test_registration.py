"""Registration with transformers' Auto classes, each test in a process of its own."""

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import diffllama
from diffllama import DiffLlamaConfig
from support import subprocess_runner
from support.tiny_models import VARIANTS, tiny_config, tiny_model


TINY = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
TINY |= {"num_attention_heads": 8, "num_key_value_heads": 2, "pad_token_id": 0}
AUTO_CLASSES = {
    "AutoModel": "LlamaModel",
    "AutoModelForCausalLM": "LlamaForCausalLM",
    "AutoModelForSequenceClassification": "LlamaForSequenceClassification",
    "AutoModelForTokenClassification": "LlamaForTokenClassification",
    "AutoModelForQuestionAnswering": "LlamaForQuestionAnswering",
}
"""Auto class -> name of its class, ours behind `OURS` and transformers' behind `THEIRS`."""
PRELUDE = f"""
import sys
def name(thing):
    thing = thing if isinstance(thing, type) else type(thing)
    return f"{{thing.__module__}}.{{thing.__name__}}"
def outcome(function, *args, **kwargs):
    try:
        return name(function(*args, **kwargs))
    except Exception as error:
        return f"{{type(error).__name__}}: {{error}}"
TINY = {TINY!r}
AUTO_CLASSES = {list(AUTO_CLASSES)!r}
"""
OURS = "diffllama.modeling_diff.modeling_diffllama.Differential"
OUR_CONFIG = f"diffllama.modeling_diff.configuration_diffllama.{DiffLlamaConfig.__name__}"
THEIRS = "transformers.models.diffllama.modeling_diffllama.Diff"


def facts(code: str, **environment: str) -> dict[str, Any]:
    """Run code that fills the dictionary `facts`, in a fresh process without a terminal."""
    return subprocess_runner.facts(PRELUDE + code, environment)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with a tiny V1 and a tiny V2 model, saved by this package."""
    root = tmp_path_factory.mktemp("saved")
    for variant in VARIANTS:
        tiny_model(variant).save_pretrained(root / variant)
    return root


def test_import_diffllama_is_free_and_the_command_line_nearly() -> None:
    code = """
import json
facts = {}
import diffllama
facts["imported"] = sorted({"torch", "transformers", "huggingface_hub"} & set(sys.modules))
facts["version"] = diffllama.__version__
facts["missing"] = sorted(set(diffllama.__all__) - set(dir(diffllama)))
facts["unknown"] = [outcome(getattr, diffllama, name) for name in ("Nonesuch", "DiffLlama", "_models", "llama")]
facts["still"] = sorted({"torch", "transformers", "huggingface_hub"} & set(sys.modules))
import diffllama.cli
facts["by the command line"] = sorted({"torch", "transformers"} & set(sys.modules))
import diffllama.configuration
facts["by the presets"] = sorted({"torch", "transformers"} & set(sys.modules))
print(json.dumps(facts))
"""
    command = [sys.executable, "-c", PRELUDE + code]  # without torch, which `subprocess_runner` imports
    known = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    assert known["version"] == diffllama.__version__
    assert known["imported"] == known["still"] == known["missing"] == []
    assert known["by the command line"] == known["by the presets"] == []
    assert known["unknown"] == [
        f"AttributeError: module 'diffllama' has no attribute {name!r}"
        for name in ("Nonesuch", "DiffLlama", "_models", "llama")
    ]


IMPORTS = {
    "then AutoConfig": "import diffllama\nfrom transformers import AutoConfig",
    "after AutoModel": "from transformers import AutoModelForCausalLM\nimport diffllama",
    "after a search for AutoConfig, then AutoModel": """
import diffllama, importlib.util
for module in ("transformers.models.auto.configuration_auto", "diffllama.modeling_diff.configuration_diffllama"):
    importlib.util.find_spec(module)
from transformers import AutoModel
""",
    "in several threads": """
import diffllama, importlib, threading
failures, start = [], threading.Barrier(5)
def import_and_make(module):
    try:
        start.wait()
        importlib.import_module(module)
        from transformers import AutoConfig, AutoModelForCausalLM
        AutoModelForCausalLM.from_config(AutoConfig.for_model("diff_llama", **TINY))
    except BaseException as error:
        failures.append(f"{module}: {error!r}")
modules = ("diffllama.modeling_diff.configuration_diffllama", "diffllama.modeling_diff.modeling_diffllama",
           "transformers.models.auto",
           "transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama")
threads = [threading.Thread(target=import_and_make, args=[module]) for module in modules]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert not failures, failures
""",
    "model first": "from diffllama import DiffLlamaForCausalLM",
}


@pytest.mark.parametrize("imports", IMPORTS.values(), ids=IMPORTS)
def test_auto_classes_give_our_classes_however_diffllama_is_imported(imports: str) -> None:
    known = facts(f"""
{imports}
import transformers
config = transformers.AutoConfig.for_model("diff_llama", **TINY)
facts["config"] = name(config)
facts["models"] = {{auto: outcome(getattr(transformers, auto).from_config, config) for auto in AUTO_CLASSES}}
theirs = transformers.DiffLlamaConfig(**(TINY | {{"head_dim": 8}}))
facts["their configs"] = [name(theirs), name(transformers.AutoConfig.for_model("diffllama"))]
facts["their models"] = {{auto: outcome(getattr(transformers, auto).from_config, theirs) for auto in AUTO_CLASSES}}
""")
    assert known["config"] == OUR_CONFIG
    assert known["models"] == {auto: OURS + name for auto, name in AUTO_CLASSES.items()}
    assert known["their configs"] == ["transformers.models.diffllama.configuration_diffllama.DiffLlamaConfig"] * 2
    assert known["their models"] == {auto: THEIRS + name for auto, name in AUTO_CLASSES.items()}


def test_without_diffllama_and_trust_a_folder_is_refused_and_never_becomes_transformers_model(
    folder: Path, tmp_path: Path
) -> None:
    """Neither does a trusted configuration of remote code."""
    for variant in VARIANTS:
        config = json.loads((folder / variant / "config.json").read_text())
        del config["auto_map"]
        (tmp_path / variant).mkdir()
        (tmp_path / variant / "config.json").write_text(json.dumps(config))
    known = facts(
        f"""
sys.modules["diffllama"] = None
import transformers
autos = [getattr(transformers, name) for name in ("AutoConfig", *AUTO_CLASSES)]
for root in {[str(folder), str(tmp_path)]}:
    for variant in ("v1", "v2"):
        facts[f"{{root}}/{{variant}}"] = [outcome(auto.from_pretrained, f"{{root}}/{{variant}}") for auto in autos]

config = transformers.AutoConfig.from_pretrained({str(folder / "v1")!r}, trust_remote_code=True)
facts["config"] = name(config)
facts["untrusted"] = {{auto: outcome(getattr(transformers, auto).from_config, config) for auto in AUTO_CLASSES}}
facts["trusted"] = {{
    auto: outcome(getattr(transformers, auto).from_config, config, trust_remote_code=True) for auto in AUTO_CLASSES
}}
""",
        HF_MODULES_CACHE=str(tmp_path / "modules"),
    )
    for root, told in ((folder, "trust_remote_code=True"), (tmp_path, "`diff_llama`")):
        for variant in VARIANTS:
            outcomes = known[f"{root}/{variant}"]
            assert len(outcomes) == 6
            assert [o for o in outcomes if not (o.startswith("ValueError: ") and told in o)] == []
    assert known["config"].startswith("transformers_modules.")
    for auto, name in AUTO_CLASSES.items():
        assert known["trusted"][auto].startswith("transformers_modules.")
        assert known["trusted"][auto].endswith(f".modeling_diffllama.Differential{name}")
        assert not known["untrusted"][auto].startswith("transformers.models.")


def test_pickled_configuration_gives_our_models(tmp_path: Path) -> None:
    (tmp_path / "pickle").write_bytes(pickle.dumps(tiny_config()))
    known = facts(f"""
import pathlib, pickle
config = pickle.loads(pathlib.Path({str(tmp_path / "pickle")!r}).read_bytes())
import transformers
facts["models"] = {{auto: outcome(getattr(transformers, auto).from_config, config) for auto in AUTO_CLASSES}}
""")
    assert known["models"] == {auto: OURS + name for auto, name in AUTO_CLASSES.items()}


def test_names_of_the_package_are_the_classes_themselves() -> None:
    from diffllama.conversion.engine import convert
    from diffllama.modeling_diff import configuration_diffllama, modeling_diffllama

    assert diffllama.DiffLlamaConfig is configuration_diffllama.DiffLlamaConfig
    assert diffllama.convert is convert
    for name in diffllama.__all__:
        if name.startswith("DiffLlama") and name not in ("DiffLlamaConfig", "DiffLlamaError"):
            assert getattr(diffllama, name) is getattr(modeling_diffllama, name)
    assert diffllama.modeling_diff.modeling_diffllama is modeling_diffllama
    namespace: dict[str, Any] = {}
    exec("from diffllama import *", namespace)
    assert set(diffllama.__all__) <= set(namespace)
    assert sorted(diffllama.__all__) == sorted(set(diffllama.__all__))
