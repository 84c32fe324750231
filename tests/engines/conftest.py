"""Settings of vLLM on a CPU, if it is installed, made before its import."""

import importlib.util
import os


if importlib.util.find_spec("vllm"):
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # otherwise a core stays free, and two processes are refused
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # another process would import vLLM for 20 s
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["HF_MODULES_CACHE"] = "build/vllm/modules"
