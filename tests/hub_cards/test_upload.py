import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub.errors import HfHubHTTPError
from safetensors.torch import load_file, save_file

from diffllama.hub_cards import upload
from diffllama.hub_cards.cards import pinned_revision
from diffllama.hub_cards.code import package_code
from diffllama.hub_cards.findings import FolderError
from diffllama.hub_cards.hub_folder import export
from diffllama.hub_cards.upload import UploadPlan, push
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


def append(file: Path, text: str) -> None:
    file.write_text(f"{file.read_text()}\n{text}\n")


def model(hub: Hub) -> Repository:
    return hub.repositories[REPO]


def readme(hub: Hub, revision: str = "main") -> str:
    return model(hub).files(revision)["README.md"].decode()


def edit_on_the_hub(hub: Hub, old: str, new: str) -> None:
    text = readme(hub)
    assert old in text
    model(hub).commit({"README.md": text.replace(old, new, 1).encode()})


@pytest.fixture
def without_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip `check`, which takes two thirds of a push's time and has its own tests."""
    monkeypatch.setattr(upload, "check", lambda *_, **__: [])


def test_new_repository_gets_all_files_and_a_card_pinned_to_them(hub: Hub, folder: Path) -> None:
    plans: list[UploadPlan] = []
    result = push(folder, REPO, show=plans.append)
    assert not model(hub).private
    _, files_commit, card_commit = model(hub).commits
    assert (result.commit, result.changed) == (files_commit.oid, True)
    assert result.url.endswith(card_commit.oid)
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    generated = {"README.md": b"", ".gitattributes": b""}
    assert model(hub).files() | generated == files | generated
    text = readme(hub)
    assert pinned_revision(text) == files_commit.oid
    assert f'pipeline("text-generation", "{REPO}", revision="{files_commit.oid}", trust_remote_code=True)' in text
    assert f"vllm serve {REPO} " in text
    assert "PATH_OR_REPOSITORY" not in text
    (plan,) = plans
    assert (plan.repo, plan.creates_repo, plan.private, plan.deleted) == (REPO, True, False, [])
    assert plan.files == {name: len(content) for name, content in files.items() if name != "README.md"}


