# The commands of a developer. Each sets up .venv once, with the versions of constraints.txt, keeping a torch that is
# already there: a machine's own torch knows its GPUs. `make demo` and `make test` are all that a newcomer needs.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test test-torch check fuzz bench bench-pipelines bench-batches bench-replicas bench-data bench-checkpoints bench-memory bench-peaks bench-experts bench-context bench-kept bench-fit bench-sequence bench-clock bench-placements bench-search bench-chosen bench-gpu build-time predict figures families goldens goldens-update outside outside-init outside-placed docs wheel planted-bugs planted-faults executed cases hosts soak clean

# The first Python of at least 3.11; choose another with `make test PYTHON=…`.
PYTHON ?= $(shell for python in python3 python3.11 python3.12 python3.13 python3.14; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$python; break; }; done)
PY := .venv/bin/python
READY := .venv/.parc-ready
HAS_TORCH = $(PY) -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)'
WORKERS ?= 2
SOAK_MINUTES ?= 60
BEGAN := $(shell date +%s)

help:
	@echo "make demo    build a plan, train it on 4 processes beside the plain module, compare the losses"
	@echo "make test    the tests"
	@echo "make test-torch VERSION=2.15   the tests with another torch, in an environment of its own (gigabytes of CUDA on Linux)"
	@echo "make check   what continuous integration runs: format, lint, types, layers, tests"
	@echo "make fuzz    the property tests with many more examples, and rows that make test leaves out"
	@echo "make bench   step times beside DDP, DTensor and the plain module, in turn in one run"
	@echo "make bench-pipelines  a pipeline beside torch's own, and what stages keep for backward"
	@echo "make bench-batches  what it takes of a step to find out whether all ranks gave one batch"
	@echo "make bench-replicas what it takes of a step to find out whether ranks still hold the same weights"
	@echo "make bench-data     how long a step waits for its data: tokens mapped into memory"
	@echo "make bench-checkpoints  seconds and memory of saving and restoring 1.1 B parameters in parts, beside torch's own"
	@echo "make bench-memory   the largest model that trains inside a memory limit: plain, ZeRO 3, out of files"
	@echo "make bench-experts  a mixture of experts on two ranks: all on each, half on each, beside one rank, messages and DDP"
	@echo "make bench-context  sequences that two ranks share, beside one rank; the longest that fit into a limit of memory"
	@echo "make bench-peaks    peak memory of a rank by tensors: ZeRO 3 beside FSDP2, and 32 builds beside their estimates"
	@echo "make bench-kept     bytes that a block keeps for backward, value by value, beside torch's AOTAutograd"
	@echo "make bench-fit      what \`recompute … fit\` chooses for five sizes, its estimates beside peaks, and torch's own budget"
	@echo "make bench-sequence split sequences beside tensor parallelism: bytes sent, and bytes kept beside the closed form"
	@echo "make bench-clock    plans on one and two ranks here, beside the times that the clock predicts for this machine"
	@echo "make predict        published training runs priced by the clock, beside their times: RUNS=table.csv"
	@echo "make bench-placements   what an integer program splits over tp, beside the lines of parc init: bytes, time, seconds of the search"
	@echo "make bench-search   open plans of Llama 3: layouts, seconds, and the best as estimated and as compiled, beside the published one"
	@echo "make bench-chosen   the plan that the search chooses for two ranks here, run beside the next best and random plans"
	@echo "make bench-gpu      a Llama of 1.1 B parameters on a GPU: time and memory beside the plain module, eager and compiled"
	@echo "make build-time     the smallest and the largest example, in turn with a checkout BASE=…; Llama 3 8B of 2 to 32 layers on 1 to 16,384 ranks: seconds, memory, a plot"
	@echo "make figures        what introductions to parallel training promise, beside what builds of the examples have: docs/figures.md"
	@echo "make families       every family of models under every plan: verified, what it sends, how exact it is"
	@echo "make goldens        the programs of some forty plans, letter by letter beside their golden hashes"
	@echo "make outside        models of other packages (transformers, timm, diffusers, x-transformers): verified, refused or crashed"
	@echo "make docs    the site of the documentation, built and checked: build/docs/site/index.html"
	@echo "make report-look    pages of a few builds in a real browser: pictures for a desktop and a phone, light and dark"
	@echo "make outside-placed placements over tp that the integer program finds for the same models, beside those of parc init"
	@echo "make outside-init   plans that parc init proposes for the same models: built, and what they gather"
	@echo "make wheel   dist/: source distribution and wheel, installed beside torch alone, used and measured"
	@echo "make cases   replay small models and losses that once trained as something else, and say what comes of each"
	@echo "make hosts   two hosts in two network namespaces: 20 runs that stop and go on, and a stranger at every port"
	@echo "make planted-bugs   break good builds in every way, and say which check refuses each"
	@echo "make executed       the functions of a run's machine that no check of a build or a run executes, with reasons"
	@echo "make planted-faults break parc's own source in a copy, one fault at a time, and say which check or test notices each"
	@echo "make soak    fuzz with fresh seeds for SOAK_MINUTES (now $(SOAK_MINUTES)), a quarter of them hostile plans, builds, checkpoints; before it 200 kills, 300 ends of scripts, 7,200 mutants of certificates, and every file that parc reads in every hostile form"

