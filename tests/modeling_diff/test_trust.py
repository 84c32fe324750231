"""Files, sockets and processes that a folder's code opens, as reported by Python's audit hooks.

They hear what Python does, not what a native library does by itself, as safetensors does when it reads weights.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from support.tiny_models import EVERY_FEATURE, VARIANTS, tiny_model, tiny_tokenizer


pytestmark = pytest.mark.slow

PROCESS = """
import dis, json, os, sys
sys.modules["diffllama"] = None  # from here on importing it fails
import torch, torch.distributed.nn, transformers  # torch 2.6 writes a file of its own when it imports the second

IMPORTS = (dis.opmap["IMPORT_NAME"], dis.opmap["IMPORT_FROM"])
OBJECTS = ("builtins.id", "object.__getattr__", "sys._getframe", "sys._getframemodulename")  # these leave no process
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
events, folder, phase = [], None, None

def hear(event, arguments):
    if phase is None or event in OBJECTS:
        return
    frame, importing = sys._getframe(1), False
    asked = frame.f_globals.get("__name__")
    while frame is not None:  # from the event outwards to the nearest frame of remote code
        importing = importing or frame.f_code.co_code[frame.f_lasti] in IMPORTS
        if str(frame.f_globals.get("__name__")).startswith("transformers_modules."):
            break
        frame = frame.f_back
    paths = arguments[:1] if event == "open" else arguments if event.startswith("os.") else ()
    events.append({
        "folder": os.path.basename(folder),
        "phase": phase,
        "name": event,
        "paths": [os.path.realpath(os.fsdecode(p)) for p in paths if isinstance(p, (str, bytes, os.PathLike))],
        "told": " ".join(repr(a) if isinstance(a, (str, int)) else type(a).__name__ for a in arguments)[:160],
        "writes": event == "open" and bool((arguments[2] or 0) & WRITING),
        "asked": str(asked),
        "file": frame and os.path.basename(frame.f_code.co_filename),
        "line": frame and frame.f_lineno,
        "importing": importing,
    })

sys.addaudithook(hear)
for folder in sys.argv[2:]:
    phase = "load"
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    phase = "forward"
    inputs = tokenizer("w6 w7 w8 w9", return_tensors="pt", return_token_type_ids=False)
    model(**inputs, labels=inputs["input_ids"]).loss.backward()
    for name in ("SequenceClassification", "TokenClassification", "QuestionAnswering"):
        getattr(transformers, "AutoModelFor" + name).from_config(config, trust_remote_code=True)(**inputs)
    phase = "generate"
    for options in ({}, {"do_sample": True}, {"num_beams": 2}):
        tokenizer.decode(model.generate(**inputs, max_new_tokens=8, **options)[0])
    model.set_attn_implementation("eager")
    model(**inputs, output_attentions=True)
phase = None
with open(sys.argv[1], "w") as file:
    installed = [sys.prefix, sys.base_prefix, *(place for place in sys.path if place.endswith("site-packages"))]
    json.dump({"installed": installed, "events": events}, file)
