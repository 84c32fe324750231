"""Every token of every text is in one sequence, in order."""

import bz2
import gzip
import json
import random
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import PreTrainedTokenizerFast

from diffllama.training import load_packed_dataset, packing
from diffllama.training.packing import fingerprint, pack, read_documents
from support.tiny_models import tiny_tokenizer


TOKENIZER = tiny_tokenizer()
END = TOKENIZER.eos_token_id


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)


def write(name: str, *documents: str) -> str:
    """Write a file with one document, or with several as rows."""
    rows = "".join(json.dumps({"text": document}) + "\n" for document in documents)
    compress = {".gz": gzip.compress, ".bz2": bz2.compress}.get(Path(name).suffix, bytes)
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_bytes(compress((rows if ".json" in name else documents[0]).encode()))
    return name


DOCUMENT = st.lists(st.integers(6, 96), max_size=40)


@given(st.lists(DOCUMENT, max_size=12), st.integers(2, 9), st.none() | st.integers(9, 60))
def test_documents_of_any_length_are_cut_and_joined_without_loss(
    documents: list[list[int]], length: int, max_tokens: int | None
) -> None:
    stream = [token for ids in documents if ids for token in (*ids, END)]
    texts = [" ".join(f"w{token}" for token in ids) for ids in documents]
    if len(stream) < length:
        with pytest.raises(ValueError, match=f"at least one sequence of {length} tokens, got {len(stream)}"):
            list(pack(texts, TOKENIZER, length))
        return
    rows = [row["input_ids"] for row in pack(texts, TOKENIZER, length, max_tokens)]
    whole = min(len(stream), max_tokens or len(stream)) // length * length
    assert [len(row) for row in rows] == [length] * (whole // length)
    assert [token for row in rows for token in row] == stream[:whole]


def test_tokenizers_own_end_of_text_is_not_doubled() -> None:
    class Ending:
        eos_token_id = END

        def __call__(self, texts: list[str], **kwargs: Any) -> dict[str, list[list[int]]]:
            return {"input_ids": [[7, END] for _ in texts]}

    assert list(pack(["a", "b"], Ending(), 4)) == [{"input_ids": [7, END, 7, END]}]


@pytest.mark.parametrize(
    "name", ["a.txt", "a.md", "a.txt.gz", "a.b.txt.bz2", "a.jsonl", "a.json.gz", "we[i]rd *.txt", "we[i]rd.jsonl"]
)
def test_files_are_read_by_their_suffix(name: str) -> None:
    assert list(read_documents(files=write(name, "w7 w8\n\nw9"))) == ["w7 w8\n\nw9"]


def test_folders_and_patterns_are_read_in_order_and_rows_without_text_are_left_out() -> None:
    write("texts/b.txt", "second")
    write("texts/a/c.jsonl", "first")
    Path("texts/rows.jsonl").write_text('{"body": "third"}\n{"body": null}\n{"body": "fourth"}\n')
    Path("texts/notes.pdf").write_bytes(b"%PDF")
    assert list(read_documents(files=["texts/a/*.jsonl", "texts/b.txt"])) == ["first", "second"]
    assert list(read_documents(files="texts/rows.jsonl", column="body")) == ["third", "fourth"]
    Path("texts/rows.jsonl").unlink()
    assert list(read_documents(files="texts")) == ["first", "second"]


def test_hidden_files_are_left_out_links_are_followed_and_home_is_home(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "home/texts/.hidden.txt",
        "home/texts/.ipynb_checkpoints/a.txt",
        "elsewhere/b.txt",
        "home/texts/a.txt",
    ):
        write(name, name)
    Path("home/texts/linked").symlink_to(Path("elsewhere").absolute())
    monkeypatch.setenv("HOME", str(Path("home").absolute()))
    for files in ("home/texts", "~/texts", "home/texts/**"):
        assert list(read_documents(files=files)) == ["home/texts/a.txt", "elsewhere/b.txt"]


def test_byte_order_mark_is_left_out_and_na_is_text() -> None:
    Path("a.txt").write_bytes("w7".encode("utf-8-sig"))
    Path("rows.csv").write_text("text\nNA\nw8\n")
    assert list(read_documents(files=["a.txt", "rows.csv"])) == ["w7", "NA", "w8"]


def test_parquet_and_csv_are_read() -> None:
    rows = Dataset.from_dict({"text": ["w7", "w8, w9"]})
    rows.to_parquet("rows.parquet")
    rows.to_csv("rows.csv")
    for name in ("rows.parquet", "rows.csv"):
        assert list(read_documents(files=name)) == ["w7", "w8, w9"]


def test_dataset_is_read_with_its_split_and_column() -> None:
    """`datasets` reads a folder like a repository."""
    write("data/train.jsonl", "w7", "w8")
    write("data/test.jsonl", "w9")
    assert list(read_documents(dataset="data")) == ["w7", "w8"]
    assert list(read_documents(dataset="data", split="test")) == ["w9"]
    with pytest.raises(ValueError, match=r"`data.column` .* got 'body'"):
        list(read_documents(dataset="data", column="body"))


def test_packed_text_is_read_from_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def sequences(length: int = 4, **source: Any) -> list[list[int]]:
        return load_packed_dataset(tiny_tokenizer(), length, files="texts", **source)["input_ids"]

    write("texts/a.txt", "w7 w8 w9 w10 w11 w12 w13")
    first = sequences()
    assert first == [[7, 8, 9, 10], [11, 12, 13, END]]
    with monkeypatch.context() as patch:
        patch.setattr(packing, "read_documents", lambda **source: pytest.fail("it is read again"))
        assert sequences() == first
    assert sequences(2) == [[7, 8], [9, 10], [11, 12], [13, END]]
    assert sequences(max_tokens=7) == first[:1]
    write("texts/a.txt", "w9 w8 w9 w10 w11 w12 w13")  # of the same length as before
    assert sequences() == [[9, 8, 9, 10], [11, 12, 13, END]]
    write("texts/b.txt", "w7 w8 w9")
    assert sequences() == [[9, 8, 9, 10], [11, 12, 13, END], [7, 8, 9, END]]


def test_another_dataset_or_tokenizer_of_the_same_name_is_not_taken_for_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write("a/data/train.jsonl", "w7 w8 w9")
    write("b/data/train.jsonl", "w9 w8 w7")
    for folder, expected in (("a", [7, 8, 9, END]), ("b", [9, 8, 7, END])):
        with monkeypatch.context() as patch:
            patch.chdir(folder)
            assert load_packed_dataset(TOKENIZER, 4, dataset="data")["input_ids"] == [expected]
    write("b/data/train.jsonl", "w8 w8 w8")
    assert load_packed_dataset(TOKENIZER, 4, dataset="b/data")["input_ids"] == [[8, 8, 8, END]]

    class Slow:
        is_fast, eos_token_id = False, END

        def __init__(self, **vocabulary: int) -> None:
            self.get_vocab = lambda: vocabulary

        def __repr__(self) -> str:
            return "Slow()"

    assert fingerprint(Slow(a=1), 4, files="a") != fingerprint(Slow(a=2), 4, files="a")
    other_end = Slow(a=1)
    other_end.eos_token_id = END + 1
    assert fingerprint(Slow(a=1), 4, files="a") != fingerprint(other_end, 4, files="a")


def test_dataset_of_the_hub_is_read_at_one_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    class Info:
        sha = "1" * 40

    asked = []
    monkeypatch.setattr(
        "diffllama.training.packing.HfApi.dataset_info", lambda self, *a, **k: asked.append((a, k)) or Info
    )
    first = fingerprint(TOKENIZER, 4, **packing.resolve_revision({"dataset": "user/data", "revision": "main"}))
    assert asked == [(("user/data",), {"revision": "main"})]
    assert packing.resolve_revision({"dataset": "user/data"}) == {"dataset": "user/data", "revision": "1" * 40}
    assert packing.resolve_revision({"dataset": "user/data", "revision": "1" * 40})["revision"] == "1" * 40
    assert len(asked) == 2  # a commit needs no request
    Info.sha = "2" * 40  # the branch moves
    assert fingerprint(TOKENIZER, 4, **packing.resolve_revision({"dataset": "user/data", "revision": "main"})) != first

    def offline(*args: Any, **kwargs: Any) -> Any:
        raise ConnectionError

    monkeypatch.setattr("diffllama.training.packing.HfApi.dataset_info", offline)
    assert packing.resolve_revision({"dataset": "user/data"}) == {"dataset": "user/data"}


def test_interrupted_packing_is_not_taken_for_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    write("texts/a.txt", "w7 w8 w9 w10 w11 w12 w13")

    def breaks_off(**source: Any) -> Any:
        yield "w7 w8 w9 w10 w11"
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(packing, "read_documents", breaks_off)
        with pytest.raises(KeyboardInterrupt):
            load_packed_dataset(TOKENIZER, 4, files="texts")
    assert len(load_packed_dataset(TOKENIZER, 4, files="texts")) == 2


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({}, "exactly one of `files` and `dataset`"),
        ({"files": "a.txt", "dataset": "user/data"}, "exactly one of `files` and `dataset`"),
        ({"files": "missing/*.txt"}, r"must name files with text .*found none at missing/\*\.txt"),
        ({"files": "empty-folder"}, "found none at empty-folder"),
        ({"files": ["a.txt", "a.pdf"]}, r"must end in one of \.txt.* got a\.pdf"),
        ({"files": "empty.txt"}, "text for at least one sequence of 4 tokens, got 0"),
        ({"files": "torn.txt.gz"}, r"torn\.txt\.gz cannot be read: Compressed file ended"),
        ({"files": "torn.jsonl"}, r"torn\.jsonl cannot be read: "),
        ({"files": "latin.txt"}, r"latin\.txt cannot be read: 'utf-8' codec"),
        (
            {"files": "a.jsonl", "column": "body"},
            r"a\.jsonl .* got 'body'; the columns are `text`",
        ),
        ({"files": "numbers.jsonl"}, "must name a column with text, got 'text', which has 3"),
        ({"files": ""}, "must be a path, folder or pattern, or a list of them, got ''"),
        ({"files": "a.txt", "max_tokens": 3}, "`data.max_tokens` must be at least 4, the sequence length, got 3"),
    ],
)
def test_unreadable_text_is_named(source: dict[str, Any], message: str) -> None:
    write("a.txt", "w7 w8 w9 w10")
    write("a.jsonl", "w7")
    write("empty.txt", "")
    Path("empty-folder").mkdir()
    Path("a.pdf").touch()
    Path("torn.txt.gz").write_bytes(gzip.compress(b"w7 w8 " * 100)[:-12])
    Path("torn.jsonl").write_text('{"text": "w7"}\n{"tex')
    Path("numbers.jsonl").write_text('{"text": 3}')
    Path("latin.txt").write_bytes("café".encode("latin-1"))
    with pytest.raises(ValueError, match=message):
        load_packed_dataset(TOKENIZER, 4, **source)


