# Everything starts here: `make` lists the targets. Needs GNU make and Python 3.11; all else is installed into .venv.

PYTHON ?= python3.11 python3 python
CONFIG = configs/default.yaml
ARGS =
JOBS = 2
# What `make gate` times against: a revision, or `baseline` for the commit that the baseline came from.
BASE ?=

VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed
BUSY  := $(VENV)/.installing
LOG   := $(VENV)/setup.log

.DEFAULT_GOAL := help
.PHONY: help architecture setup bench tradeoffs bench-kernels bench-sparse profile smoke test check fix verify sensitivity nightly gate gate-study timing-study history trend ci-summary report readme-figures clean distclean FORCE

help: ## List the targets
	@awk 'BEGIN { FS = ":.*## " } /^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo '  ARGS="..." is passed on (make test ARGS="-k masks"); CONFIG=FILE picks the grid of make bench;'
	@echo '  BASE=REV makes make gate time this tree beside that revision (BASE=baseline: where the baseline came from);'
	@echo '  PYTHON=... picks the interpreter that .venv is made with.'

setup: $(STAMP) ## Create .venv and install into it (the other targets do this by themselves)
	@echo "Ready: $(BIN)/harness"

bench: $(STAMP) ## Judge, weigh and time every cell of configs/default.yaml (about 4 minutes)
	@$(BIN)/harness run $(CONFIG) $(ARGS)

tradeoffs: $(STAMP) ## MHA, GQA, MQA and MLA beside each other at real sizes, in contests (about 10 minutes)
	@$(BIN)/harness run configs/tradeoffs.yaml $(ARGS)

profile: $(STAMP) ## The same, and where its time went: by part of a cell's work, and by cell
	@$(BIN)/harness run $(CONFIG) --profile $(ARGS)

smoke: $(STAMP) ## The same over configs/smoke.yaml (seconds)
	@$(BIN)/harness run configs/smoke.yaml $(ARGS)

# One torch thread per worker: two workers of two threads each are slower on two cores, and sums change with threads.
test: $(STAMP) ## Run the tests
	@OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

