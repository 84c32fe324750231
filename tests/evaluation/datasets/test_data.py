"""Data are found, and files are read."""

import bz2
import gzip
import json
from pathlib import Path

import pytest

from diffllama.evaluation.datasets.data import SAMPLES, Source, field, find, read_rows, read_text, text_field, texts
from diffllama.evaluation.models import digest


class TestFind:
    def test_built_in_sample_is_found_by_its_name(self) -> None:
        source = find("novels", None)
        assert source == Source(SAMPLES / "novels", built_in=True)
        assert source.facts() == {"path": "built-in novels", "sha256": digest(SAMPLES / "novels")}

    def test_data_may_be_file_dataset_or_folder_of_datasets(self, tmp_path: Path) -> None:
        folder = tmp_path / "novels"
        folder.mkdir()
        (folder / "a.txt").write_text("a")
        assert find("novels", tmp_path) == find("novels", folder) == Source(folder, built_in=False)
        assert find("novels", folder / "a.txt") == Source(folder / "a.txt", built_in=False)
        assert find("others", tmp_path) == Source(tmp_path, built_in=False)
        assert find("novels", tmp_path).facts() == {"path": str(folder), "sha256": digest(folder)}

    def test_tilde_in_path_is_expanded(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        assert find("novels", Path("~")).path == tmp_path

    def test_missing_data_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match=r"nowhere does not exist\. Name a file or folder with novels with"):
            find("novels", tmp_path / "nowhere")

    def test_first_file_that_is_there_is_taken(self, tmp_path: Path) -> None:
        source = Source(tmp_path, built_in=False)
        (tmp_path / "b").touch()
        assert source.file("a", "b") == tmp_path / "b"
        (tmp_path / "a").touch()
        assert source.file("a", "b") == tmp_path / "a"
        assert Source(tmp_path / "b", built_in=False).file("a") == tmp_path / "b"
        with pytest.raises(FileNotFoundError, match=r"has no c or d\. Name the file or its folder with --data"):
            source.file("c", "d")


class TestReadText:
    TEXT = "ein Gruß\nund noch einer\n"

    @pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.txt.bz2"])
    def test_text_is_decompressed_by_the_name(self, name: str, tmp_path: Path) -> None:
        pack = {".gz": gzip.compress, ".bz2": bz2.compress}.get(Path(name).suffix, bytes)
        for encoding in ("utf-8", "utf-8-sig"):  # with a byte order mark
            (tmp_path / name).write_bytes(pack(self.TEXT.encode(encoding)))
            assert read_text(tmp_path / name) == self.TEXT
        (tmp_path / name).write_bytes(pack(self.TEXT.encode("latin-1")))
        assert read_text(tmp_path / name, "latin-1") == self.TEXT

    @pytest.mark.parametrize("name", ["a.txt.gz", "a.txt.bz2"])
    @pytest.mark.parametrize("kept", [0.4, 0.9])
    def test_truncated_archive_is_refused(self, name: str, kept: float, tmp_path: Path) -> None:
        pack = {".gz": gzip.compress, ".bz2": bz2.compress}[Path(name).suffix]
        content = pack(self.TEXT.encode() * 100)
        (tmp_path / name).write_bytes(content[: int(kept * len(content))])
        with pytest.raises(ValueError, match=f"{name} cannot be read as text"):
            read_text(tmp_path / name)

    @pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.bz2", "a.txt.zip"])
    def test_file_that_is_no_text_is_refused(self, name: str, tmp_path: Path) -> None:
        (tmp_path / name).write_bytes(b"\xff\xfe")
        with pytest.raises(ValueError, match=f"{name} cannot be read as text"):
            read_text(tmp_path / name)

    def test_missing_file_raises_file_not_found(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError):
            read_text(tmp_path / "a.txt")