def test_tokenizer_must_be_able_to_end_a_document() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="must have an `eos_token`"):
        load_packed_dataset(tokenizer, 4, files=write("a.txt", "w7"))


def test_fingerprint_is_of_what_is_read_however_that_is_written(tmp_path: Path) -> None:
    write("texts/a.txt", "w7")
    known = fingerprint(TOKENIZER, 4, files="texts")
    for same in ({"files": ["texts/a.txt"]}, {"files": str(tmp_path / "texts")}, {"column": "text", "split": "train"}):
        assert fingerprint(TOKENIZER, 4, **({"files": "texts"} | same)) == known
    write("texts/b.txt", "w7")
    assert fingerprint(TOKENIZER, 4, files="texts") != known
    assert fingerprint(TOKENIZER, 4, files="texts", column="other") != fingerprint(TOKENIZER, 4, files="texts")


def dataset(suffix: str, seed: int = 0) -> str:
    """A folder of three files of 20 rows, some without text."""
    draw = random.Random(seed)
    Path("rows").mkdir()
    for number in range(3):
        words = [draw.choice([0, 1, 3, 30]) for _ in range(20)]
        documents = [" ".join(f"w{draw.randrange(6, 97)}" for _ in range(count)) for count in words]
        if suffix == "parquet":
            Dataset.from_dict({"text": documents}).to_parquet(f"rows/{number}.parquet", batch_size=7)
        else:
            write(f"rows/{number}.{suffix}", *documents)
    return "rows"


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_stream_has_the_packed_sequences_and_goes_on_after_any(suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "BATCH", 150)  # characters: a sequence begins in one batch and ends in another
    folder = dataset(suffix)
    rows = load_packed_dataset(TOKENIZER, 8, dataset=folder)["input_ids"]
    assert len(rows) > 40
    expected = 3 * rows[5:]  # it is read again and again

    def stream() -> packing.PackedStream:
        return packing.PackedStream(TOKENIZER, 8, held_out=5, dataset=folder)

    assert [row["input_ids"] for row in islice(stream(), len(expected))] == expected
    for done in (0, 7, len(rows) - 6, len(rows) - 5, len(rows) + 9):
        begun, again = stream(), stream()
        assert len(list(islice(begun, done))) == done
        again.load_state_dict(json.loads(json.dumps(begun.state_dict())))
        assert [row["input_ids"] for row in islice(again, len(expected) - done)] == expected[done:], done


