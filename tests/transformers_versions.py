"""Loads folders of ours with several versions of transformers and compares every bit.

    python tests/transformers_versions.py 5.6.0=.venv-transformers-5.6.0/bin/python 5.15.1=.venv-5.15.1/bin/python

This process has the newest version and the package. It writes folders and their outputs. Then each named version, and
the newest, loads them by the folders' own code, in a process that cannot import the package.
"""

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise, product
from pathlib import Path
from typing import Any


if __name__ == "__main__" and "--check" in sys.argv:
    sys.modules["diffllama"] = None  # importing it fails from here on

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StaticCache,
)
from transformers.utils import logging


IMPLEMENTATIONS = ("eager", "sdpa")
TEXT = "w6 w7 w8 w9 unknown </s> w96"
CHAT = [{"role": "user", "content": "w6 w7"}, {"role": "assistant", "content": "w8"}, {"role": "user", "content": "w9"}]
CACHES = {
    "no cache": None,
    "dynamic cache": DynamicCache,
    "static cache": lambda config: StaticCache(config=config, max_cache_len=20),
}
WRITING: dict[str, dict[str, Any]] = {
    "text, no cache": {"use_cache": False},
    "text, dynamic cache": {},
    "text, static cache": {"cache_implementation": "static"},
    "sampled text, dynamic cache": {"do_sample": True},
}

torch.set_num_threads(1)
logging.disable_progress_bar()


def may_round(name: str, windowed: bool) -> bool:
    """Whether transformers' versions call torch's attention kernel otherwise for this, so that it sums otherwise.

    Under sdpa, a step with one token and a mask (of padding, a window or a static cache) repeats keys and values for
    grouped queries up to transformers 5.15, and in 5.23 the queries become rows instead (`pack_gqa`). And a prompt read
    into a static cache had a mask over the whole cache in 5.6, and is causal attention to the prompt since. All else
    is one sequence of torch's operations in every version, so its bits are equal.
    """
    masked = windowed or "padding" in name or "static cache" in name
    return name.startswith("sdpa") and "no cache" not in name and masked