class TestReadRows:
    ROWS = ({"a": "x,\u2028y", "b": "1"}, {"a": "ü", "b": ""})

    @pytest.mark.parametrize(
        ("name", "content"),
        [
            ("rows.json", json.dumps(ROWS, indent=1)),
            ("rows.jsonl", "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS)),
            ("rows.jsonl", "\n\n".join(json.dumps(row) for row in ROWS) + "\n\n"),
            ("rows.jsonl", "\ufeff" + "\n".join(json.dumps(row) for row in ROWS) + "\n \n"),
            ("rows.csv", 'a,b\n"x,\u2028y",1\nü,\n'),
            ("rows.csv", '\ufeffa,b\r\n"x,\u2028y",1\r\nü,\r\n'),
        ],
    )
    def test_rows_are_read_from_what_there_is(self, name: str, content: str, tmp_path: Path) -> None:
        (tmp_path / name).write_bytes(content.encode())
        assert read_rows(tmp_path / name) == list(self.ROWS)
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content.encode()))
        assert read_rows(tmp_path / f"{name}.gz") == list(self.ROWS)

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("rows.json", "", "must have JSON objects"),
            ("rows.json", "[]", "must have JSON objects"),
            ("rows.json", "[1]", "must have JSON objects"),
            ("rows.jsonl", '{"a": 1}\n[2]', "must have JSON objects"),
            ("rows.jsonl", '{"a": 1}\n{"a"', "is not JSON or JSON lines"),
            ("rows.json", "a,b\n1,2", "is not JSON or JSON lines"),
            ("rows.json", 100_000 * "[", "is not JSON or JSON lines"),
            ("rows.csv", "", "must have a header line"),
            ("rows.csv", "a,b\n", "must have a header line"),
            ("rows.csv", "a,b\n1,2\n3", "must have a header line"),
            ("rows.csv", "a,b\n1,2,3", "must have a header line"),
            ("rows.csv", f"a,b\n1,{'2' * 200_000}", "is not CSV: field larger"),
        ],
    )
    def test_malformed_rows_file_is_refused(self, name: str, content: str, message: str, tmp_path: Path) -> None:
        (tmp_path / name).write_text(content)
        with pytest.raises(ValueError, match=f"{name} {message}"):
            read_rows(tmp_path / name)

    def test_missing_field_is_refused_with_the_fields_there_are(self, tmp_path: Path) -> None:
        assert field({"a": 1}, "a", tmp_path) == 1
        with pytest.raises(ValueError, match="has a row without `b`; its fields are a, c"):
            field({"a": 1, "c": 2}, "b", tmp_path)


class TestTexts:
    def test_texts_are_a_folders_text_files_and_rows_in_order(self, tmp_path: Path) -> None:
        (tmp_path / "b.txt").write_text("two")
        (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"one"))
        (tmp_path / "c.jsonl").write_text('{"text": "three"}\n{"text": "four"}')
        (tmp_path / "SOURCE").write_text("not a text")
        (tmp_path / "._a.txt").write_text("hidden")
        source = Source(tmp_path, built_in=False)
        expected = {"a.txt.gz": "one", "b.txt": "two", "c.jsonl:0": "three", "c.jsonl:1": "four"}
        assert list(texts(source).items()) == list(expected.items())
        assert texts(Source(tmp_path / "b.txt", built_in=False)) == {"b.txt": "two"}

    def test_folder_without_texts_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"has no text\. It needs \.txt files"):
            texts(Source(tmp_path, built_in=False))
        (tmp_path / "a.jsonl").write_text('{"story": ""}')
        with pytest.raises(ValueError, match=r"a\.jsonl has a row without `text`; its fields are story"):
            texts(Source(tmp_path, built_in=False))


class TestTextField:
    def test_text_with_any_letters_is_accepted(self) -> None:
        assert text_field({"a": "λ 🙂"}, ("b", "a"), Path("f")) == "λ 🙂"

    @pytest.mark.parametrize("value", [5, None, ["a"], "", " \n", "half \ud83d"])
    def test_value_that_is_no_text_is_refused_with_its_file(self, value: object) -> None:
        with pytest.raises(ValueError, match=r"f\.json has a row in which a must be .* got "):
            text_field({"a": value}, "a", Path("f.json"))