"""


@dataclass
class Event:
    """One thing that Python told a hook, while a folder was loaded or used.

    `file` and `line` are where the nearest remote code below it on the stack stood; `None` where there was none.
    `importing` says that this was an import statement, or that one lay between: code that is imported, and what it does
    then, is the library's, and `connections`, `written` and `read` look at it.
    """

    folder: str
    phase: str
    name: str
    paths: list[str]
    told: str
    writes: bool
    asked: str
    file: str | None
    line: int | None
    importing: bool

    def __str__(self) -> str:
        return f"{self.phase}: {self.name}({self.told}) asked by {self.asked}, caused by {self.file}:{self.line}"


@dataclass
class Run:
    """What a fresh process did that loaded folders and generated with them."""

    work: Path
    installed: list[str]
    events: list[Event]

    def caused(self) -> list[Event]:
        """What remote code does by other statements than imports."""
        return [
            event
            for event in self.events
            if event.file is not None
            and not event.importing
            # class statements: transformers makes configurations dataclasses and evaluates annotations; torch makes
            # one for every operator that is registered
            and not (
                event.name in ("compile", "exec", "object.__setattr__") and event.asked in ("dataclasses", "typing")
            )
            # transformers reads a model's source to detect its features
            and not (
                event.asked in ("tokenize", "transformers.modeling_utils")
                and event.name == "open"
                and not event.writes
                and within(event.paths[0], self.work / "modules")
            )
        ]

    def connections(self) -> list[Event]:
        """Sockets and other processes, whoever asked for them."""
        families = ("socket", "subprocess", "pty", "urllib", "http", "ftplib", "smtplib", "webbrowser")
        processes = ("os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.startfile", "os.system")
        return [e for e in self.events if e.name.split(".")[0] in families or e.name in processes]

    def written(self) -> list[Event]:
        """Files and folders made, changed or removed anywhere but where they may be, whoever asked for it."""
        places = [self.work / "modules", self.work / "inductor"]  # torch creates the latter on import
        harmless = ("os.listdir", "os.scandir", "os.putenv", "os.unsetenv")
        return [
            event
            for event in self.events
            if event.writes or (event.name.startswith("os.") and event.name not in harmless)
            for path in event.paths
            if not any(within(path, place) for place in places)
            and not ("__pycache__" in path and any(within(path, place) for place in self.installed))
        ]

    def read(self) -> list[Event]:
        """Files read anywhere but where code and the model are, whoever asked for it."""
        # /proc/stat: psutil's import; /proc/mounts: transformers checks whether weights are on a local disk;
        # time zones: pandas' import, by transformers 5.6
        places = [self.work / "modules", self.work / "folders", *self.installed, "/proc", "/usr/share/zoneinfo"]
        return [
            event
            for event in self.events
            if event.name == "open" and not event.writes
            for path in event.paths
            if not any(within(path, place) for place in places)
        ]


def within(path: str, folder: Path | str) -> bool:
    """Whether a path, free of links, lies in a folder."""
    return Path(path).is_relative_to(Path(folder).resolve())


def save(variant: str, folder: Path) -> None:
    """A folder as users get it."""
    tiny_model(variant, attn_implementation="sdpa", **EVERY_FEATURE).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def listed(events: list[Event]) -> str:
    """One line for each, the first forty."""
    lines = list(dict.fromkeys(map(str, events)))
    return "\n".join([f"{len(lines)} times, the first:", *lines[:40]])


# --- code that misbehaves, on which the checks are tested -----------------------------------------------------------

CONTROLS = {
    "open('/etc/hostname').close()": "open",
    "open(__file__).close()": "open",
    "open('left', 'w').close()": "open",
    "pathlib.Path('secret').iterdir().__next__()": "os.listdir",
    "os.rename('left', 'moved')": "os.rename",
    "os.remove('moved')": "os.remove",
    "shutil.rmtree('secret')": "shutil.rmtree",
    "tempfile.mkdtemp(dir='.')": "os.mkdir",
    "torch.load('nothing')": "open",
    "socket.socket().close()": "socket.__new__",
    "socket.getaddrinfo('localhost', 80)": "socket.getaddrinfo",
    "urllib.request.urlopen('http://127.0.0.1:9')": "socket.connect",
    "subprocess.run(['true'])": "subprocess.Popen",
    "os.system('true')": "os.system",
    "os.fork() or os._exit(0)": "os.fork",
    "threading.Thread(target=lambda: os.system('true')).start()": "os.system",
    "ctypes.CDLL(None)": "ctypes.dlopen",
    "eval('1')": "exec",
    "exec('1')": "exec",
    "pickle.loads(pickle.dumps(print))": "pickle.find_class",
    "marshal.loads(marshal.dumps(1))": "marshal.loads",
    "importlib.reload(importlib.import_module('neighbour'))": "exec",
}
"""Statement -> what Python calls it."""

MISBEHAVIOUR = """

import contextlib, ctypes, functools, importlib, marshal, os, pathlib, pickle
import shutil, socket, subprocess, tempfile, threading, urllib.request


def misbehave():
    try: import neighbour
    except ImportError: raise  # without `try` transformers imports it, looking whether it is installed
{lines}
    threading.Thread(target=os.system, args=["true"]).start()


misbehave()
behave = DiffLlamaForCausalLM.forward


@functools.wraps(behave)
def forward(self, *args, **kwargs):
    misbehave()
    return behave(self, *args, **kwargs)