@torch.no_grad()
def logits(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Compute the logits of 13 tokens, at once, or six and then one by one."""
    input_ids = torch.randint(6, 97, (2, 13), generator=torch.Generator().manual_seed(0))
    padding = torch.ones_like(input_ids)
    padding[1, :4] = 0
    results = {}
    for implementation, (kind, make_cache) in product(IMPLEMENTATIONS, CACHES.items()):
        model.set_attn_implementation(implementation)
        for behind, mask in (("", None), (", behind padding", padding)):
            cache, parts = make_cache and make_cache(config=model.config), []
            for start, end in pairwise((0, 6, *range(7, 14)) if cache is not None else (0, 13)):
                seen = None if mask is None else mask[:, :end]
                inputs = {"attention_mask": seen, "past_key_values": cache, "use_cache": cache is not None}
                parts.append(model(input_ids[:, start:end], **inputs).logits)
            results[f"{implementation}, {kind}{behind}"] = torch.cat(parts, dim=1)
    model.set_attn_implementation("eager")
    results["maps"] = torch.stack(model(input_ids, output_attentions=True).attentions)
    return results


@torch.no_grad()
def texts(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, torch.Tensor]:
    """Return the tokens of a text, and a model's text in which rounding cannot decide between two words."""
    chat = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    batch = tokenizer([TEXT, "w6"], padding=True, return_tensors="pt", return_token_type_ids=False)
    results = {
        "tokens": batch.input_ids,
        "chat": torch.tensor(list(chat.encode())),
        "words": torch.tensor(list(tokenizer.decode(range(97)).encode())),
    }
    for implementation, (kind, options) in product(IMPLEMENTATIONS, WRITING.items()):
        name = f"{implementation}, {kind}"
        if not may_round(name, model.config.sliding_window is not None):
            model.set_attn_implementation(implementation)
            torch.manual_seed(0)
            rows = 2 if implementation == "eager" else 1  # the second row has left padding
            inputs = {key: value[:rows] for key, value in batch.items()}
            results[name] = model.generate(**inputs, max_new_tokens=12, **{"do_sample": False} | options)
    return results


def make(work: Path) -> None:
    """Export models of every kind to `work`, and beside each folder the package's outputs, also in float64."""
    from diffllama.hub_cards.hub_folder import export
    from support.tiny_models import EVERY_FEATURE, VARIANTS, tiny_model, tiny_tokenizer

    features: dict[str, dict[str, Any]] = {"plain": {}, "every_feature": EVERY_FEATURE}
    for variant, feature, dtype in product(VARIANTS, features, (torch.float32, torch.bfloat16)):
        folder = work / f"{variant}_{feature}_{str(dtype).removeprefix('torch.')}"
        saved = work.parent / "saved" / folder.name
        tiny_model(variant, dtype, **features[feature]).save_pretrained(saved)
        tiny_tokenizer().save_pretrained(saved)
        export(saved, folder)
        model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        save_file(logits(model) | texts(model, tokenizer), f"{folder}.expected")
        save_file(logits(model.double()), f"{folder}.float64")


def check(work: Path, exactly: bool) -> dict[str, Any]:
    """Load every folder in `work` by its code. Returns the differences, and facts about this process."""
    equal, rounded, faults = 0, 0, []
    for folder in sorted(path for path in work.iterdir() if path.is_dir()):
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
        if not type(model).__module__.startswith("transformers_modules."):
            faults.append(f"{folder.name}: the model is {type(model).__module__}'s, not the folder's")
        windowed = model.config.sliding_window is not None
        expected, float64 = load_file(f"{folder}.expected"), load_file(f"{folder}.float64")
        found = logits(model) | texts(model, tokenizer)
        faults += [f"{folder.name}: {name} is missing" for name in expected.keys() ^ found.keys()]
        for name in sorted(expected.keys() & found.keys()):
            mine, theirs = expected[name], found[name]
            if mine.dtype != theirs.dtype or mine.shape != theirs.shape:
                faults.append(f"{folder.name}: {name} is {theirs.dtype} {list(theirs.shape)}, not {list(mine.shape)}")
            elif torch.equal(mine, theirs):
                equal += 1
            elif (
                may_round(name, windowed)
                and not exactly
                and error(theirs, float64[name]) <= 2 * error(mine, float64[name])
            ):
                rounded += 1
            else:
                faults.append(f"{folder.name}: {name} differs by up to {error(theirs, mine):.1e}")
    versions = {name: sys.modules[name].__version__ for name in ("transformers", "torch", "huggingface_hub")}
    return {"versions": versions, "equal": equal, "rounded": rounded, "faults": faults}


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference of two tensors."""
    return float((found.double() - expected.double()).abs().max())


def run(python: str, work: Path, caches: Path, exactly: bool) -> dict[str, Any]:
    """Run `check` in a fresh process of an environment."""
    env = os.environ | {"HF_MODULES_CACHE": str(caches), "HF_HOME": str(caches), "HF_HUB_OFFLINE": "1"}
    command = [python, __file__, "--check", work, *(["--exactly"] if exactly else [])]
    process = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False)
    if process.returncode != 0:
        raise SystemExit(f"{python} failed.")
    return json.loads(process.stdout.splitlines()[-1])


def main(environments: list[str]) -> None:
    """Write the folders, load them in every environment, and fail if anything differs."""
    newest = importlib.metadata.version("transformers")
    wanted = dict(environment.split("=", 1) for environment in environments) | {newest: sys.executable}
    if len(wanted) != 3:
        raise SystemExit(f"Name two versions besides the newest, {newest}, as VERSION=PYTHON; got {environments}.")
    faults = []
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary) / "folders"
        work.mkdir()
        make(work)
        for version, python in wanted.items():
            start = time.perf_counter()
            report = run(python, work, Path(temporary) / version, exactly=version == newest)
            found = report["versions"]["transformers"]
            faults += [f"{python} has transformers {found}, not {version}"] if found != version else []
            faults += [f"transformers {version}: {fault}" for fault in report["faults"]]
            libraries = ", ".join(f"{name} {number}" for name, number in report["versions"].items())
            counts = f"{report['equal']} tensors equal, {report['rounded']} rounded, {len(report['faults'])} wrong"
            print(f"{libraries}: {counts} ({time.perf_counter() - start:.0f} s)", flush=True)
    if faults:
        raise SystemExit("\n".join(faults))


if __name__ == "__main__":
    if sys.argv[1] == "--check":
        print(json.dumps(check(Path(sys.argv[2]), exactly=sys.argv[3:] == ["--exactly"])))
    else:
        main(sys.argv[1:])
