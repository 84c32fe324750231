# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""The base class of probes that measure long texts."""

from dataclasses import dataclass
from typing import ClassVar

from diffllama.evaluation.datasets.data import Source, texts
from diffllama.evaluation.models import LoadedModel
from diffllama.evaluation.runs import Probe, S
from diffllama.evaluation.settings import LongTextSettings


@dataclass(kw_only=True)
class LongTextProbe(LongTextSettings, Probe[S]):
    """Measures the beginnings of long texts."""

    dataset: ClassVar[str] = "novels"

    def beginnings(self, source: Source, loaded: LoadedModel) -> dict[str, list[int]]:
        """The beginnings of the first texts that are long enough, as token ids.

        Raises:
            ValueError: none is.
        """
        beginnings: dict[str, list[int]] = {}
        for name, text in texts(source).items():
            if len(beginnings) == self.texts:
                break
            ids = loaded.prefix + loaded.encode(text[: self.length * 16])
            if len(ids) >= self.length:
                beginnings[name] = ids[: self.length]
        if not beginnings:
            raise ValueError(f"No text in {source.path} has {self.length:,} tokens. Ask for fewer with --length.")
        return beginnings