# constraints.txt is the whole tested set; without its torch line pip leaves a torch that it finds as it is. A Python that
# is itself in a virtual environment hands its torch on by a path file: --system-site-packages would skip over it.
$(READY): constraints.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "parc needs Python 3.11 or newer: none found on PATH" >&2; exit 1; }
	@if ! test -x $(PY); then \
		torch=$$($(PYTHON) -c 'import importlib.util as u, os.path as p; s = u.find_spec("torch"); \
			print(p.dirname(p.dirname(s.origin)) if s else "")'); \
		echo "making .venv with $(PYTHON)$${torch:+, keeping the torch in $$torch}" >&2; \
		$(PYTHON) -m venv $${torch:+--system-site-packages} .venv || { rm -rf .venv; \
			echo "cannot make a virtual environment (on Debian and Ubuntu: install python3-venv)" >&2; exit 1; }; \
		$(HAS_TORCH) || test -z "$$torch" || \
			echo "$$torch" > $$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/kept-torch.pth; \
	fi
	@wanted=constraints.txt; more=", of them torch, the largest"; \
	if $(HAS_TORCH); then more=; wanted=.venv/constraints-but-torch.txt; grep -v '^torch==' constraints.txt > $$wanted; fi; \
	echo "installing the $$(grep -c == $$wanted) packages of constraints.txt$$more; this is done once" >&2; \
	$(PY) -m pip install --disable-pip-version-check -r $$wanted
	@$(PY) -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps -e .
	@touch $@

demo: $(READY)
	$(PY) examples/demo.py $(BEGAN)

test: $(READY)
	$(PY) -m pytest -q -n $(WORKERS)

# The whole tested set but for torch, and for setuptools, of which each torch has its own bounds; before 70.1 it needs wheel.
test-torch:
	@test -n "$(VERSION)" || { echo "which torch? make test-torch VERSION=2.15" >&2; exit 1; }
	@$(MAKE) --no-print-directory $(OTHER)/.parc-ready
	$(OTHER)/bin/python -m pytest -q -n $(WORKERS)

OTHER := .venv-torch-$(VERSION)
$(OTHER)/.parc-ready: constraints.txt pyproject.toml
	@test -x $(OTHER)/bin/python || $(PYTHON) -m venv $(OTHER)
	@grep -vE '^(torch|setuptools)==' constraints.txt > $(OTHER)/constraints-but-torch.txt
	$(OTHER)/bin/python -m pip install --quiet --disable-pip-version-check \
		-r $(OTHER)/constraints-but-torch.txt 'torch==$(VERSION).*' 'setuptools>=77'
	@$(OTHER)/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps -e .
	@touch $@

check: $(READY)
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(PY) -c 'from importlinter.cli import lint_imports_command as run; run()'  # its script may be another environment's
	$(PY) -m pytest -q -n $(WORKERS)

fuzz: $(READY)
	$(PY) -m pytest -q -n $(WORKERS) -m "hypothesis or wide" --hypothesis-profile=fuzz --timeout=0

bench: $(READY)
	$(PY) -m benchmarks.peers

bench-pipelines: $(READY)
	$(PY) -m benchmarks.pipelines

bench-memory: $(READY)
	$(PY) -m benchmarks.memory_limit