check: $(STAMP) ## Lint, formatting, types and the schema of the workflows: ruff, mypy and check-jsonschema
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy harness tests $(if $(wildcard bench/*.py),bench)
	@$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows $(wildcard .github/workflows/*.yml)

fix: $(STAMP) ## Apply ruff's fixes and formatting
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

verify: $(STAMP) ## Swap the attention of every model family and prove that nothing changed (under 2 minutes)
	@$(BIN)/harness verify --all $(ARGS)

sensitivity: $(STAMP) ## Put wrong attentions in every cell and prove that the comparison sees them (under 5 minutes)
	@$(BIN)/harness sensitivity $(CONFIG) $(ARGS)

# Set before Python starts: torch's threads read it when they are made.
bench-kernels: $(STAMP) ## Time every kernel beside SDPA, nn.MultiheadAttention and transformers (about 10 minutes)
	@GOMP_SPINCOUNT=20000 $(BIN)/python -m bench.kernel_study $(ARGS)

bench-sparse: $(STAMP) ## Error, sparsity and time of block-sparse attention beside the dense kernel (a minute)
	@GOMP_SPINCOUNT=20000 $(BIN)/python bench/sparse_study.py $(ARGS)

# The gate judges a run with wrong cells, too: exit code 1 is a verdict. Beyond that there is no run to judge.
nightly: $(STAMP) ## Verify the model families, run configs/nightly.yaml, then the gate's exact part
	@verdict=0; run=results/latest; \
	set -- $(ARGS); while [ $$# -gt 0 ]; do case $$1 in --out) run=$${2-};; --out=*) run=$${1#--out=};; esac; shift; done; \
	$(BIN)/harness verify --all --quiet || verdict=$$?; \
	$(BIN)/harness run configs/nightly.yaml $(ARGS) || { code=$$?; [ $$code -eq 1 ] || exit $$code; verdict=1; }; \
	$(BIN)/harness gate "$$run" || verdict=$$?; \
	exit $$verdict

gate: $(STAMP) ## Compare the latest run with results/baseline, and with BASE=REV its times; fails on a regression
	@$(BIN)/harness gate results/latest $(if $(BASE),--base $(filter-out baseline,$(BASE))) $(ARGS)

gate-study: $(STAMP) ## How often does the gate cry wolf or sleep, beside other tools? (hours; ARGS="--quick": 2 minutes)
	@$(BIN)/python -m bench.gate_study $(ARGS)

STATE ?= quiet
timing-study: $(STAMP) ## Does the timer know when it was disturbed? STATE=quiet or busy (at most 8 minutes)
	@$(BIN)/python -m bench.timing_study $(STATE) $(ARGS)

history: $(STAMP) ## Keep the latest run as a night of results/history
	@$(BIN)/harness trend --add results/latest $(ARGS)

trend: $(STAMP) ## At which nights, and commits, did a cell change for good?
	@$(BIN)/harness trend $(if $(wildcard results/latest/.),--out results/latest/trend.md) $(ARGS)

ci-summary: ## Post the latest run's gate.md, trend.md and summary.md to the CI job's page, or print them
	@found=; for each in gate.md trend.md summary.md; do \
		if [ -e "results/latest/$$each" ]; then \
			found=1; cat "results/latest/$$each" >> "$${GITHUB_STEP_SUMMARY:-/dev/stdout}"; fi; done; \
	[ -n "$$found" ] || echo 'There is no run in results/latest.'

architecture: $(STAMP) ## Draw the rooms of docs/architecture.md anew from the real imports
	@$(BIN)/python -m tests.rooms

report: $(STAMP) ## Write the report of the latest run
	@$(BIN)/harness report results/latest $(ARGS)

readme-figures: $(STAMP) ## Draw the README's picture from the latest run
	@$(BIN)/harness report results/latest --format png --out docs/tradeoffs.png --quiet

clean: ## Remove caches, build artefacts and runs; keeps results/baseline, results/history and .venv
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	@find harness tests bench -type d -name __pycache__ -prune -exec rm -rf {} +
	@if [ -d results ]; then \
		find results -mindepth 1 -maxdepth 1 ! -name baseline ! -name history ! -name '.git*' ! -name '*.md' -exec rm -rf {} +; fi

distclean: clean ## The same, and .venv too
	@rm -rf $(VENV)

# ---- .venv ----------------------------------------------------------------------------------------------------------
# The stamp is written last and holds the folder it was made for: a half-made, moved or broken .venv is made again.
# $(BUSY) is there only while packages are being installed, so finding it means that an install was killed midway.

MADE_FOR := $(shell test -x $(BIN)/python && cat $(STAMP) 2>/dev/null)
ifneq "$(MADE_FOR)" "$(CURDIR)"
$(STAMP): FORCE
endif

VERSION_CHECK := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input install --constraint constraints.txt

$(STAMP): pyproject.toml constraints.txt
	@set -eu; \
	python=; for each in $(PYTHON); do \
		if "$$each" -c '$(VERSION_CHECK)' 2>/dev/null; then python=$$each; break; fi; done; \
	if [ -z "$$python" ]; then \
		echo 'No usable Python: need 3.11 or newer with its venv module; tried: $(PYTHON).' >&2; \
		echo 'Install it, or name one: make PYTHON=/path/to/python3.11 ...' >&2; exit 1; fi; \
	if [ -e $(BUSY) ] || ! $(BIN)/python -m pip --version >/dev/null 2>&1 || \
		{ [ -e $(STAMP) ] && [ "$$(cat $(STAMP))" != '$(CURDIR)' ]; }; then \
		echo "Making .venv with $$($$python --version); the first time takes 1 to 5 minutes."; \
		$$python -m venv --clear $(VENV); \
	else echo 'Bringing .venv up to date.'; fi; \
	rm -f $(STAMP); touch $(BUSY); : > $(LOG); \
	step() { echo "  $$1"; shift; "$$@" >> $(LOG) 2>&1 || { \
		tail -n 20 $(LOG) >&2; echo 'Setup failed; the whole log is $(LOG).' >&2; rm -f $(BUSY); exit 1; }; }; \
	step '1/3 torch' $(PIP) "$$(grep '^torch==' constraints.txt)"; \
	step '2/3 build tools' $(PIP) setuptools; \
	step '3/3 harness and its tools' $(PIP) --no-build-isolation --editable '.[dev,models,report,ray]'; \
	rm -f $(BUSY); printf '%s\n' '$(CURDIR)' > $(STAMP)