@pytest.mark.usefixtures("without_check")
class TestPush:
    def test_unchanged_folder_is_not_committed(self, hub: Hub, folder: Path) -> None:
        push(folder, REPO)
        commits, requests = len(model(hub).commits), len(hub.requests)
        assert not push(folder, REPO).changed
        assert not push(folder, REPO, create_pr=True).changed
        assert len(model(hub).commits) == commits
        assert set(model(hub).refs) == {"main"}
        assert [request for request in hub.requests[requests:] if request.method == "PUT"] == []

    def test_interrupted_push_resumes(self, hub: Hub, folder: Path) -> None:
        shards = len(list(folder.glob("model-*.safetensors")))
        assert shards > 2
        hub.refuse_uploads_after = 1
        with pytest.raises((HfHubHTTPError, RuntimeError)):
            push(folder, REPO)
        assert "config.json" not in model(hub).files()
        hub.refuse_uploads_after = None
        requests = len(hub.requests)
        push(folder, REPO)
        assert len([request for request in hub.requests[requests:] if request.method == "PUT"]) == shards - 1
        assert "config.json" in model(hub).files()

    def test_push_interrupted_before_the_card_is_pinned_later(
        self, hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        push(folder, REPO)
        change_weights(folder)
        with monkeypatch.context() as patch:
            patch.setattr(upload.Remote, "files_at", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                push(folder, REPO)
        files_commit = model(hub).refs["main"]
        push(folder, REPO)
        assert pinned_revision(readme(hub)) == files_commit

    def test_files_that_transformers_would_load_are_deleted_and_no_others(
        self, hub: Hub, folder: Path, tmp_path: Path
    ) -> None:
        push(folder, REPO)
        others = {"handler.py": b"", "adapter/adapter_model.safetensors": b"x", "notes.md": b"mine"}
        model(hub).commit(others)
        unsharded = export(folder, tmp_path / "unsharded")
        (unsharded / "chat_template.jinja").unlink()
        (unsharded / "LICENSE").unlink()
        plans: list[UploadPlan] = []
        push(unsharded, REPO, show=plans.append)
        files = model(hub).files()
        assert {*others, "model.safetensors", "LICENSE"} <= set(files)
        assert not [name for name in files if name.startswith("model-") or name.endswith("index.json")]
        shards = {file.name for file in folder.glob("model-*")}
        assert set(plans[0].deleted) == {*shards, "model.safetensors.index.json", "chat_template.jinja"}

    def test_branch_is_created_and_main_stays(self, hub: Hub, folder: Path) -> None:
        push(folder, REPO)
        main = model(hub).refs["main"]
        change_weights(folder)
        push(folder, REPO, revision="second-try")
        branch = model(hub).find("second-try")
        assert branch.parent is not None
        assert pinned_revision(readme(hub, "second-try")) == branch.parent.oid
        push(folder, REPO, revision="second-try")
        assert (model(hub).refs["main"], model(hub).refs["second-try"]) == (main, branch.oid)

    def test_pull_request_has_both_commits_and_takes_more(self, hub: Hub, folder: Path) -> None:
        push(folder, REPO)
        main = model(hub).refs["main"]
        bobs = hub.create("bob/model")
        bobs.commit(model(hub).files())
        for repository, options in (
            (model(hub), {"create_pr": True}),
            (model(hub), {"revision": "refs/pr/1"}),
            (bobs, {"create_pr": True}),
        ):
            change_weights(folder)
            result = push(folder, repository.name, **options)
            request = repository.find("refs/pr/1")
            assert request.parent is not None
            card = repository.files("refs/pr/1")["README.md"].decode()
            assert result.commit == request.parent.oid == pinned_revision(card)
            assert "create_pr" not in options or result.url == f"{hub.endpoint}/{repository.name}/discussions/1"
        assert set(model(hub).refs) == {"main", "refs/pr/1"}
        assert model(hub).refs["main"] == main

    def test_changed_card_alone_can_be_a_pull_request(self, hub: Hub, folder: Path) -> None:
        push(folder, REPO)
        main = model(hub).refs["main"]
        append(folder / "README.md", "Mine.")
        assert push(folder, REPO, create_pr=True).url.endswith("/discussions/1")
        assert model(hub).refs["main"] == main
        assert "Mine." in readme(hub, "refs/pr/1")

    @pytest.mark.parametrize("moment", ["before the files", "before the card"])
    def test_commit_of_somebody_else_meanwhile_is_not_lost(
        self, moment: str, hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        push(folder, REPO)
        change_weights(folder)

        def interfere(*_: object) -> dict[str, str]:
            edit_on_the_hub(hub, "<!-- diffllama:usage", "Theirs.\n\n<!-- diffllama:usage")
            return {model(hub).refs["main"]: ""}

        with monkeypatch.context() as patch:
            if moment == "before the card":
                patch.setattr(upload.Remote, "files_at", interfere)
            with pytest.raises(HfHubHTTPError, match="412"):
                push(folder, REPO, show=interfere if moment == "before the files" else None)
        push(folder, REPO)
        assert "Theirs." in readme(hub)

    def test_pin_to_a_missing_commit_is_replaced(self, hub: Hub, folder: Path) -> None:
        push(folder, REPO)
        edit_on_the_hub(hub, f'revision="{pinned_revision(readme(hub))}"', f'revision="{"0" * 40}"')
        (folder / "README.md").unlink()
        model(hub).commit({"README.md": None})
        push(folder, REPO)
        assert pinned_revision(readme(hub)) in {commit.oid for commit in model(hub).commits}
        assert "## Use" in readme(hub)

    def test_private_repository_stays_private_and_public_one_is_refused(self, hub: Hub, folder: Path) -> None:
        for _ in range(2):
            push(folder, "alice/secret", private=True)
            assert hub.repositories["alice/secret"].private
        hub.create(REPO)
        with pytest.raises(ValueError, match="is public"):
            push(folder, REPO, private=True)
        assert len(model(hub).commits) == 1


@pytest.mark.usefixtures("without_check")
class TestCard:
    NOTE = "## Notes\n\nIt likes cats.\n\n"

    def test_edits_on_the_hub_survive_every_push(self, hub: Hub, folder: Path) -> None:
        push(folder, REPO)
        edit_on_the_hub(hub, "<!-- diffllama:usage", f"{self.NOTE}<!-- diffllama:usage")
        edit_on_the_hub(hub, "license: mit", "license: mit\nthumbnail: cat.png")
        edit_on_the_hub(hub, "- diffllama\n", "- diffllama\n- cats\n")
        for _ in range(2):
            change_weights(folder)
            push(folder, REPO)
            text = readme(hub)
            for edit in (self.NOTE, "thumbnail: cat.png", "- cats\n"):
                assert edit in text
            assert pinned_revision(text) == model(hub).commits[-2].oid
        commits = len(model(hub).commits)
        push(folder, REPO)
        push(folder, REPO, code_only=True)
        assert len(model(hub).commits) == commits

    def test_edits_in_the_folder_arrive_and_stay(self, hub: Hub, folder: Path) -> None:
        card = folder / "README.md"
        generated = card.read_text()
        push(folder, REPO)
        append(card, self.NOTE)
        push(folder, REPO)
        assert self.NOTE.strip() in readme(hub)
        card.write_text(generated)  # as in a new export
        change_weights(folder)
        push(folder, REPO)
        assert self.NOTE.strip() in readme(hub)

    @pytest.mark.parametrize(
        ("old", "new"),
        [("<!-- diffllama:usage", "Theirs.\n\n<!-- diffllama:usage"), ("license: mit", "license: gpl-3.0")],
        ids=["text", "metadata"],
    )
    def test_different_edits_in_both_are_refused(self, old: str, new: str, hub: Hub, folder: Path) -> None:
        push(folder, REPO)
        edit_on_the_hub(hub, old, new)
        append(folder / "README.md", "Mine.")
        commits = len(model(hub).commits)
        with pytest.raises(ValueError, match="--replace-card"):
            push(folder, REPO)
        assert len(model(hub).commits) == commits
        push(folder, REPO, replace_card=True)
        assert "Mine." in readme(hub)
        assert new not in readme(hub)

    def test_unreadable_metadata_is_named(self, hub: Hub, folder: Path) -> None:
        push(folder, REPO)
        edit_on_the_hub(hub, "license: mit", "license: mit\nmodel-index: [1]")
        with pytest.raises(ValueError, match=r"metadata of README\.md of alice/model cannot be read"):
            push(folder, REPO)


class TestCodeOnly:
    def test_only_code_and_the_pin_change(self, hub: Hub, folder: Path, tmp_path: Path) -> None:
        push(folder, REPO)
        edit_on_the_hub(hub, "<!-- diffllama:usage", "It likes cats.\n\n<!-- diffllama:usage")
        before = model(hub).files()
        (tmp_path / "code").mkdir()
        for name in package_code():
            shutil.copy(folder / name, tmp_path / "code")
        append(tmp_path / "code" / "differential_attention.py", "# mine")
        plans: list[UploadPlan] = []
        requests = len(hub.requests)
        with pytest.raises(FolderError, match=r"differential_attention\.py:code-differs: .*`diffllama export`"):
            push(tmp_path / "code", REPO, code_only=True)
        allow = ["differential_attention.py:code-differs"]
        push(tmp_path / "code", REPO, code_only=True, allow=allow, show=plans.append)
        after = model(hub).files()
        assert {name for name in before if before[name] != after[name]} == {"differential_attention.py", "README.md"}
        assert set(plans[0].files) == set(package_code())
        assert [request for request in hub.requests[requests:] if request.method == "PUT"] == []
        assert pinned_revision(readme(hub)) == model(hub).commits[-2].oid
        assert "It likes cats." in readme(hub)
        assert any("differential_attention.py" in str(finding) for finding in plans[0].findings)

    def test_auto_map_on_the_hub_is_updated(self, hub: Hub, folder: Path) -> None:
        push(folder, REPO)
        config = json.loads(model(hub).files()["config.json"])
        older = config | {"auto_map": {"AutoConfig": "old.Config"}}
        model(hub).commit({"config.json": json.dumps(older).encode()})
        push(folder, REPO, code_only=True)
        assert json.loads(model(hub).files()["config.json"]) == config


class TestRefusals:
    def test_folder_with_errors_is_not_uploaded(self, hub: Hub, folder: Path) -> None:
        (folder / "optimizer.pt").touch()
        append(folder / "differential_attention.py", "# hf_abcdefghijklmnopqrstuvwxyz")
        with pytest.raises(FolderError, match=r"attention\.py:secret(?s:.*)optimizer\.pt"):
            push(folder, REPO)
        with pytest.raises(FolderError, match=r"attention\.py:secret") as error:
            push(folder, REPO, code_only=True)
        assert "optimizer" not in str(error.value)
        assert hub.requests == []

    def test_missing_token_is_an_error_with_advice(
        self, hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("HF_TOKEN")
        with pytest.raises(PermissionError, match="hf auth login"):
            push(folder, REPO)
        assert hub.requests == []

    @pytest.mark.parametrize("config", [None, b'{"model_type": "llama"}', b"[]", b"{"])
    @pytest.mark.parametrize("code_only", [False, True])
    def test_repository_with_another_model_or_none_is_refused(
        self, code_only: bool, config: bytes | None, hub: Hub, folder: Path
    ) -> None:
        if config is None:
            repository, message = "bob/model", "bob/model has no model whose code" if code_only else "403 Forbidden"
        else:
            repository, message = REPO, r"alice/model has another model|config\.json of alice/model is not valid JSON"
        before = hub.create(repository).commit({"config.json": config, "model.safetensors": b"x"})
        with pytest.raises((ValueError, HfHubHTTPError), match=message):
            push(folder, repository, code_only=code_only)
        assert hub.repositories[repository].commits[-1] is before
        assert len(hub.repositories) == 1

    def test_revision_must_be_a_branch(self, hub: Hub, folder: Path) -> None:
        commit = hub.create(REPO).refs["main"]
        model(hub).refs["refs/tags/v1"] = commit
        refs = dict(model(hub).refs)
        for revision in (commit, commit[:8], "v1", "refs/pr/9", ""):
            with pytest.raises(ValueError, match="`revision`"):
                push(folder, REPO, revision=revision)
        with pytest.raises(ValueError, match="`create_pr` or `revision`"):
            push(folder, REPO, revision="dev", create_pr=True)
        with pytest.raises(ValueError, match="must be `owner/name`"):
            push(folder, "model")
        assert model(hub).refs == refs
