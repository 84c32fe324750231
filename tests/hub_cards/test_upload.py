import json
import re
import shutil
from pathlib import Path

import pytest
from huggingface_hub.errors import HfHubHTTPError
from safetensors.torch import load_file, save_file

from diffllama.hub_cards import code, export, push, upload
from diffllama.hub_cards.cards import pinned_revision
from diffllama.hub_cards.findings import FolderError
from diffllama.hub_cards.upload import UploadPlan
from support.fake_hub import Hub, Repository, connect
from support.tiny_models import tiny_model, tiny_tokenizer


REPO = "alice/model"


@pytest.fixture(autouse=True)
def online(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connect(hub, tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("exported")
    tiny_model("v2").save_pretrained(work / "src")
    tiny_tokenizer().save_pretrained(work / "src")
    return export(work / "src", work / "dest", metadata={"license": "mit"}, max_shard_size="100KB")


@pytest.fixture
def folder(exported: Path, tmp_path: Path) -> Path:
    return shutil.copytree(exported, tmp_path / "folder")


def change_weights(folder: Path) -> None:
    shard = min(folder.glob("model*.safetensors"))
    save_file({name: tensor + 1 for name, tensor in load_file(shard).items()}, shard, {"format": "pt"})


def pushed(hub: Hub, name: str = REPO) -> Repository:
    return hub.repositories[name]


def readme(hub: Hub, revision: str = "main") -> str:
    return pushed(hub).files(revision)["README.md"].decode()


def edit_on_the_hub(hub: Hub, old: str, new: str) -> None:
    text = readme(hub)
    assert old in text
    pushed(hub).commit({"README.md": text.replace(old, new, 1).encode()}, "Update README.md")


class TestPush:
    def test_everything_arrives_and_the_card_is_pinned_to_it(self, hub: Hub, folder: Path) -> None:
        shown: list[UploadPlan] = []
        answer = push(folder, REPO, show=shown.append)
        repository = pushed(hub)
        assert not repository.private
        _, model, card = repository.commits
        assert answer.commit == model.oid
        assert answer.changed
        assert answer.url.endswith(card.oid)
        files = {file.name: file.read_bytes() for file in folder.iterdir()}
        sent = repository.files()
        assert {**files, "README.md": b"", ".gitattributes": b""} == {**sent, "README.md": b"", ".gitattributes": b""}
        text = readme(hub)
        assert pinned_revision(text) == model.oid
        assert f'pipeline("text-generation", "{REPO}", revision="{model.oid}", trust_remote_code=True)' in text
        assert f"vllm serve {REPO} " in text
        assert "PATH_OR_REPOSITORY" not in text
        (plan,) = shown
        assert (plan.repo, plan.creates_repo, plan.private, plan.deleted) == (REPO, True, False, [])
        assert plan.files == {name: len(content) for name, content in files.items() if name != "README.md"}

    def test_what_is_there_is_not_sent_again(self, hub: Hub, folder: Path) -> None:
        push(folder, REPO)
        commits, requests = len(pushed(hub).commits), len(hub.requests)
        answer = push(folder, REPO)
        assert not answer.changed
        assert len(pushed(hub).commits) == commits
        assert [request for request in hub.requests[requests:] if request.method == "PUT"] == []

    def test_a_push_that_broke_off_goes_on(self, hub: Hub, folder: Path) -> None:
        shards = len(list(folder.glob("model-*.safetensors")))
        assert shards > 2
        hub.refuse_uploads_after = 1
        with pytest.raises((HfHubHTTPError, RuntimeError)):
            push(folder, REPO)
        assert "config.json" not in pushed(hub).files()
        hub.refuse_uploads_after = None
        before = len(hub.requests)
        push(folder, REPO)
        assert len([request for request in hub.requests[before:] if request.method == "PUT"]) == shards - 1
        assert "config.json" in pushed(hub).files()

    def test_a_push_that_broke_off_before_the_card_pins_what_it_sent(
        self, hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        push(folder, REPO)
        change_weights(folder)
        with monkeypatch.context() as patch:
            patch.setattr(upload.Remote, "files_at", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                push(folder, REPO)
        sent = pushed(hub).refs["main"]
        push(folder, REPO)
        assert pinned_revision(readme(hub)) == sent

    def test_a_chat_template_that_the_folder_no_longer_has_is_removed(self, hub: Hub, folder: Path) -> None:
        push(folder, REPO)
        (folder / "chat_template.jinja").unlink()
        (folder / "LICENSE").unlink()
        push(folder, REPO)
        assert "chat_template.jinja" not in pushed(hub).files()
        assert "LICENSE" in pushed(hub).files()

    def test_weights_that_the_folder_no_longer_has_are_removed_and_nothing_else(
        self, hub: Hub, folder: Path, tmp_path: Path
    ) -> None:
        push(folder, REPO)
        pushed(hub).commit({"handler.py": b"", "adapter/adapter_model.safetensors": b"x", "notes.md": b"mine"})
        whole = export(folder, tmp_path / "whole")
        shown: list[UploadPlan] = []
        push(whole, REPO, show=shown.append)
        files = pushed(hub).files()
        assert {"handler.py", "adapter/adapter_model.safetensors", "notes.md", "model.safetensors"} <= set(files)
        assert not [name for name in files if name.startswith("model-") or name.endswith("index.json")]
        assert len(shown[0].deleted) == len(list(folder.glob("model-*"))) + 1

    def test_a_branch_is_made_and_main_stays(self, hub: Hub, folder: Path) -> None:
        push(folder, REPO)
        main = pushed(hub).refs["main"]
        change_weights(folder)
        push(folder, REPO, revision="second-try")
        assert pushed(hub).refs["main"] == main
        branch = pushed(hub).find("second-try")
        assert branch.parent is not None
        assert pinned_revision(readme(hub, "second-try")) == branch.parent.oid
        push(folder, REPO, revision="second-try")
        assert pushed(hub).refs["second-try"] == branch.oid

    def test_a_pull_request_has_both_commits_and_main_stays(self, hub: Hub, folder: Path) -> None:
        push(folder, REPO)
        main = pushed(hub).refs["main"]
        change_weights(folder)
        answer = push(folder, REPO, create_pr=True)
        assert pushed(hub).refs["main"] == main
        request = pushed(hub).find("refs/pr/1")
        assert answer.url == f"{hub.endpoint}/{REPO}/discussions/1"
        assert request.parent is not None
        assert answer.commit == request.parent.oid
        assert pinned_revision(readme(hub, "refs/pr/1")) == request.parent.oid
        assert "refs/pr/2" not in pushed(hub).refs

    def test_somebody_elses_model_gets_a_pull_request(self, hub: Hub, folder: Path) -> None:
        push(folder, REPO)
        theirs = hub.create("bob/model")
        theirs.commit(pushed(hub).files())
        change_weights(folder)
        answer = push(folder, "bob/model", create_pr=True)
        assert answer.url.endswith("/bob/model/discussions/1")
        assert theirs.find("refs/pr/1").parent.oid == answer.commit
        assert pinned_revision(theirs.files("refs/pr/1")["README.md"].decode()) == answer.commit

    def test_a_pull_request_takes_more(self, hub: Hub, folder: Path) -> None:
        push(folder, REPO)
        change_weights(folder)
        push(folder, REPO, create_pr=True)
        change_weights(folder)
        answer = push(folder, REPO, revision="refs/pr/1")
        assert pinned_revision(readme(hub, "refs/pr/1")) == answer.commit
        assert pushed(hub).find("refs/pr/1").parent.oid == answer.commit

    def test_a_card_alone_can_be_a_pull_request(self, hub: Hub, folder: Path) -> None:
        push(folder, REPO)
        main = pushed(hub).refs["main"]
        with (folder / "README.md").open("a") as file:
            file.write("\nMine.\n")
        answer = push(folder, REPO, create_pr=True)
        assert answer.url.endswith("/discussions/1")
        assert pushed(hub).refs["main"] == main
        assert "Mine." in readme(hub, "refs/pr/1")

    def test_a_pull_request_without_anything_new_is_none(self, hub: Hub, folder: Path) -> None:
        push(folder, REPO)
        assert not push(folder, REPO, create_pr=True).changed
        assert set(pushed(hub).refs) == {"main"}

    @pytest.mark.parametrize("moment", ["before the files", "before the card"])
    def test_what_somebody_else_pushes_meanwhile_is_not_lost(
        self, moment: str, hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        push(folder, REPO)
        change_weights(folder)

        def interfere(*_: object) -> dict[str, str]:
            edit_on_the_hub(hub, "<!-- diffllama:usage", "Theirs.\n\n<!-- diffllama:usage")
            return {pushed(hub).refs["main"]: ""}

        with monkeypatch.context() as patch:
            if moment == "before the card":
                patch.setattr(upload.Remote, "files_at", interfere)
            with pytest.raises(HfHubHTTPError, match="412"):
                push(folder, REPO, show=interfere if moment == "before the files" else None)
        push(folder, REPO)
        assert "Theirs." in readme(hub)

    def test_a_pin_to_a_commit_that_is_gone_is_renewed(self, hub: Hub, folder: Path) -> None:
        push(folder, REPO)
        pin = pinned_revision(readme(hub))
        edit_on_the_hub(hub, f'revision="{pin}"', f'revision="{"0" * 40}"')
        (folder / "README.md").unlink()
        pushed(hub).commit({"README.md": None})
        push(folder, REPO)
        assert pinned_revision(readme(hub)) in {commit.oid for commit in pushed(hub).commits}

    def test_a_private_repository_is_private_and_a_public_one_is_not_taken_for_one(
        self, hub: Hub, folder: Path
    ) -> None:
        push(folder, "alice/secret", private=True)
        assert hub.repositories["alice/secret"].private
        push(folder, "alice/secret", private=True)
        push(folder, REPO)
        commits = len(pushed(hub).commits)
        change_weights(folder)
        with pytest.raises(ValueError, match="is public"):
            push(folder, REPO, private=True)
        assert len(pushed(hub).commits) == commits


class TestCard:
    NOTE = "## Notes\n\nIt likes cats.\n\n"

    def test_what_was_written_on_the_hub_stays_however_often_one_pushes(self, hub: Hub, folder: Path) -> None:
        push(folder, REPO)
        edit_on_the_hub(hub, "<!-- diffllama:usage", f"{self.NOTE}<!-- diffllama:usage")
        edit_on_the_hub(hub, "license: mit", "license: mit\nthumbnail: cat.png")
        edit_on_the_hub(hub, "- diffllama\n", "- diffllama\n- cats\n")
        for _ in range(2):
            change_weights(folder)
            push(folder, REPO)
            text = readme(hub)
            assert self.NOTE in text
            assert "thumbnail: cat.png" in text
            assert "- cats\n" in text
            assert pinned_revision(text) == pushed(hub).commits[-2].oid
        commits = len(pushed(hub).commits)
        push(folder, REPO)
        push(folder, REPO, code_only=True)
        assert len(pushed(hub).commits) == commits

    def test_line_endings_of_windows_double_nothing(self, hub: Hub, folder: Path) -> None:
        push(folder, REPO)
        pushed(hub).commit({"README.md": readme(hub).replace("\n", "\r\n").encode()})
        change_weights(folder)
        push(folder, REPO)
        assert readme(hub).count("## Use") == 1
        assert pinned_revision(readme(hub)) == pushed(hub).commits[-2].oid

    def test_text_that_was_written_in_the_folder_arrives(self, hub: Hub, folder: Path) -> None:
        card = folder / "README.md"
        pristine = card.read_text()
        push(folder, REPO)
        card.write_text(f"{pristine}\n{self.NOTE}")
        push(folder, REPO)
        assert self.NOTE.strip() in readme(hub)
        card.write_text(pristine)
        change_weights(folder)
        push(folder, REPO)
        assert self.NOTE.strip() in readme(hub), "a new folder knows nothing of it"

    @pytest.mark.parametrize(
        ("old", "new"),
        [("<!-- diffllama:usage", "Theirs.\n\n<!-- diffllama:usage"), ("license: mit", "license: gpl-3.0")],
    )
    def test_different_texts_are_for_people_to_settle(self, old: str, new: str, hub: Hub, folder: Path) -> None:
        push(folder, REPO)
        edit_on_the_hub(hub, old, new)
        card = folder / "README.md"
        card.write_text(f"{card.read_text()}\nMine.\n")
        commits = len(pushed(hub).commits)
        with pytest.raises(ValueError, match="--replace-card"):
            push(folder, REPO)
        assert len(pushed(hub).commits) == commits
        push(folder, REPO, replace_card=True)
        assert "Mine." in readme(hub)
        assert new not in readme(hub)

    def test_metadata_that_cannot_be_read_is_named(self, hub: Hub, folder: Path) -> None:
        push(folder, REPO)
        edit_on_the_hub(hub, "license: mit", "license: mit\nmodel-index: [1]")
        with pytest.raises(ValueError, match=r"metadata of README\.md of alice/model cannot be read"):
            push(folder, REPO)

    def test_a_card_that_was_there_before_is_kept(self, hub: Hub, folder: Path) -> None:
        hub.create(REPO).commit({"README.md": b"---\nlanguage: en\n---\n# My own\n"})
        push(folder, REPO)
        assert "# My own" in readme(hub)
        assert "## Use" in readme(hub)
        assert "language: en" in readme(hub)
        assert "license: mit" in readme(hub)

    def test_a_folder_without_one_gets_one(self, hub: Hub, folder: Path) -> None:
        (folder / "README.md").unlink()
        push(folder, REPO)
        assert "## Use" in readme(hub)


class TestCodeOnly:
    def test_code_is_new_weights_stay_and_the_card_is_pinned_anew(self, hub: Hub, folder: Path, tmp_path: Path) -> None:
        push(folder, REPO)
        edit_on_the_hub(hub, "<!-- diffllama:usage", "It likes cats.\n\n<!-- diffllama:usage")
        before = pushed(hub).files()
        code_folder = tmp_path / "code"
        code_folder.mkdir()
        for name in code.hub_code():
            shutil.copy(folder / name, code_folder)
        with (code_folder / "differential_attention.py").open("a") as file:
            file.write("# mine\n")
        shown: list[UploadPlan] = []
        requests = len(hub.requests)
        with pytest.raises(FolderError, match=r"differential_attention\.py:code-differs: .*`diffllama export`"):
            push(code_folder, REPO, code_only=True)
        allow = ["differential_attention.py:code-differs"]
        push(code_folder, REPO, code_only=True, allow=allow, show=shown.append)
        after = pushed(hub).files()
        assert {name for name in before if before[name] != after[name]} == {"differential_attention.py", "README.md"}
        assert set(shown[0].files) == set(code.hub_code())
        assert [request for request in hub.requests[requests:] if request.method == "PUT"] == []
        assert pinned_revision(readme(hub)) == pushed(hub).commits[-2].oid
        assert "It likes cats." in readme(hub)
        assert any("differential_attention.py" in str(finding) for finding in shown[0].findings)

    def test_an_older_auto_map_becomes_the_packages(self, hub: Hub, folder: Path) -> None:
        push(folder, REPO)
        config = json.loads(pushed(hub).files()["config.json"])
        old = config | {"auto_map": {"AutoConfig": "old.Config"}}
        pushed(hub).commit({"config.json": json.dumps(old).encode()})
        push(folder, REPO, code_only=True)
        assert json.loads(pushed(hub).files()["config.json"]) == config

    def test_code_without_the_models_classes_is_not_sent(self, hub: Hub, folder: Path) -> None:
        push(folder, REPO)
        file = folder / "modeling_diffllama.py"
        file.write_text(file.read_text().replace("class DifferentialLlamaModel(", "class Other("))
        with pytest.raises(FolderError, match="has no class DifferentialLlamaModel"):
            push(folder, REPO, code_only=True)

    def test_it_needs_a_model_of_ours_on_the_hub(self, hub: Hub, folder: Path) -> None:
        with pytest.raises(ValueError, match="alice/model has no model"):
            push(folder, REPO, code_only=True)
        hub.create(REPO)
        with pytest.raises(ValueError, match="alice/model has no model"):
            push(folder, REPO, code_only=True)
        assert len(pushed(hub).commits) == 1


class TestRefusals:
    def test_a_folder_that_is_not_fit_is_not_sent(self, hub: Hub, folder: Path) -> None:
        (folder / "optimizer.pt").touch()
        (folder / "secret.json").write_text('{"hub_token": "x"}')
        with pytest.raises(FolderError, match=r"optimizer\.pt(?s:.*)secret\.json"):
            push(folder, REPO)
        assert hub.requests == []

    def test_without_a_token_it_says_how_to_get_one(
        self, hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("HF_TOKEN")
        with pytest.raises(PermissionError, match="hf auth login"):
            push(folder, REPO)
        assert hub.requests == []

    def test_somebody_elses_repository_is_refused(self, hub: Hub, folder: Path) -> None:
        with pytest.raises(HfHubHTTPError):
            push(folder, "bob/model")
        assert "bob/model" not in hub.repositories
        hub.create("bob/model")
        with pytest.raises(HfHubHTTPError):
            push(folder, "bob/model")
        assert len(hub.repositories["bob/model"].commits) == 1

    @pytest.mark.parametrize("name", ["model", "a/b/c", "alice/", "al ice/model", "https://huggingface.co/alice/model"])
    def test_a_repository_is_owner_and_name(self, name: str, hub: Hub, folder: Path) -> None:
        with pytest.raises(ValueError, match=re.escape(repr(name))):
            push(folder, name)
        assert hub.requests == []

    @pytest.mark.parametrize("kind", ["commit", "beginning of a commit", "tag", "no pull request", "nothing"])
    def test_a_revision_is_a_branch(self, kind: str, hub: Hub, folder: Path) -> None:
        push(folder, REPO)
        commit = pushed(hub).refs["main"]
        pushed(hub).refs["refs/tags/v1"] = commit
        revision = {"commit": commit, "beginning of a commit": commit[:8], "tag": "v1", "no pull request": "refs/pr/9"}
        refs = dict(pushed(hub).refs)
        with pytest.raises(ValueError, match="`revision`"):
            push(folder, REPO, revision=revision.get(kind, ""))
        with pytest.raises(ValueError, match="`create_pr` or `revision`"):
            push(folder, REPO, revision="dev", create_pr=True)
        assert pushed(hub).refs == refs

    def test_another_model_is_not_replaced(self, hub: Hub, folder: Path) -> None:
        hub.create(REPO).commit({"config.json": b'{"model_type": "llama"}', "model.safetensors": b"x"})
        with pytest.raises(ValueError, match="alice/model has another model, of type 'llama'"):
            push(folder, REPO)
        pushed(hub).commit({"config.json": b"[]"})
        with pytest.raises(ValueError, match="alice/model has another model"):
            push(folder, REPO)
        pushed(hub).commit({"config.json": b"{"})
        with pytest.raises(ValueError, match=r"config\.json of alice/model is not valid JSON"):
            push(folder, REPO)
        assert pushed(hub).files()["model.safetensors"] == b"x"

    def test_code_with_a_secret_is_not_sent(self, hub: Hub, folder: Path) -> None:
        push(folder, REPO)
        with (folder / "differential_attention.py").open("a") as file:
            file.write("# hf_abcdefghijklmnopqrstuvwxyz\n")
        with pytest.raises(FolderError, match=r"differential_attention\.py:secret: .* Hugging Face token"):
            push(folder, REPO, code_only=True)
        with pytest.raises(FileNotFoundError, match="nowhere"):
            push(folder / "nowhere", REPO, code_only=True)
