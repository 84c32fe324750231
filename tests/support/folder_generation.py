"""Generation from a folder with transformers, also in a process where no engine has patched it."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel


Answer = tuple[list[int], list[list[float]]]
"""Generated tokens, and the log-probabilities [tokens, vocabulary] from which they were chosen."""


def another_process() -> ProcessPoolExecutor:
    """Return a pool of one process, which imports only this module."""
    return ProcessPoolExecutor(1, mp_context=get_context("spawn"))


def load(folder: Path, dtype: str) -> PreTrainedModel:
    """Load the model of a folder."""
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=getattr(torch, dtype)).eval()


@torch.no_grad()
def scored(folder: Path, asked: list[list[int]], answers: list[list[int]], dtype: str) -> list[list[list[float]]]:
    """Return the log-probabilities [tokens, vocabulary] at each token of given answers to prompts."""
    model = load(folder, dtype)
    logprobs = []
    for ids, answer in zip(asked, answers, strict=True):
        logits = model(torch.tensor([ids + answer])).logits[0, len(ids) - 1 : -1]
        logprobs.append(logits.float().log_softmax(-1).tolist())
    return logprobs


@torch.no_grad()
def greedy(folder: Path, asked: list[list[int]], new_tokens: int) -> list[Answer]:
    """Continue prompts greedily, in float32."""
    model = load(folder, "float32")
    continued = []
    for ids in asked:
        output = model.generate(
            torch.tensor([ids]),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        logprobs = torch.stack(output.logits)[:, 0].log_softmax(-1)
        continued.append((output.sequences[0, len(ids) :].tolist(), logprobs.tolist()))
    return continued


@torch.no_grad()
def answers(folder: Path, contents: list[str], new_tokens: int) -> dict[str, str]:
    """Answer chat messages greedily, in float32. Returns message -> answer."""
    model, tokenizer = load(folder, "float32"), AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    by_content = {}
    for content in contents:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        output = model.generate(ids, max_new_tokens=new_tokens, do_sample=False)
        by_content[content] = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    return by_content
