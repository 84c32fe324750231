import ast
import copy
import inspect
import os
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.dynamic_module_utils import get_relative_imports
from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from diffllama import (
    DiffLlamaForCausalLM,
    DiffLlamaForQuestionAnswering,
    DiffLlamaForSequenceClassification,
    DiffLlamaForTokenClassification,
    DiffLlamaModel,
    modeling_diff,
)
from diffllama.hub_cards.code import write_code
from diffllama.modeling_diff.modeling_diffllama import DiffLlamaAttention, DiffLlamaPreTrainedModel
from support import subprocess_runner
from support.tiny_models import EVERY_FEATURE, VARIANTS, tiny_config, tiny_model, tiny_tokenizer, tokens


SOURCES = sorted(f for f in Path(modeling_diff.__file__).parent.glob("*.py") if f.name != "__init__.py")

# --- a saved folder in a process that has neither diffllama nor triton ----------------------------------------------

MODELS = {
    "AutoModelForCausalLM": DiffLlamaForCausalLM,
    "AutoModelForSequenceClassification": DiffLlamaForSequenceClassification,
    "AutoModelForTokenClassification": DiffLlamaForTokenClassification,
    "AutoModelForQuestionAnswering": DiffLlamaForQuestionAnswering,
}
"""Auto class, and name of its folder -> what the package loads from there."""

FIELDS = {"AutoModelForCausalLM": EVERY_FEATURE}
"""Name of the folder -> fields of its configuration; the others are plain."""

PROMPT = "w6 w7 w8 w9"

PROCESS = """
import json, sys
from pathlib import Path

network = []
def refuse(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto"):
        network.append(event)
        raise OSError("there is no network")
sys.addaudithook(refuse)
for name in [name for name in sys.modules if name.split(".")[0] == "triton"]:
    del sys.modules[name]  # which torch has
sys.modules["diffllama"] = sys.modules["triton"] = None  # from here on importing them fails

import torch, transformers
from safetensors.torch import load_file, save_file
from transformers.modelcard import TASK_MAPPING  # of a Trainer's cards

folder, saved, prompt = *map(Path, sys.argv[1:3]), sys.argv[3]
input_ids = load_file(folder / "input_ids.safetensors")["input_ids"]
models = sorted(file.parent for file in folder.rglob("config.json"))
facts |= {"modules": {}, "texts": {}, "known": {}, "refusals": []}
tensors = {}

def look(name, model):
    body = getattr(model, "model", model)
    facts["modules"][name] = sorted({type(part).__module__ for part in (model, body, model.config)})
    with torch.no_grad():
        outputs = model(input_ids, use_cache=False).to_tuple()
    tensors[name] = torch.cat([tensor.flatten() for tensor in outputs])

for path in models:
    auto_class = getattr(transformers, path.name)
    try:
        auto_class.from_pretrained(path, trust_remote_code=False)
    except ValueError as error:
        facts["refusals"].append(str(error))
config = transformers.AutoConfig.from_pretrained(models[0], trust_remote_code=True)
facts["modules"]["AutoConfig"] = [type(config).__module__]
for name in ("AutoModel", *(path.name for path in models)):
    try:
        getattr(transformers, name).from_config(config)
    except ValueError as error:
        facts["refusals"].append(str(error))

for path in models:
    name, auto_class = str(path.relative_to(folder)), getattr(transformers, path.name)
    model = auto_class.from_pretrained(path, trust_remote_code=True)
    look(name, model)
    model.save_pretrained(saved / name)
    built = auto_class.from_config(model.config, trust_remote_code=True)
    again = auto_class.from_config(model.config)  # trusted by now
    facts["modules"][f"{name} from a configuration"] = sorted({type(m).__module__ for m in (built, built.model, again)})
    if path.name == "AutoModelForCausalLM":
        tensors[f"{name} generated"] = model.generate(input_ids, max_new_tokens=8, do_sample=False)
        look(f"{name} body", transformers.AutoModel.from_pretrained(path, trust_remote_code=True))
        generator = transformers.pipeline("text-generation", model=str(path), trust_remote_code=True)
        facts["modules"][f"{name} pipeline"] = [type(generator.model).__module__]
        facts["texts"][name] = generator(prompt, max_new_tokens=8, do_sample=False)[0]["generated_text"]
    elif "Classification" in name:
        task = "token-classification" if "Token" in name else "text-classification"
        transformers.pipeline(task, model=str(path), trust_remote_code=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=True)
    tokenizer.save_pretrained(saved / name)
    names = (model_class for task, classes in TASK_MAPPING.items() for model_class in classes.values())
    facts["known"][name] = type(model).__name__ in names

save_file(tensors, "tensors.safetensors")
save_file({"input_ids": input_ids}, saved / "input_ids.safetensors")
imported = [name for name, module in sys.modules.items() if module and name.split(".")[0] in ("diffllama", "triton")]
facts |= {"network": network, "imported": imported}
"""