def test_each_process_and_each_of_its_workers_reads_its_own_files_and_goes_on_in_them() -> None:
    for number in range(8):
        write(f"shards/{number}.jsonl", *[" ".join([f"w{10 + number}"] * 7)] * 5)  # with its end, a sequence

    def loader(process: int, workers: int) -> StatefulDataLoader:
        stream = packing.PackedStream(TOKENIZER, 8, 3, process, 2, workers, dataset="shards")
        return StatefulDataLoader(stream, batch_size=1, num_workers=workers, collate_fn=lambda rows: rows[0])

    for workers in (0, 2):
        read = [[row["input_ids"][0] - 10 for row in islice(loader(process, workers), 40)] for process in (0, 1)]
        assert [sorted({*numbers}) for numbers in read] == [[0, 2, 4, 6], [1, 3, 5, 7]]
        assert read[0][:2] == ([0, 2] if workers else [0, 0])
        assert [numbers.count(0) for numbers in read] == [6, 0]  # in three epochs, 3 of 5 being held out
        begun, again = loader(0, workers), loader(0, workers)
        ahead = [row["input_ids"][0] - 10 for row in islice(begun, 9)]
        again.load_state_dict(json.loads(json.dumps(begun.state_dict())))
        assert ahead + [row["input_ids"][0] - 10 for row in islice(again, 31)] == read[0]


