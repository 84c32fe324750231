"""Fresh processes that have imported torch, but nothing that registers the model.

Importing transformers takes 5 s of CPU time, most of it for torch and SciPy. One process imports these, and the others
are forked from it.
"""

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any


SERVER = """
import json, os, sys, traceback
import jinja2, scipy.optimize  # and what else transformers imports
import torch._dynamo, torch.distributed.checkpoint, torch.distributed.tensor

assert not {"diffllama", "huggingface_hub", "transformers"} & set(sys.modules)
for line in sys.stdin:
    code, arguments, cwd, environment, answer, output = json.loads(line)
    if os.fork() == 0:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), 2)
        os.dup2(2, 1)
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv[1:] = arguments
        status = 1
        try:
            names = {"__name__": "__main__", "facts": {}}
            exec(code, names)
            with open(answer, "w") as file:
                json.dump(names["facts"], file)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


@functools.cache
def server() -> subprocess.Popen[str]:
    """Start the process that has imported torch. It ends with this process."""
    return subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def run(
    code: str, *arguments: object, environment: Mapping[str, str], cwd: Path | str = "."
) -> tuple[dict[str, Any], str]:
    """Run code in a fresh process without a terminal. It must exit with status 0.

    Args:
        arguments: arguments in `sys.argv`.
        environment: all environment variables.
        cwd: working directory.

    Returns:
        The dictionary `facts` of the code, and its output.
    """
    process = server()
    assert process.stdin is not None
    assert process.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        answer, output = Path(folder, "answer"), Path(folder, "output")
        words = [str(word) for word in arguments]
        request = (code, words, os.path.abspath(cwd), dict(environment), str(answer), str(output))
        print(json.dumps(request), file=process.stdin, flush=True)
        assert process.stdout.readline() == "0\n", output.read_text()[-8000:]
        return json.loads(answer.read_text()), output.read_text()


def facts(code: str, environment: Mapping[str, str], cwd: Path | str = ".") -> dict[str, Any]:
    """Return the facts of `run`, with this process's environment and further variables."""
    return run(code, environment=os.environ | environment, cwd=cwd)[0]