@dataclass
class Answers:
    """Results of a fresh process that loaded `folder` and saved it to `saved`."""

    folder: Path
    saved: Path
    untouched: bool
    tensors: dict[str, torch.Tensor]
    facts: dict[str, Any]
    printed: str


def files(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Return contents and times of all files of a folder."""
    found = sorted(f for f in folder.rglob("*") if f.is_file())
    return {str(f.relative_to(folder)): (f.read_bytes(), f.stat().st_mtime_ns) for f in found}


def fresh_process(folder: Path, work: Path) -> Answers:
    """Run `PROCESS` on `folder` with an empty cache of remote code, in its own folder."""
    (work / "elsewhere").mkdir(parents=True)
    before = files(folder)
    env = os.environ | {"HF_MODULES_CACHE": str(work / "modules"), "HF_HOME": str(work / "hub"), "HF_HUB_OFFLINE": "1"}
    # without a terminal, the question whether to trust the code is an error
    facts, printed = subprocess_runner.run(
        PROCESS, folder, work / "saved", PROMPT, environment=env, cwd=work / "elsewhere"
    )
    tensors = load_file(work / "elsewhere" / "tensors.safetensors")
    return Answers(folder, work / "saved", files(folder) == before, tensors, facts, printed)


@dataclass
class Story:
    """Folders and outputs of the package, and of two fresh processes, one after the other."""

    expected: dict[str, torch.Tensor]
    texts: dict[str, str]
    processes: list[Answers]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    """The package saves every model, one process loads and saves them, another one loads the result."""
    work, input_ids = tmp_path_factory.mktemp("story"), tokens(2, 13)
    folder, expected, texts, words = work / "package", {}, {}, tiny_tokenizer()
    for variant, (auto_class, model_class) in product(VARIANTS, MODELS.items()):
        torch.manual_seed(1)
        config, name = tiny_config(variant, **FIELDS.get(auto_class, {})), f"{variant}/{auto_class}"
        model = model_class._from_config(config, attn_implementation="sdpa").eval()
        model.save_pretrained(folder / name)
        words.save_pretrained(folder / name)
        with torch.no_grad():
            outputs = model(input_ids, use_cache=False).to_tuple()
            expected[name] = torch.cat([tensor.flatten() for tensor in outputs])
            if auto_class == "AutoModelForCausalLM":
                expected[f"{name} body"] = model.model(input_ids, use_cache=False).last_hidden_state.flatten()
                expected[f"{name} generated"] = model.generate(input_ids, max_new_tokens=8, do_sample=False)
                prompt = words(PROMPT, return_tensors="pt", return_token_type_ids=False)
                texts[name] = words.decode(model.generate(**prompt, max_new_tokens=8, do_sample=False)[0])
    save_file({"input_ids": input_ids}, folder / "input_ids.safetensors")
    first = fresh_process(folder, work / "first")
    return Story(expected, texts, [first, fresh_process(first.saved, work / "second")])


@pytest.fixture(params=[0, 1], ids=["saved by the package", "saved by remote code"])
def answers(request: pytest.FixtureRequest, story: Story) -> Answers:
    """Results of each of the two processes."""
    return story.processes[request.param]


def test_exported_folder_has_three_files_of_at_most_1000_lines(tmp_path: Path) -> None:
    write_code(tmp_path)
    code = {file.name: len(file.read_text().splitlines()) for file in tmp_path.glob("*.py")}
    assert set(code) == {"configuration_diffllama.py", "differential_attention.py", "modeling_diffllama.py"}
    assert sum(code.values()) <= 1000


class TestFolder:
    def test_every_auto_class_computes_the_packages_bits(self, story: Story, answers: Answers) -> None:
        assert set(answers.tensors) == set(story.expected)
        assert [name for name in story.expected if not torch.equal(answers.tensors[name], story.expected[name])] == []

    def test_pipeline_continues_a_prompt_as_the_package_does(self, story: Story, answers: Answers) -> None:
        for name, text in story.texts.items():
            written, expected = (re.findall(r"w\d+", each) for each in (answers.facts["texts"][name], text))
            assert written == expected
            assert len(expected) > len(PROMPT.split())

    def test_pipelines_and_cards_know_what_each_head_is_for(self, answers: Answers) -> None:
        assert "not supported" not in answers.printed
        assert set(answers.facts["known"].values()) == {True}

    def test_models_bodies_and_configurations_come_from_the_folder(self, answers: Answers) -> None:
        assert len(answers.facts["modules"]) == 1 + len(VARIANTS) * (2 * len(MODELS) + 2)
        for name, modules in answers.facts["modules"].items():
            # never transformers' `DiffLlamaModel`, which is another architecture
            assert [m for m in modules if not re.fullmatch(r"transformers_modules\..+diffllama", m)] == [], name

    def test_without_trust_nothing_is_loaded_and_nothing_built(self, answers: Answers) -> None:
        assert len(answers.facts["refusals"]) == 1 + 2 * len(VARIANTS) * len(MODELS)
        for refusal in answers.facts["refusals"]:
            assert "contains custom code which must be executed" in refusal

    def test_neither_the_package_nor_triton_is_imported(self, answers: Answers) -> None:
        assert answers.facts["imported"] == []

    def test_no_network_is_attempted(self, answers: Answers) -> None:
        assert answers.facts["network"] == []

    def test_loading_writes_nothing_into_it(self, answers: Answers) -> None:
        assert answers.untouched

    def test_folder_is_saved_again_byte_for_byte(self, answers: Answers) -> None:
        before, after = files(answers.folder), files(answers.saved)
        assert set(before) == set(after)
        changed = {Path(name).name for name in before if before[name][0] != after[name][0]}
        assert changed <= {"tokenizer_config.json"}  # transformers adds options of loading

    def test_its_code_is_the_packages_byte_for_byte(self, answers: Answers) -> None:
        for folder in answers.saved.glob("v?/*"):
            code = {f.name: f.read_bytes() for f in folder.glob("*.py")}
            assert code == {f.name: f.read_bytes() for f in SOURCES}


# --- what the Hub's loader reads from the source text ---------------------------------------------------------------


@pytest.fixture(params=SOURCES, ids=lambda f: f.name)
def source(request: pytest.FixtureRequest) -> Path:
    """Each file of a Hub repository."""
    return request.param


def imports(path: Path) -> Iterator[tuple[int, str, list[str]]]:
    """Return level, module and name of every import in a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield node.level, node.module or "", [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            yield from ((0, alias.name, []) for alias in node.names)


class TestSource:
    def test_relative_imports_name_files_of_the_folder(self, source: Path) -> None:
        names = {f.stem for f in SOURCES}
        wrong = [
            (level, module) for level, module, _ in imports(source) if level and (level, module in names) != (1, True)
        ]
        assert wrong == []

    def test_loader_finds_its_relative_imports_and_takes_no_other_line_for_one(self, source: Path) -> None:
        assert set(get_relative_imports(source)) == {module for level, module, _ in imports(source) if level}

    def test_modeling_file_imports_every_other_one(self) -> None:
        """transformers 5.6 copies the files that a file imports, but not their imports."""
        path = SOURCES[0].parent / "modeling_diffllama.py"
        imported = {module for level, module, _ in imports(path) if level}
        assert imported == {f.stem for f in SOURCES} - {path.stem}

    def test_absolute_imports_are_torch_transformers_hub_or_standard_library(self, source: Path) -> None:
        allowed = {"torch", "transformers", "huggingface_hub", *sys.stdlib_module_names}
        assert {module.split(".")[0] for level, module, _ in imports(source) if not level} - allowed == set()

    def test_code_runs_no_text_opens_no_file_and_has_no_way_to_the_system(self, source: Path) -> None:
        names = {node.id for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.Name)}
        modules = {module.split(".")[0] for _, module, _ in imports(source)}
        assert names & {"eval", "exec", "compile", "open", "__import__", "input", "globals"} == set()
        system = (
            "builtins ctypes http importlib io marshal os pathlib pickle runpy shutil socket subprocess sys tempfile"
        )
        assert modules & {*system.split(), "urllib"} == set()

    def test_code_starts_with_copyright_and_license(self, source: Path) -> None:
        header = r"# Copyright \d{4} The diffllama authors\.\n# SPDX-License-Identifier: Apache-2\.0\n"
        assert re.match(header, source.read_text())


# --- what serving engines read from the model -----------------------------------------------------------------------


def calls(tree: ast.AST, function: str) -> list[ast.Call]:
    """Return the calls of the expression `function` in a piece of code."""
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == function]