def test_stream_without_a_sequence_ends_with_the_reason() -> None:
    write("rows/a.jsonl", "w7 w8 w9")
    with pytest.raises(ValueError, match="at least one sequence of 8 tokens, got 4"):
        list(packing.PackedStream(TOKENIZER, 8, dataset="rows"))
    with pytest.raises(ValueError, match="must have an `eos_token`"):
        packing.PackedStream(PreTrainedTokenizerFast(tokenizer_object=TOKENIZER.backend_tokenizer), 8, dataset="rows")
    with pytest.raises(ValueError, match=r"`training\.dataloader_num_workers` must be at most 1, the number of files"):
        packing.PackedStream(TOKENIZER, 8, workers=2, dataset="rows")


def tokenized(name: str = "rows.parquet", length: int = 4, **columns: list[list[int]]) -> Dataset:
    """Write rows that are tokenized already, and load them."""
    write = Dataset.to_parquet if name.endswith(".parquet") else Dataset.to_json
    write(Dataset.from_dict(columns), name)
    return load_packed_dataset(TOKENIZER, length, files=name, column="input_ids")


@pytest.mark.parametrize("name", ["rows.parquet", "rows.jsonl"])
def test_tokenized_rows_are_neither_joined_nor_cut(name: str) -> None:
    ids, labels = [[7, 8, 9, 10], [9, 9, 9, 9]], [[-100, -100, 9, -100], [-100, 9, 9, 9]]
    rows = tokenized(name, input_ids=ids, labels=labels, other=[[1], [2]])
    assert rows.to_dict() == {"input_ids": ids, "labels": labels}
    assert tokenized(f"more-{name}", input_ids=ids).to_dict() == {"input_ids": ids}
    assert len(load_packed_dataset(TOKENIZER, 4, 7, files=name, column="input_ids")) == 1
    Path("folder").mkdir()
    Path(name).rename(f"folder/train.{name.split('.')[-1]}")
    assert len(load_packed_dataset(TOKENIZER, 4, dataset="folder", column="input_ids")) == 2


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"input_ids": [[7, 8, 9], [7, 8, 9]]}, "input_ids must have rows of 4 token ids"),
        ({"input_ids": [[7, 8, 9, 10], [7, 8, 9]]}, "rows.parquet cannot be read as tokenized rows"),
        ({"input_ids": [[7, 8, 9, 97]]}, "input_ids must have token ids below 97, got 97"),
        ({"input_ids": [[7, 8, 9, -100]]}, "input_ids must have token ids below 97, got -100"),
        ({"input_ids": [[7, 8, 9, 10]], "labels": [[7, 8, 9, -1]]}, "labels must have token ids below 97, got -1"),
        ({"input_ids": [[7.0, 8.0, 9.0, 10.0]]}, "input_ids must have rows of 4 token ids"),
        ({"text": ["w7"]}, "there is no column input_ids, only text"),
    ],
)
def test_other_tokenized_rows_are_refused(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tokenized(**columns)


def test_tokenized_rows_of_two_formats_are_refused() -> None:
    tokenized("a.parquet", input_ids=[[7, 8, 9, 10]])
    tokenized("a.jsonl", input_ids=[[7, 8, 9, 10]])
    with pytest.raises(ValueError, match="files of one format, got json, parquet"):
        load_packed_dataset(TOKENIZER, 4, files=["a.parquet", "a.jsonl"], column="input_ids")


def test_fingerprint_of_a_copy_elsewhere_is_the_same() -> None:
    for folder in ("here", "elsewhere/there"):
        write(f"{folder}/a.txt", "w7")
    assert fingerprint(TOKENIZER, 4, files="here") == fingerprint(TOKENIZER, 4, files="elsewhere/there")
    write("here/a.txt", "w8")
    assert fingerprint(TOKENIZER, 4, files="here") != fingerprint(TOKENIZER, 4, files="elsewhere/there")
