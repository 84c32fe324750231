"""Settings of vLLM on a CPU, before it is imported."""

import os


os.environ.pop("TRITON_INTERPRET", None)
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # by itself it keeps a core of two free, and refuses two processes
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # a process imports vLLM in 20 s: those that can do without do
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ["HF_MODULES_CACHE"] = "build/vllm/modules"