bench-peaks: $(READY)
	$(PY) -m benchmarks.peaks

bench-experts: $(READY)
	$(PY) -m benchmarks.experts

bench-context: $(READY)
	$(PY) -m benchmarks.context

bench-kept: $(READY)
	$(PY) -m benchmarks.kept

bench-fit: $(READY)
	$(PY) -m benchmarks.fit

bench-sequence: $(READY)
	$(PY) -m benchmarks.sequence

bench-clock: $(READY)
	$(PY) -m benchmarks.clock

RUNS ?= published_runs.csv
predict: $(READY)
	$(PY) -m benchmarks.predict $(RUNS) --workers $(WORKERS)

bench-placements: $(READY)
	$(PY) -m benchmarks.placements

bench-search: $(READY)
	$(PY) -m benchmarks.search

bench-chosen: $(READY)
	$(PY) -m benchmarks.chosen

bench-gpu: $(READY)
	$(PY) -m benchmarks.gpu

bench-batches: $(READY)
	$(PY) -m benchmarks.batches

bench-replicas: $(READY)
	$(PY) -m benchmarks.replicas

bench-data: $(READY)
	$(PY) -m benchmarks.data

bench-checkpoints: $(READY)
	$(PY) -m benchmarks.checkpoint_shards

build-time: $(READY)
	$(PY) -m benchmarks.build_time $(if $(BASE),--base $(BASE))

figures: $(READY)
	$(PY) -m benchmarks.figures

families: $(READY)
	$(PY) -m benchmarks.families

goldens: $(READY)
	$(PY) -m tests.goldens

goldens-update: $(READY)
	$(PY) -m tests.goldens --update

# An environment of its own, which finds all that .venv finds by a path file.
OUTSIDE := .venv-outside
$(OUTSIDE)/.parc-ready: $(READY) benchmarks/outside-requirements.txt
	@test -x $(OUTSIDE)/bin/python || $(PY) -m venv --system-site-packages $(OUTSIDE)
	@$(PY) -c 'import sys; print("import site;", *(f"site.addsitedir({path!r});" for path in sys.path if "-packages" in path))' \
		> $$($(OUTSIDE)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shared.pth
	$(OUTSIDE)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r benchmarks/outside-requirements.txt
	@touch $@

outside: $(OUTSIDE)/.parc-ready
	$(OUTSIDE)/bin/python -m benchmarks.outside

# Another environment of its own: the site's generator is no part of what the tests need.
.venv-docs/.parc-ready: website/requirements.txt
	@test -x .venv-docs/bin/python || $(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check -r website/requirements.txt
	@touch $@

docs: .venv-docs/.parc-ready
	.venv-docs/bin/python -m website build/docs

report-look: $(READY)
	$(PY) -m benchmarks.report_look

outside-init: $(OUTSIDE)/.parc-ready
	$(OUTSIDE)/bin/python -m benchmarks.outside_init

outside-placed: $(OUTSIDE)/.parc-ready
	$(OUTSIDE)/bin/python -m benchmarks.outside_placed

wheel: $(READY)
	$(PY) benchmarks/wheel.py

executed: $(READY)
	$(PY) -m tests.executed

cases: $(READY)
	$(PY) -m tests.cases

planted-bugs: $(READY)
	$(PY) -m tests.planted_bugs

planted-faults: $(READY)
	$(PY) -m tests.planted_faults

hosts: $(READY)
	$(PY) -m tests.hosts

soak: $(READY)
	$(PY) -m tests.hostile_files
	$(PY) -m tests.kills --seed $$RANDOM
	$(PY) -m tests.exits
	$(PY) -m tests.certified_mutants --seed $$RANDOM
	$(PY) -m tests.hostile_inputs --seconds $$((15 * $(SOAK_MINUTES))) --seed $$RANDOM
	end=$$(($$(date +%s) + 45 * $(SOAK_MINUTES))); while test $$(date +%s) -lt $$end; do \
		$(PY) -m pytest -q -n $(WORKERS) -m hypothesis --hypothesis-profile=soak --hypothesis-seed=$$RANDOM --timeout=0 || exit 1; \
	done

clean:
	rm -rf .venv .venv-* .pytest_cache .mypy_cache .ruff_cache .import_linter_cache build dist *.egg-info