DiffLlamaForCausalLM.forward = forward
"""


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A process without diffllama, with empty caches, that loads V1, V2, and last a folder with `MISBEHAVIOUR`.

    The code of that folder does each of `CONTROLS` when it is imported and in `forward`.
    """
    work = tmp_path_factory.mktemp("trust")
    for variant, name in (("v1", "v1"), ("v2", "v2"), ("v2", "bad")):
        save(variant, work / "folders" / name)
    lines = "\n".join(f"    with contextlib.suppress(Exception): {statement}" for statement in CONTROLS)
    with (work / "folders" / "bad" / "modeling_diffllama.py").open("a") as file:
        file.write(MISBEHAVIOUR.format(lines=lines))
    (work / "elsewhere" / "secret").mkdir(parents=True)
    neighbour = "import socket\nsocket.socket().close()\nopen('left', 'w').close()\n"
    (work / "elsewhere" / "neighbour.py").write_text(neighbour)
    env = os.environ | {
        "HF_MODULES_CACHE": str(work / "modules"),
        "HF_HOME": str(work / "hub"),
        "HF_HUB_OFFLINE": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(work / "inductor"),
    }
    folders = [work / "folders" / name for name in (*VARIANTS, "bad")]
    process = subprocess.run(
        [sys.executable, "-c", PROCESS, work / "report", *folders],
        env=env,
        cwd=work / "elsewhere",
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    report = json.loads((work / "report").read_text())
    return Run(work, report["installed"], [Event(**event) for event in report["events"]])


@pytest.fixture(scope="module")
def ours(process: Run) -> Run:
    """What it did with our folders."""
    return replace(process, events=[event for event in process.events if event.folder != "bad"])


@pytest.fixture(scope="module")
def control(process: Run) -> Run:
    """What it did with the folder that misbehaves."""
    return replace(process, events=[event for event in process.events if event.folder == "bad"])


class TestFolder:
    def test_its_code_opens_no_file_no_socket_and_no_process(self, ours: Run) -> None:
        assert not ours.caused(), listed(ours.caused())

    def test_whoever_is_called_opens_no_socket_and_no_process(self, ours: Run) -> None:
        assert not ours.connections(), listed(ours.connections())

    def test_only_the_cache_of_remote_code_is_written(self, ours: Run) -> None:
        assert not ours.written(), listed(ours.written())

    def test_only_the_folder_and_installed_code_are_read(self, ours: Run) -> None:
        assert not ours.read(), listed(ours.read())

    def test_hook_heard_both_folders_from_beginning_to_end(self, ours: Run) -> None:
        copied = {Path(path).name for e in ours.events if e.writes for path in e.paths}
        assert {"configuration_diffllama.py", "differential_attention.py", "modeling_diffllama.py"} <= copied
        read = {path for e in ours.events if e.name == "open" for path in e.paths}
        for variant in VARIANTS:
            assert {str(ours.work / "folders" / variant / name) for name in ("config.json", "tokenizer.json")} <= read
        assert {e.file for e in ours.events if e.importing} >= {"configuration_diffllama.py", "modeling_diffllama.py"}


def line_of(statement: str, control: Run) -> int:
    """Where in the modeling file a statement is."""
    source = (control.work / "folders" / "bad" / "modeling_diffllama.py").read_text().splitlines()
    (line,) = (number for number, text in enumerate(source, 1) if text.endswith(f": {statement}"))
    return line


class TestControl:
    @pytest.mark.parametrize("phase", ["load", "forward", "generate"])
    def test_what_remote_code_does_is_caught_and_named(self, phase: str, control: Run) -> None:
        caused = [event for event in control.caused() if event.phase == phase]
        for statement, name in CONTROLS.items():
            line = line_of(statement, control)
            of_line = [event for event in caused if event.line == line]
            assert name in {event.name for event in of_line}, statement
            assert f"caused by modeling_diffllama.py:{line}" in listed(of_line)

    def test_what_an_imported_module_does_is_not_the_importers_but_caught_too(self, control: Run) -> None:
        line = line_of("import neighbour", control)
        assert [event for event in control.caused() if event.line == line] == []
        assert "socket.__new__" in {event.name for event in control.connections() if event.line == line}
        assert "left" in {Path(path).name for e in control.written() if e.line == line for path in e.paths}
        assert "neighbour.py" in {Path(path).name for e in control.read() if e.line == line for path in e.paths}

    def test_thread_without_remote_code_is_caught_in_the_whole_process(self, control: Run) -> None:
        assert ("os.system", None) in {(event.name, event.file) for event in control.connections()}