class TestEngineContract:
    tree = ast.parse(textwrap.dedent(inspect.getsource(DiffLlamaAttention)))

    def test_attention_is_one_call_of_the_one_interface_with_its_scaling(self) -> None:
        (lookup,) = calls(self.tree, "ALL_ATTENTION_FUNCTIONS.get_interface")
        assigned = [s for s in ast.walk(self.tree) if isinstance(s, ast.Assign | ast.AnnAssign) and s.value is lookup]
        (target,) = assigned[0].targets if isinstance(assigned[0], ast.Assign) else [assigned[0].target]
        (call,) = calls(self.tree, target.id)
        assert {k.arg: ast.unparse(k.value) for k in call.keywords}["scaling"] == "self.scaling"
        assert ast.unparse(call.args[0]) == "self"

    @pytest.mark.parametrize("variant", VARIANTS)
    def test_three_linear_layers_take_the_hidden_states_themselves(self, variant: str) -> None:
        layers = {name for name, module in self.layer(variant).named_children() if isinstance(module, nn.Linear)}
        taking = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and any(ast.unparse(argument) == "hidden_states" for argument in node.args):
                taking.append(ast.unparse(node.func).removeprefix("self."))
        assert sorted(name for name in taking if name in layers) == ["k_proj", "q_proj", "v_proj"]
        assert layers - set(taking) == ({"o_proj"} if variant == "v1" else {"lambda_proj", "o_proj"})

    @staticmethod
    def layer(variant: str, **fields: Any) -> DiffLlamaAttention:
        return tiny_model(variant, **fields).model.layers[1].self_attn

    @pytest.mark.parametrize(("heads", "key_value_heads", "width"), [(4, 2, 16), (6, 1, 20)])
    @pytest.mark.parametrize("variant", VARIANTS)
    def test_attributes_describe_the_attention_call(
        self, variant: str, heads: int, key_value_heads: int, width: int
    ) -> None:
        layer = self.layer(variant, num_attention_heads=2 * heads, num_key_value_heads=key_value_heads, head_dim=width)
        described = (layer.head_dim, layer.num_key_value_groups, layer.is_causal, layer.layer_idx)
        assert described == (width, 2 * heads // key_value_heads, True, 1)
        assert type(layer.layer_idx) is int
        assert type(layer.scaling) is float
        assert layer.scaling == (width // 2 if variant == "v1" else width) ** -0.5

    @pytest.mark.parametrize(
        ("fields", "heads", "windows"),
        [({}, 8, (None, None)), (EVERY_FEATURE, 6, (5, None))],
        ids=["plain", "every feature"],
    )
    @pytest.mark.parametrize("variant", VARIANTS)
    def test_engines_attention_gets_one_ordinary_call_for_each_layer(
        self,
        variant: str,
        fields: dict[str, Any],
        heads: int,
        windows: tuple[int | None, ...],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        seen = []

        def engine(
            module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **kwargs: Any
        ) -> tuple[torch.Tensor, None]:
            told = (kwargs["scaling"], kwargs["sliding_window"], kwargs["instances"])
            seen.append((module.layer_idx, query.shape, key.shape, value.shape, *told))
            if mask is None and kwargs["sliding_window"] is not None:  # engines build masks from these arguments
                mask = torch.ones(7, 7, dtype=torch.bool).tril().triu(1 - kwargs["sliding_window"])
            return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, **kwargs)

        model = tiny_model(variant, attn_implementation="sdpa", **fields)
        expected = model(tokens(2, 7), use_cache=False).logits
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "engine", engine)
        model.config._attn_implementation = "engine"
        position_ids = torch.arange(7).expand(2, 7)
        logits = model(tokens(2, 7), position_ids=position_ids, use_cache=False, instances="engine's own").logits
        shapes = ((2, heads, 7, 16), (2, 2, 7, 16), (2, 2, 7, 16))
        scaling = (8 if variant == "v1" else 16) ** -0.5
        assert seen == [(i, *shapes, scaling, windows[i], "engine's own") for i in range(2)]
        torch.testing.assert_close(logits, expected)

    @pytest.mark.parametrize("model_class", [DiffLlamaPreTrainedModel, DiffLlamaModel, *MODELS.values()])
    def test_models_say_what_they_support(self, model_class: type[DiffLlamaPreTrainedModel]) -> None:
        for flag in ("attention_backend", "sdpa", "flash_attn", "flex_attn"):
            assert getattr(model_class, f"_supports_{flag}") is True, flag
        assert model_class._can_compile_fullgraph is True

    def test_tensor_parallel_plan_covers_what_works_on_heads_in_styles_that_transformers_knows(self) -> None:
        model = tiny_model("v2", use_qk_norm=True).model
        plan, covered = model.config.base_model_tp_plan, set()
        modules = {
            name
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) or name.endswith(("q_norm", "k_norm"))
        }
        for pattern in plan:
            matched = {name for name in modules if fnmatch(name, pattern)}
            assert matched, pattern
            covered |= matched
        assert covered == modules
        assert set(plan.values()) <= set(ALL_PARALLEL_STYLES)
        assert plan["layers.*.self_attn.lambda_proj"] == "colwise"
        assert plan["layers.*.self_attn.o_proj"] == "rowwise"

    def test_pipeline_parallel_plan_names_the_models_parts_in_order(self) -> None:
        model = tiny_model().model
        children = [name for name, _ in model.named_children() if name != "rotary_emb"]
        assert list(model.config.base_model_pp_plan) == children == ["embed_tokens", "layers", "norm"]

    def test_rotary_embedding_is_recognised_by_name(self) -> None:
        assert "RotaryEmbedding" in type(tiny_model().model.rotary_emb).__name__

    def test_body_takes_ids_or_embeddings_with_positions_and_anything_else(self) -> None:
        parameters = inspect.signature(DiffLlamaModel.forward).parameters
        assert {"input_ids", "inputs_embeds", "position_ids"} <= set(parameters)
        assert any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())

    def test_bodys_first_output_is_the_hidden_states_that_the_head_reads(self) -> None:
        model = tiny_model()
        hidden_states = model.model(tokens(2, 7), return_dict=False)[0]
        assert torch.equal(model.lm_head(hidden_states), model(tokens(2, 7)).logits)

    @pytest.mark.parametrize("implementation", ["eager", "sdpa"])
    @pytest.mark.parametrize(
        "fields",
        [
            {"num_key_value_heads": 4},
            {"num_key_value_heads": 2, "use_qk_norm": True},
            {"num_attention_heads": 6, "num_noise_heads": 2},
        ],
        ids=str,
    )
    @pytest.mark.parametrize("variant", VARIANTS)
    @torch.no_grad()
    def test_two_halves_of_the_heads_sum_to_the_whole_layer(
        self, variant: str, fields: dict[str, Any], implementation: str
    ) -> None:
        model = tiny_model(variant, torch.float64, implementation, **fields)
        whole, n = model.model.layers[1].self_attn, 9
        hidden_states = torch.randn(2, n, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        positions = model.model.rotary_emb(hidden_states, torch.arange(n)[None])
        mask = torch.full((n, n), -torch.inf, dtype=torch.float64).triu(1)[None, None]
        total = torch.zeros_like(hidden_states)
        for half in (0, 1):
            part = copy.deepcopy(whole)
            for name, module in part.named_children():
                if isinstance(module, nn.Linear):
                    module.weight = nn.Parameter(module.weight.chunk(2, dim=int(name == "o_proj"))[half])
            total += part(hidden_states, positions, mask)[0]
        torch.testing.assert_close(total, whole(hidden_states, positions, mask)[0], rtol=0, atol=1e-10)

    def test_group_in_two_processes_is_refused_by_field(self) -> None:
        model = tiny_model(num_attention_heads=6, num_noise_heads=2)
        query = model.model.layers[0].self_attn.q_proj
        query.weight = nn.Parameter(query.weight.chunk(3)[0])
        with pytest.raises(ValueError, match="`num_noise_heads` must be a multiple of the tensor-parallel size, got 2"):
            model(tokens(1, 5))
