# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""The text of a study: training and held-out documents, and a tokenizer trained on the former."""

import json
from collections.abc import Iterable
from itertools import chain, islice
from pathlib import Path

import pyarrow as pa
from pyarrow.parquet import ParquetWriter
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from diffllama.training.packing import read_documents


END = "<|endoftext|>"

SEQUENCES = "sequences.parquet"
"""File in a study's folder with tokenized rows."""

Row = dict[str, list[int]]
"""`input_ids` and, if not all tokens count in the loss, `labels`."""

ROWS = 1024
"""Rows that are written at once."""

EVERY = 10
"""Every tenth document is held out."""


def split_documents(text: str) -> tuple[list[str], list[str]]:
    """Read the documents of a folder, and split them into training and held-out ones.

    Raises:
        ValueError: there are fewer than ten documents, or `read_documents` fails.
    """
    documents = list(read_documents(text))
    if len(documents) < EVERY:
        raise ValueError(f"The text must have at least {EVERY} documents (files), found {len(documents)} in {text}.")
    training = [document for number, document in enumerate(documents, 1) if number % EVERY]
    return training, documents[EVERY - 1 :: EVERY]


def train_tokenizer(
    documents: Iterable[str], vocabulary: int, special: list[str], length: int
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of `vocabulary` tokens, among them `special` ones, for contexts of `length` tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END, *special], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(documents, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END, pad_token=END, model_max_length=length)


def write_documents(file: Path, documents: Iterable[str]) -> None:
    """Write documents as rows of JSON."""
    with file.open("w", encoding="utf-8") as stream:
        for document in documents:
            stream.write(json.dumps({"text": document}) + "\n")


def write_sequences(folder: Path, training: Iterable[Row], held_out: Iterable[Row]) -> None:
    """Write tokenized rows: those to train on, and then those that are held out."""
    rows = chain(training, held_out)
    first = pa.Table.from_pylist(list(islice(rows, ROWS)))
    with ParquetWriter(folder / SEQUENCES, first.schema) as writer:
        writer.write_table(first)
        while batch := list(islice(rows, ROWS)):
            writer.write_table(pa.Table.from_pylist(batch, first.schema))
