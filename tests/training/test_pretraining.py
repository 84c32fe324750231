"""`pretrain` trains by its file, and a killed training ends with the weights of an uninterrupted one."""

import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from datasets import Dataset
from safetensors.torch import load_file
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainerState
from typer.testing import CliRunner

from diffllama import DiffLlamaForCausalLM
from diffllama.checkpoints.files import locked
from diffllama.cli import app, main
from diffllama.training import last_checkpoint, load_packed_dataset, pretrain
from diffllama.training.pretraining import make_record, read_settings, resolve_source, training_arguments
from support import subprocess_runner
from support.forked_processes import call_in_processes
from support.tiny_models import tiny_model, tiny_tokenizer


ROOT = Path(__file__).parents[2]

MODEL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16,
    "initializer_range": 0.1, "tie_word_embeddings": False,
}  # fmt: skip
GROUPED = MODEL | {
    "num_attention_heads": 3,
    "num_noise_heads": 1,
    "hidden_act": "poly_norm",
    "lambda_init": [-0.01, 0.2],
}
SETTINGS: dict[str, Any] = {
    "recipe": "scaling",
    "model": MODEL,
    "tokenizer": "tokenizer",
    "data": {"files": "texts"},
    "sequence_length": 16,
    "tokens_per_step": 128,
    "training": {
        "output_dir": "run", "per_device_train_batch_size": 4, "max_steps": 9, "learning_rate": 1e-2,
        "warmup_steps": 2, "logging_steps": 1, "save_steps": 3, "save_total_limit": 2, "use_cpu": True, "bf16": False,
        "disable_tqdm": True,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Working directory with a tokenizer, a dataset, and texts: some empty, one much longer than a sequence."""
    work = tmp_path_factory.mktemp("work")
    tiny_tokenizer().save_pretrained(work / "tokenizer")
    for folder in ("texts", "rows"):
        (work / folder).mkdir()
    for i, words in enumerate((0, 1, 5, 17, 0, 2000, 3, 15, 16)):
        (work / "texts" / f"{i}.txt").write_text(" ".join(f"w{6 + (i + j * j) % 19}" for j in range(words)))
    rows = [" ".join(f"w{6 + (i + j * j) % 19}" for j in range(i % 40)) for i in range(40)]
    for number in (0, 1):
        lines = [json.dumps({"text": text}) + "\n" for text in rows[20 * number : 20 * number + 20]]
        (work / "rows" / f"{number}.jsonl").write_text("".join(lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(work)
        patch.setattr("datasets.config.HF_DATASETS_CACHE", work / "cache")
        yield work


@pytest.fixture(autouse=True)
def _inside(work: Path) -> None:
    """Run every test in that directory."""


def write(name: str, settings: dict[str, Any] = SETTINGS, **fields: Any) -> Path:
    """Write a configuration whose output folder is `name`."""
    settings = settings | {"training": settings["training"] | {"output_dir": name} | fields}
    Path(f"{name}.yaml").write_text(yaml.safe_dump(settings))
    return Path(f"{name}.yaml")


def training(**fields: Any) -> dict[str, Any]:
    """Return the section `training` with other fields."""
    return {"training": SETTINGS["training"] | fields}


def history(folder: Path, what: str = "loss") -> list[float]:
    entries = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [entry[what] for entry in entries if what in entry]


def same_weights(*folders: Path) -> bool:
    a, b = (load_file(folder / "model.safetensors") for folder in folders)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@contextmanager
def trained_batches() -> Iterator[list[torch.Tensor]]:
    """Return the tokens of all training batches."""
    step, batches = Trainer.training_step, []

    def spy(self: Trainer, model: Any, inputs: Any, *rest: Any) -> Any:
        batches.append(inputs["input_ids"].clone())
        assert torch.equal(inputs["input_ids"][:, 1:], inputs["labels"][:, 1:])
        return step(self, model, inputs, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "training_step", spy)
        yield batches


@pytest.fixture(scope="module")
def whole(work: Path) -> Path:
    """The output of an uninterrupted run."""
    return work / pretrain(write("whole"))


def test_pretraining_learns_and_logs_losses_and_map_statistics(whole: Path) -> None:
    losses = history(whole)
    assert len(losses) == 9
    assert losses[-1] < 0.9 * losses[0]
    assert len(history(whole, "diff_cosine")) == 10  # and before the first step
    model = AutoModelForCausalLM.from_pretrained(whole)
    assert type(model) is DiffLlamaForCausalLM
    assert (model.config.eos_token_id, model.config.vocab_size) == (tiny_tokenizer().eos_token_id, 97)
    assert (whole / "tokenizer.json").is_file()


def test_step_has_the_recipes_tokens_and_the_first_loss_is_their_mean(whole: Path) -> None:
    """A step has 128 tokens in two accumulated batches of 64."""
    arguments = torch.load(whole / "training_args.bin", weights_only=False)
    assert (arguments.gradient_accumulation_steps, arguments.per_device_train_batch_size) == (2, 4)
    assert (arguments.adam_beta2, arguments.weight_decay) == (0.98, 0.05)  # from the recipe
    assert arguments.learning_rate == 1e-2  # from the file
    assert history(whole)[0] == pytest.approx(torch.tensor(97.0).log().item(), rel=0.1)


@pytest.mark.parametrize("variant", ["v1", "v2"])
def test_one_switch_trains_the_matched_transformer_on_the_same_tokens(variant: str) -> None:
    config = write(f"switch-{variant}", SETTINGS | {"model": MODEL | {"diff_variant": variant}}, max_steps=1)
    learned = {}
    for of_baseline in (True, False):
        with trained_batches() as batches:
            folder = pretrain(config, of_baseline)
        assert folder.name == f"switch-{variant}" + "-baseline" * of_baseline
        assert isinstance(AutoModelForCausalLM.from_pretrained(folder), LlamaForCausalLM) == of_baseline
        learned[of_baseline] = torch.cat(batches)
    assert torch.equal(learned[True], learned[False])
    assert learned[True].shape == (8, 16)


def test_sequences_held_out_are_evaluated_on_and_not_trained_on() -> None:
    settings = SETTINGS | {"model": GROUPED, "data": {"files": "texts", "evaluation_sequences": 10}}
    folder = pretrain(write("held-out", settings, eval_strategy="steps", eval_steps=9))
    rows = torch.tensor(load_packed_dataset(tiny_tokenizer(), 16, files="texts")["input_ids"])
    logits = AutoModelForCausalLM.from_pretrained(folder)(rows[-10:]).logits
    loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), rows[-10:, 1:].flatten())
    assert history(folder, "eval_loss") == [pytest.approx(loss.item(), rel=1e-5)]
    assert json.loads((folder / "trainer_state.json").read_text())["epoch"] == pytest.approx(
        9 * 8 / (len(rows) - 10), rel=0.1
    )


def test_model_is_trained_further() -> None:
    tiny_model("v2").save_pretrained("base")
    settings = SETTINGS | {"model": {"from": "base", "lambda_std_dev": 0.2}}
    folder = pretrain(write("further", settings, max_steps=1, learning_rate=0.0))
    assert same_weights(folder, Path("base"))
    with pytest.raises(ValueError, match=r"`model\.baseline_from` must name the baseline"):
        pretrain(Path("further.yaml"), of_baseline=True)


def kill_at(owner: type, method: str, step: int, half_written: bool) -> None:
    """Let this process die when a method is called at a step."""
    original = getattr(owner, method)

    def die(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (self.state if owner is Trainer else self).global_step == step:
            if half_written:
                original(self, *args, **kwargs)
                path = Path(args[0])
                path.write_text(path.read_text()[:-20])
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, *args, **kwargs)

    setattr(owner, method, die)


def killed(run: Callable[[Path], Any], config: Path, *place: Any) -> None:
    """Train by `run` in this process, and die at a place of `KILLS`."""
    kill_at(*place)
    run(config)


def kill(config: Path, owner: type, method: str, step: int, half_written: bool = False) -> None:
    """Train in a process that dies of SIGKILL at the place of `killed`."""
    child = multiprocessing.get_context("fork").Process(
        target=killed, args=(pretrain, config, owner, method, step, half_written)
    )
    child.start()
    child.join(120)
    assert child.exitcode == -signal.SIGKILL


KILLS = {
    "before the first checkpoint": (Trainer, "training_step", 1, False),
    "between two batches of a step": (Trainer, "training_step", 4, False),
    "before a checkpoint is written": (Trainer, "_save_checkpoint", 6, False),
    "before the optimizer is written": (Trainer, "_save_optimizer_and_scheduler", 6, False),
    "before the random state is written": (Trainer, "_save_rng_state", 3, False),
    "while the state is written": (TrainerState, "save_to_json", 6, True),
    "after the last step": (Trainer, "save_model", 9, False),
}
"""The method of the Trainer, or of its state, at which SIGKILL comes; after how many steps; whether half is written."""


@pytest.mark.parametrize("name", KILLS)
def test_killed_run_ends_at_the_same_weights(name: str, whole: Path) -> None:
    config = write(name.replace(" ", "-"))
    kill(config, *KILLS[name])
    folder = pretrain(config)
    assert same_weights(folder, whole)
    assert history(folder) == history(whole)
    assert history(folder, "diff_cosine") == history(whole, "diff_cosine")


def test_finished_run_started_again_changes_no_weights(whole: Path) -> None:
    shutil.copytree(whole, "finished")
    assert same_weights(pretrain(write("finished")), whole)


EPOCHS = SETTINGS | {
    "model": MODEL | {"attention_dropout": 0.1, "max_position_embeddings": 16},  # the length of a sequence
    "data": {"files": ["texts/1.txt", "texts/5.txt"], "max_tokens": 1040, "evaluation_sequences": 5},
}
"""An epoch has 8 steps; checkpoints are of steps 4, 8, and 12."""
EPOCHS_TRAINING: dict[str, Any] = {
    "max_steps": 14, "eval_strategy": "steps", "eval_steps": 4, "gradient_checkpointing": True,
    "load_best_model_at_end": True, "save_steps": 4,
}  # fmt: skip


@pytest.fixture(scope="module")
def epochs(work: Path) -> Path:
    """The output of an uninterrupted run of several epochs."""
    return work / pretrain(write("epochs-whole", EPOCHS, **EPOCHS_TRAINING))


@pytest.mark.parametrize("step", [5, 11, 13])
def test_killed_run_of_several_epochs_with_dropout_and_evaluation_ends_at_the_same_weights(
    step: int, epochs: Path
) -> None:
    config = write(f"epochs-{step}", EPOCHS, **EPOCHS_TRAINING)
    kill(config, Trainer, "training_step", step)
    folder = pretrain(config)
    assert same_weights(folder, epochs)
    assert history(folder) == history(epochs)
    assert history(folder, "eval_loss") == history(epochs, "eval_loss")
    assert history(folder, "epoch")[-1] > 1


def checkpoint(step: int, state: str | None, *names: str) -> Path:
    """Write a checkpoint of these files, with this content of trainer_state.json."""
    folder = Path("checkpoints", f"checkpoint-{step}")
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    if state:
        (folder / "trainer_state.json").write_text(state)
    return folder


@pytest.fixture
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("in_empty_folder")
def test_checkpoints_that_broke_off_are_passed_over() -> None:
    assert last_checkpoint("checkpoints") is None
    states = {2: '{"global_step": 2}', 10: '{"global_step": 10}', 12: '{"global_st', 14: "{}", 16: None}
    for step, state in states.items():
        checkpoint(step, state, "model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth")
    assert last_checkpoint(Path("checkpoints")) == Path("checkpoints/checkpoint-10")


@pytest.mark.usefixtures("in_empty_folder")
@pytest.mark.parametrize(
    ("present", "missing"),
    [
        (("model.safetensors", "scheduler.pt", "rng_state.pth"), "optimizer.pt"),
        (("model.safetensors", "optimizer.pt", "rng_state.pth"), "scheduler.pt"),
        (("model.safetensors", "optimizer.pt", "scheduler.pt"), "rng_state.pth"),
        (("optimizer.pt", "scheduler.pt", "rng_state.pth"), "model.safetensors"),
        (("model.safetensors.index.json", "optimizer.pt", "scheduler.pt", "rng_state_0.pth"), None),
        (("pytorch_model_fsdp.bin", "optimizer.bin", "scheduler.pt", "rng_state_0.pth"), None),
        (("pytorch_model_fsdp_0/a", "optimizer_0/a", "scheduler.pt", "rng_state_0.pth"), None),
        (("global_step4/a", "latest", "rng_state_0.pth"), None),
    ],
)
def test_checkpoint_that_lacks_a_file_is_refused(present: tuple[str, ...], missing: str | None) -> None:
    newest = checkpoint(4, '{"global_step": 4}', *present)
    if missing is None:
        assert last_checkpoint("checkpoints") == newest
    else:
        with pytest.raises(ValueError, match=f"checkpoint-4 has no {re.escape(missing)}: .* Restore the file, or"):
            last_checkpoint("checkpoints")


def test_pretraining_does_not_go_on_without_the_optimizers_state(whole: Path) -> None:
    shutil.copytree(whole, "lacking")
    (Path("lacking") / "checkpoint-9" / "optimizer.pt").unlink()
    before = sorted(Path("lacking").rglob("*"))
    with pytest.raises(ValueError, match="lacking/checkpoint-9 has no optimizer"):
        pretrain(write("lacking"))
    assert sorted(Path("lacking").rglob("*")) == before


def test_run_with_the_same_fields_in_another_order_goes_on(whole: Path) -> None:
    shutil.copytree(whole, "reordered")
    settings = {name: SETTINGS[name] for name in reversed(SETTINGS)}
    settings["model"] = {name: MODEL[name] for name in reversed(MODEL)} | {"attn_implementation": "eager"}
    Path("reordered.yaml").write_text(
        yaml.safe_dump(settings | {"training": SETTINGS["training"] | {"output_dir": "reordered"}}, sort_keys=False)
    )
    assert same_weights(pretrain(Path("reordered.yaml")), whole)


def test_second_run_into_one_folder_is_refused_until_the_first_is_dead(whole: Path) -> None:
    shutil.copytree(whole, "shared")
    config = write("shared")
    ready, end = multiprocessing.Pipe()

    def hold() -> None:
        with locked(Path("shared"), "…"):
            end.send("held")
            signal.pause()

    child = multiprocessing.get_context("fork").Process(target=hold)
    child.start()
    assert ready.recv() == "held"
    with pytest.raises(ValueError, match=r"Another run is writing into shared: .* set another `training\.output_dir`"):
        pretrain(config)
    os.kill(child.pid or 0, signal.SIGKILL)
    child.join(60)
    assert same_weights(pretrain(config), whole)


def test_run_begun_online_goes_on_offline_at_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def resolve_revision(source: dict[str, Any]) -> dict[str, Any]:
        asked.append(source)
        return source | {"revision": "1" * 40}

    monkeypatch.setattr("diffllama.training.pretraining.resolve_revision", resolve_revision)
    folder, source = Path("online"), {"dataset": "user/data", "revision": "main"}
    settings = SETTINGS | {"data": source}
    resolved = resolve_source(source, folder)
    assert resolved == source | {"revision": "1" * 40}
    record = make_record(settings, resolved, "sequences")
    folder.mkdir()
    (folder / "pretraining.json").write_text(json.dumps(record))

    assert resolve_source(source, folder) == resolved
    assert asked == [source]  # once, at the start
    assert make_record(settings, resolved, "sequences") == record
    another = {"dataset": "user/data", "revision": "v2"}
    resolve_source(another, folder)
    assert asked == [source, another]


STREAMED = SETTINGS | {
    "model": MODEL | {"attention_dropout": 0.1, "diff_variant": "v2"},
    "data": {"dataset": "rows", "streaming": True, "evaluation_sequences": 3},
}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 9}


@pytest.fixture(scope="module")
def streamed(work: Path) -> Path:
    """The output of an uninterrupted run on a stream, which ends in its second epoch."""
    return work / pretrain(write("streamed", STREAMED, **EVALUATED))


@pytest.mark.parametrize("name", ["between two batches of a step", "after the last step"])
def test_killed_streamed_run_ends_at_the_same_weights(name: str, streamed: Path) -> None:
    config = write(f"streamed-{name[:5]}", STREAMED, **EVALUATED)
    kill(config, *KILLS[name])
    folder = pretrain(config)
    assert same_weights(folder, streamed)
    for what in ("loss", "eval_loss", "epoch"):
        assert history(folder, what) == history(streamed, what)


def test_streamed_run_learns_the_sequences_of_the_stream_in_order() -> None:
    with trained_batches() as batches:
        pretrain(write("streamed-again", STREAMED, **EVALUATED), of_baseline=True)
    rows = load_packed_dataset(tiny_tokenizer(), 16, dataset="rows")["input_ids"]
    assert len(rows) < 9 * 8 + 3
    assert torch.cat(batches).tolist() == (2 * rows[3:])[: 9 * 8]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"files": "texts", "streaming": True}}, "`data.streaming` needs `data.dataset`"),
        ({"data": {"dataset": "rows", "streaming": "yes"}}, "`data.streaming` must be a valid boolean, got 'yes'"),
        ({"data": STREAMED["data"] | {"max_tokens": 99}}, "`data.max_tokens` is not supported with `data.streaming`"),
        ({"data": STREAMED["data"] | {"cache_dir": "x"}}, "`data.cache_dir` is not supported with `data.streaming`"),
        ({"data": STREAMED["data"] | {"column": "input_ids"}}, "`data.column` must have text with `data.streaming`"),
        ({"training": {"max_steps": -1}}, "`data.streaming` needs `training.max_steps`"),
    ],
)
def test_fields_that_contradict_streaming_are_named(changes: Any, message: str) -> None:
    Path("mistake.yaml").write_text(yaml.safe_dump(STREAMED | changes))
    with pytest.raises(ValueError, match=f"mistake.yaml: {message}"):
        read_settings(Path("mistake.yaml"))


def recorded(config: Path) -> None:
    """Train, and append the step and the tokens of each batch to a file of this process."""
    step = Trainer.training_step

    def record(self: Trainer, model: Any, inputs: Any, *rest: Any) -> Any:
        with Path(f"{config.stem}-{self.args.process_index}.jsonl").open("a") as file:
            print(json.dumps([self.state.global_step, inputs["input_ids"].tolist()]), file=file)
        return step(self, model, inputs, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "training_step", record)
        pretrain(config)


def batches(name: str, process: int) -> dict[int, list[Any]]:
    """Return what a process learned in each step. After a restart, steps are learned again and must be the same."""
    found: dict[int, list[Any]] = {}
    for line in Path(f"{name}-{process}.jsonl").read_text().splitlines():
        step, rows = json.loads(line)
        again = found.setdefault(step, [])
        if rows not in again:
            again.append(rows)
        assert len(again) <= 2, "a third batch in a step"
    return found


SHARED = STREAMED | {"model": MODEL}
SHARED_TRAINING: dict[str, Any] = EVALUATED | {
    "ddp_backend": "gloo", "per_device_train_batch_size": 2, "max_steps": 8, "dataloader_num_workers": 1
}  # fmt: skip


@pytest.fixture(scope="module")
def shared(work: Path) -> list[dict[int, list[Any]]]:
    """What each of two processes learned in an uninterrupted run."""
    config = write("halves", SHARED, **SHARED_TRAINING)
    call_in_processes(lambda: recorded(config), 2, work / "halves-store")
    return [batches("halves", process) for process in (0, 1)]


@pytest.mark.slow
def test_each_of_two_processes_learns_its_own_file_in_order(shared: list[dict[int, list[Any]]]) -> None:
    for process, held_out in ((0, 3), (1, 0)):
        rows = load_packed_dataset(tiny_tokenizer(), 16, files=f"rows/{process}.jsonl")["input_ids"][held_out:]
        steps = [(4 * rows)[i : i + 4] for i in range(0, 32, 4)]
        assert shared[process] == {i: [step[:2], step[2:]] for i, step in enumerate(steps)}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in KILLS if KILLS[name][2] in (1, 4, 6)])  # five places
def test_two_killed_processes_go_on_with_the_same_batches(name: str, shared: list[dict[int, list[Any]]]) -> None:
    workers = {"dataloader_num_workers": int(name == "between two batches of a step")}  # orphans live for 5 s
    config = write(f"halves-{name.replace(' ', '-')}", SHARED, **SHARED_TRAINING | workers)
    with pytest.raises(torch.multiprocessing.ProcessExitedException, match="SIGKILL"):
        call_in_processes(lambda: killed(recorded, config, *KILLS[name]), 2, Path(f"{config}-1").absolute())
    call_in_processes(lambda: recorded(config), 2, Path(f"{config}-2").absolute())
    assert [batches(config.stem, process) for process in (0, 1)] == shared
    assert same_weights(Path(config.stem), Path("halves"))


def test_stream_goes_on_with_the_processes_and_workers_it_began_with(streamed: Path) -> None:
    shutil.copytree(streamed, "other")
    rule = r"has a different number of processes or `training\.dataloader_num_workers`\. Restore it"
    config = write("other", STREAMED, **EVALUATED, dataloader_num_workers=1)
    with pytest.raises(ValueError, match=rule):
        pretrain(config)
    config = write("other", STREAMED, **EVALUATED, per_device_train_batch_size=2)
    with pytest.raises(torch.multiprocessing.ProcessRaisedException, match=rule):
        call_in_processes(lambda: pretrain(config), 2, Path("other-store").absolute())


STARTS = """
import os, sys
from pathlib import Path
from transformers import Trainer
from diffllama.training import packing

packing.BATCH = 1000  # as much of these small files as a million characters of a large one
opened = os.open("opened", os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def audit(event, arguments):
    if event == "open" and "shard-" in str(arguments[0]):
        os.write(opened, f"{arguments[0]}\\n".encode())


sys.addaudithook(audit)
step = Trainer.training_step


def first(self, *arguments):
    files = set(Path("opened").read_text().split())
    Path(f"first-step-{self.args.process_index}").write_text("\\n".join(files))
    return step(self, *arguments)


Trainer.training_step = first
"""


@pytest.mark.slow
def test_example_for_many_gpus_starts_before_it_has_read_one_percent_of_its_text() -> None:
    """On two processes. Only its sizes, text, tokenizer and devices are replaced."""
    settings = yaml.safe_load((ROOT / "examples/pretrain_3b.yaml").read_text())
    assert settings["data"]["streaming"] is True
    settings["model"] |= MODEL | {"num_key_value_heads": 2, "vocab_size": 97, "attn_implementation": "sdpa"}
    settings |= {"tokenizer": "tokenizer", "tokens_per_step": 256, "sequence_length": 16}
    settings["data"] |= {"dataset": "shards", "name": None}
    settings["training"] |= {"output_dir": "example", "use_cpu": True, "bf16": False, "max_steps": 2}
    settings["training"] |= {"ddp_backend": "gloo"}
    Path("example.yaml").write_text(yaml.safe_dump(settings))
    Path("shards").mkdir()
    for number in range(1000):
        row = json.dumps({"text": " ".join(f"w{6 + (number + i * i) % 90}" for i in range(100))})
        Path(f"shards/shard-{number:04d}.jsonl").write_text(20 * f"{row}\n")
    subprocess_runner.run(STARTS + LAUNCH, "pretrain", "example.yaml", environment=os.environ)
    assert len(history(Path("example"), "train_loss")) == 1
    for process in (0, 1):
        files = Path(f"first-step-{process}").read_text().split()
        assert 2 <= len(files) < 10


def test_changed_text_or_model_is_refused_on_resuming(whole: Path) -> None:
    before = (whole / "trainer_state.json").read_bytes()
    other = {
        "`model`": {"model": MODEL | {"hidden_size": 64}},
        "`tokens_per_step`": {"tokens_per_step": 64},
        "text, tokenizer or `sequence_length`": {"data": {"files": "texts/5.txt"}},
        "`training.seed`": training(seed=3),
    }
    for name, changes in other.items():
        with pytest.raises(ValueError, match=f"whole has a different {name}. Restore it"):
            pretrain(write("whole", SETTINGS | changes))
    text = Path("texts/1.txt")
    kept, times = text.read_text(), (text.stat().st_atime_ns, text.stat().st_mtime_ns)
    text.write_text("w9 w9")
    with pytest.raises(ValueError, match="has a different text, tokenizer"):
        pretrain(write("whole"))
    text.write_text(kept)
    os.utime(text, ns=times)
    assert (whole / "trainer_state.json").read_bytes() == before


def test_moved_training_resumes_with_moved_text(whole: Path) -> None:
    """Its folder and its text are copied, as to another machine."""
    shutil.copytree("texts", "elsewhere/texts", copy_function=shutil.copy)
    shutil.copytree(whole, "elsewhere/moved")
    shutil.rmtree("elsewhere/moved/checkpoint-9")
    for name in ("model.safetensors", "trainer_state.json"):
        Path("elsewhere/moved", name).unlink()
    settings = SETTINGS | {"data": {"files": "elsewhere/texts"}}
    with trained_batches() as batches:
        moved = pretrain(write("elsewhere/moved", settings))
    assert len(batches) == 3 * 2  # steps 7 to 9
    assert same_weights(whole, moved)


def test_labels_of_tokenized_rows_choose_the_tokens_that_count() -> None:
    """The loss before the first step is the mean over the two labels, and callbacks are called."""
    ids, labels = [[6 + i, 7, 8, 9] for i in range(8)], [[-100, -100, 8, 9]] + [[-100, -100, 8, -100]] * 7
    Dataset.from_dict({"input_ids": ids, "labels": labels}).to_parquet("tokenized.parquet")
    settings = SETTINGS | {
        "data": {"files": "tokenized.parquet", "column": "input_ids"}, "sequence_length": 4, "tokens_per_step": 32,
    }  # fmt: skip
    losses = []

    class First(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            logits = model.eval()(torch.tensor(ids)).logits[:, :-1].transpose(1, 2)
            losses.append(functional.cross_entropy(logits, torch.tensor(labels)[:, 1:]).item())
            model.train()

    folder = pretrain(write("labelled", settings, max_steps=1), callbacks=[First()])
    assert history(folder)[0] == pytest.approx(losses[0], rel=1e-4)


def test_record_is_of_digests(whole: Path) -> None:
    record = json.loads((whole / "pretraining.json").read_text())
    assert [len(value) for value in record.values()] == [16] * 5


@pytest.mark.parametrize(
    "name",
    [
        *("config.json", "checkpoint-3/model.safetensors", "adapter_config.json"),
        *("model.safetensors", "weights.safetensors.index.json", "pytorch_model.bin"),
    ],
)
def test_folder_of_another_model_or_training_is_refused(name: str) -> None:
    file = Path(f"precious-{name[:5]}", name)
    file.parent.mkdir(parents=True)
    file.write_text("precious")
    with pytest.raises(ValueError, match=r"another model or training\. Set another `training\.output_dir`"):
        pretrain(write(f"precious-{name[:5]}"))
    assert [path.read_text() for path in Path(f"precious-{name[:5]}").rglob("*") if path.is_file()] == ["precious"]


def test_nan_stops_pretraining_and_names_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Trainer.training_step

    def poisoned(self: Trainer, model: Any, *rest: Any) -> Any:
        loss = step(self, model, *rest)
        if self.state.global_step == 4:
            next(model.parameters()).grad[0, 0] = torch.nan
        return loss

    monkeypatch.setattr(Trainer, "training_step", poisoned)
    with pytest.raises(FloatingPointError, match=r"Step 5: .* resume from the last checkpoint in nan"):
        pretrain(write("nan"))
    assert last_checkpoint(Path("nan")) == Path("nan/checkpoint-3")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("- a list", "must have the sections recipe, model, .* got list"),
        ("model: {", "is not YAML"),
        ({"modle": {}}, r"there is no field `modle`; did you mean `model`\?"),
        ({"model": None}, "`model` must be a valid dictionary, got None"),
        ({"model": {"hiden_size": 3}}, r"`model`: there is no field `hiden_size`; did you mean `hidden_size`\?"),
        ({"model": {"preset": "4b"}}, "No preset '4b'. Known: 3b, "),
        ({"model": {"preset": "3b", "from": "base"}}, "at most one of `preset` and `from`, got both"),
        ({"model": MODEL | {"vocab_size": 96}}, "`model.vocab_size` must be at least 97, .* got 96"),
        ({"recipe": "4b"}, "No recipe '4b'. Known: 3b, scaling, "),
        ({"data": {"file": "texts"}}, r"`data`: there is no field `file`; did you mean `files`\?"),
        ({"data": {"files": "missing"}}, "found none at .*missing"),
        (
            {"data": {"files": "texts", "evaluation_sequences": 10**6}, **training(eval_strategy="epoch")},
            "must be less than the .* sequences of the text, got 1000000",
        ),
        ({"sequence_length": "long"}, "`sequence_length` must be a valid integer, got 'long'"),
        ({"sequence_length": True}, "`sequence_length` must be a valid integer, got True"),
        ({"sequence_length": 1}, "`sequence_length` must be greater than or equal to 2, got 1"),
        ({"tokens_per_step": 0}, "`tokens_per_step` must be greater than or equal to 2, got 0"),
        ({"tokens_per_step": float("inf")}, "`tokens_per_step` must be a valid integer, got inf"),
        ({"data": {"files": "texts", "evaluation_sequences": -4}}, "must be greater than or equal to 0, got -4"),
        ({"sequence_length": 16.5}, "`sequence_length` must be a valid integer, got 16.5"),
        ({"model": MODEL | {"max_position_embeddings": 8}}, "at most 8, the `model.max_position_embeddings`, got 16"),
        ({"data": {"files": "texts", "evaluation_sequences": "4"}}, "`data.evaluation_sequences` must be a valid int"),
        ({"data": {"files": "texts", "evaluation_sequences": 4}}, "Set both or neither of `data.evaluation_sequences`"),
        (training(eval_strategy="epoch"), "Set both or neither of `data.evaluation_sequences`"),
        ({"data": {"files": []}}, r"`data.files` must be a path, folder or pattern, or a list of them, got \[\]"),
        ({"training": {"per_device_train_batch_size": 0, "output_dir": "x"}}, r"`per_device_train_batch_size` 0 ×"),
        ({"training": {"learning_rate": "fast", "output_dir": "x"}}, "`learning_rate` must be a valid number, got"),
        (training(save_only_model=True), "`training.save_only_model` must be false"),
        (
            training(load_best_model_at_end=True, save_total_limit=1, eval_strategy="steps"),
            "`training.save_total_limit` must be at least 2",
        ),
        ({"training": {"output_dir": "texts/1.txt", "use_cpu": True}}, r"must be a folder, got the file texts/1\.txt"),
        ("model: {}\nmodel: {}", "found duplicate key .model."),
        ({"recipe": ["scaling"]}, r"No recipe \['scaling'\]"),
        ({"model": {"from": "llama"}}, "`model.from` must be a differential model, got llama, a llama"),
        ({"tokens_per_step": 100}, r"multiple of 64 \(`per_device_train_batch_size` 4 × `sequence_length` 16 × 1 pro"),
        ({"training": {"lr": 1}}, "`training`: there is no field `lr`"),
        ({"training": {"gradient_accumulation_steps": 2, "output_dir": "x"}}, "is computed: set `tokens_per_step`"),
        ({"training": {"learning_rate": 1}}, "`training.output_dir` must be a folder, got None"),
        (training(output_dir=5), "`training.output_dir` must be a folder, got 5"),
        (training(auto_find_batch_size=True), "`training.auto_find_batch_size` must be false: steps would have fewer"),
        (training(accelerator_config={"split_batches": True}), "`training.accelerator_config.split_batches` must be"),
    ],
)
def test_mistake_in_the_file_is_named_and_nothing_is_written(changes: Any, message: str) -> None:
    LlamaConfig(**MODEL).save_pretrained("llama")
    text = changes if isinstance(changes, str) else yaml.safe_dump({**SETTINGS, **changes})
    Path("mistake.yaml").write_text(text.replace("output_dir: run", "output_dir: mistake"))
    with pytest.raises(ValueError, match=message):
        pretrain("mistake.yaml")
    assert not Path("mistake").exists()
    assert not Path("x").exists()


def test_missing_section_is_named() -> None:
    Path("missing.yaml").write_text(yaml.safe_dump({name: SETTINGS[name] for name in ("model", "tokenizer", "data")}))
    with pytest.raises(ValueError, match="`sequence_length` is missing; a `recipe` has one"):
        pretrain("missing.yaml")


def test_pretrain_command_trains_and_names_a_mistake_in_one_line(
    whole: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = CliRunner().invoke(
        app, ["pretrain", str(write("line", max_steps=1)), "--baseline"], catch_exceptions=False
    )
    assert result.exit_code == 0
    assert Path("line-baseline/model.safetensors").is_file()
    monkeypatch.setattr(sys, "argv", ["diffllama", "pretrain", str(write("line", lr=1))])
    with pytest.raises(SystemExit, match="1"):
        main()
    captured = capsys.readouterr().err
    assert captured.strip().endswith("`training`: there is no field `lr`.")
    assert "Traceback" not in captured


def test_pretrain_without_extra_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("diffllama.training.pretraining", "diffllama.training.packing"):
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ModuleNotFoundError, match=r"datasets.*\. In a clone of diffllama: pip install '\.\[train\]'"):
        CliRunner().invoke(app, ["pretrain", str(write("x"))], catch_exceptions=False)


def test_mistakes_are_named_before_libraries_are_imported() -> None:
    Path("early.yaml").write_text("data: {file: texts}\nmodel: {}\ntokenizer: x\ntraining: {}\nrecipe: 3b")
    code = """
import sys
from typer.testing import CliRunner
from diffllama.cli import app
for name in ("nonesuch.yaml", "early.yaml"):
    print(CliRunner().invoke(app, ["pretrain", name]).exception)
print({"torch", "transformers", "datasets"} & set(sys.modules))
"""
    missing, mistake, imported = subprocess.check_output([sys.executable, "-c", code], text=True).splitlines()
    assert missing == "nonesuch.yaml is not a file. Name a pre-training file, such as examples/pretrain.yaml."
    assert mistake.endswith("`data`: there is no field `file`; did you mean `files`?")
    assert imported == "set()"


LAUNCH = """
import os, runpy, signal, socket
import diffllama.training.pretraining  # once for both

signal.alarm(300)  # torchrun would end a process whose partner has died
with socket.create_server(("localhost", 0)) as free:
    port = free.getsockname()[1]
os.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
child = os.fork()
os.environ["RANK"] = os.environ["LOCAL_RANK"] = "0" if child else "1"
try:
    runpy.run_module("diffllama", run_name="__main__", alter_sys=True)
except SystemExit as end:
    assert not end.code
if child:
    assert os.waitpid(child, 0)[1] == 0
"""
"""The command in two fresh processes, with the variables that torchrun sets."""


@pytest.mark.slow
def test_two_processes_train_as_one_does(whole: Path) -> None:
    """Both read the same file and share the tokens of a step."""
    config = write("two", ddp_backend="gloo")
    _, printed = subprocess_runner.run(LAUNCH, "pretrain", config, environment=os.environ)
    assert printed.count("Wrote two") == 1
    assert history(Path("two")) == pytest.approx(history(whole), rel=1e-5)


def test_yaml_reads_exponents_as_numbers_and_no_as_text() -> None:
    """PyYAML reads 1e-2 as a string and `no` as false."""
    text = write("meant", learning_rate="RATE", max_steps="STEPS", save_strategy="later").read_text()
    for name, value in {"RATE": "1e-2", "STEPS": "1e0", "later": "no"}.items():
        text = text.replace(f": {name}", f": {value}")
    Path("meant.yaml").write_text(text)
    fields = read_settings(Path("meant.yaml"))["training"]
    assert (fields["learning_rate"], fields["max_steps"], fields["save_strategy"]) == (1e-2, 1, "no")
    assert isinstance(fields["max_steps"], int)


def test_steps_may_be_fractions_of_the_training() -> None:
    steps = {"save_steps": 0.25, "logging_steps": 0.5, "warmup_steps": 0.1}
    assert read_settings(write("shares", **steps))["training"].items() >= steps.items()


def test_epochs_take_the_place_of_the_recipes_steps() -> None:
    settings = SETTINGS | {"training": {k: v for k, v in SETTINGS["training"].items() if k != "max_steps"}}
    assert "max_steps" not in read_settings(write("epochs", settings, num_train_epochs=2))["training"]
    assert read_settings(write("epochs", settings))["training"]["max_steps"] == 40_000


def test_world_without_a_launcher_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clusters set WORLD_SIZE for their own purposes."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    arguments = training_arguments(read_settings(write("world", use_cpu=False)), False)
    assert (arguments.world_size, arguments.gradient_accumulation_steps) == (1, 2)
