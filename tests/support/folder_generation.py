"""What transformers generates from a folder, if need be in a process where nobody has patched it."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel


Answer = tuple[list[int], list[list[float]]]
"""Tokens, and for each of them the log-probabilities of the whole vocabulary."""


def another_process() -> ProcessPoolExecutor:
    """One that imports this module alone."""
    return ProcessPoolExecutor(1, mp_context=get_context("spawn"))


def load(folder: Path, dtype: str) -> PreTrainedModel:
    """The model of a folder."""
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=getattr(torch, dtype)).eval()


@torch.no_grad()
def scored(folder: Path, asked: list[list[int]], answers: list[list[int]], dtype: str) -> list[list[list[float]]]:
    """Log-probabilities [tokens, vocabulary] where these answers' tokens follow."""
    model = load(folder, dtype)
    found = []
    for ids, answer in zip(asked, answers, strict=True):
        logits = model(torch.tensor([ids + answer])).logits[0, len(ids) - 1 : -1]
        found.append(logits.float().log_softmax(-1).tolist())
    return found


@torch.no_grad()
def greedy(folder: Path, asked: list[list[int]], new_tokens: int) -> list[Answer]:
    """The most likely continuations, in float32."""
    model = load(folder, "float32")
    found = []
    for ids in asked:
        done = model.generate(
            torch.tensor([ids]),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        logprobs = torch.stack(done.logits)[:, 0].log_softmax(-1)
        found.append((done.sequences[0, len(ids) :].tolist(), logprobs.tolist()))
    return found


@torch.no_grad()
def answers(folder: Path, contents: list[str], new_tokens: int) -> dict[str, str]:
    """The most likely answers in a chat, in float32."""
    model, tokenizer = load(folder, "float32"), AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    found = {}
    for content in contents:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        done = model.generate(ids, max_new_tokens=new_tokens, do_sample=False)
        found[content] = tokenizer.decode(done[0, ids.shape[1] :], skip_special_tokens=True)
    return found
