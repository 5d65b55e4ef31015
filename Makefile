# make demo    the tutorial, then a small transformer: what was warmed, recorded and replayed
# make test    lint, the suite on the checked build; on the release build, audited as programs are, what the build matters for
# make audit   the suite once more, each replay compared with eager
# make sanitize  the core's tests under AddressSanitizer, then threads under ThreadSanitizer; SECONDS=600 of these
# make bench   ratios to floors measured in the same run
# make parity  PyTorch's own databases of operators, modules and optimizers beside eager, into docs/parity.md; DEVICE=cuda
# make zoo     models of many libraries, eager and jitted, into docs/zoo.md; INSTALL=1 installs the libraries into .venv
# make applications  whole algorithms, eager, jitted and compiled, into docs/applications.md; INSTALL=1 installs their needs
# make suites  other projects' own tests with cgt in their modules and optimizers, into docs/suites.md; INSTALL=1 installs their needs
# make docs    the site, into build/site; INSTALL=1 installs what builds it into .venv
# make gpu     the suite and the benches on a machine with a CUDA device; installs nothing
# make gpu2    the tests and figures of several processes, on a machine with two CUDA devices
# make lint    ruff, mypy, cython-lint, the structure rules of tests/project/test_layout.py, the counts of tests/house.py
# make ext     the release build, beside its source
# make wheel   a source distribution and a wheel for this Python and this torch into dist/, tried in an empty folder; .ci/wheels
#              makes those of a release, for several releases of torch
# make clean   removes what was built (not .venv)
#
# Without PYTHON, everything lives in .venv, made once from requirements.txt.
# With PYTHON=python3 (or any interpreter), that one is used and nothing is installed.

SHELL       := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := test
.NOTPARALLEL:
.PHONY: demo test audit sanitize bench parity zoo applications suites docs gpu gpu2 lint ext wheel clean

export PYTHONUNBUFFERED := 1

ifeq ($(origin PYTHON),undefined)
PY    := .venv/bin/python
READY := .venv/ready
else
PY    := $(PYTHON)
READY :=
endif

BUILD := setup.py -q build_ext --inplace
BENCH := -m pytest bench --benchmark-disable-gc --benchmark-sort=name --benchmark-columns=median,iqr,rounds

demo: OF := /3
demo: ext
	@echo "3/3  docs/from_scratch.py: the idea in plain Python; then the demo (about half a minute on a CPU)"
	$(PY) docs/from_scratch.py
	PYTHONPATH=. $(PY) docs/demo.py

# Two workers where pytest-xdist is installed. What looks at sources and pages needs no checked build; what tries cgt's Python runs on
# one build, and the release suite leaves it out. The release build is the one left behind, also when the suite fails on the checked one.
RELEASE = $(addprefix tests/,core run programs project)
WORKERS = $$($(call has,xdist) && printf -- --numprocesses=2)
test: lint
	$(PY) setup.py -q --name > /dev/null    # Cython's part, from which both builds are then compiled side by side
	CGT_DEBUG=1 $(PY) setup.py -q build_ext 2> >(cat >&2) & checked=$$!; $(PY) setup.py -q build_ext; wait $$checked  # one of them may rewrite a line
	CGT_DEBUG=1 $(PY) $(BUILD)
	$(PY) -m pytest $(WORKERS) --ignore=tests/project || { status=$$?; $(PY) $(BUILD); exit $$status; }
	$(PY) $(BUILD)
	CGT_AUDIT=first:2,doubling:1 $(PY) -m pytest $(WORKERS) $(RELEASE)    # as programs have it

audit: ext
	CGT_AUDIT=every:1 $(PY) -m pytest $(WORKERS)

# Only the core is instrumented; malloc and locks are everybody's. ThreadSanitizer wants memory where it expects it (setarch).
SECONDS := 60
CORE    := $(addprefix core/test_,crashes failures table guards threads stress) make/test_islands
sanitize: $(READY)
	sanitized() { setarch -R env LD_PRELOAD="$$(g++ -print-file-name=$$1) $$(g++ -print-file-name=libstdc++.so)" "$${@:2}"; }; \
	export ASAN_OPTIONS=detect_leaks=0:alloc_dealloc_mismatch=0 TSAN_OPTIONS=suppressions=tests/tsan.txt PYTHONPATH=.:tests; \
	trap '$(PY) $(BUILD)' EXIT; \
	CGT_SANITIZE=address $(PY) $(BUILD); \
	sanitized libasan.so $(PY) -m pytest $(WORKERS) $(CORE:%=tests/%.py); \
	sanitized libasan.so $(PY) tests/stress.py --threads 8 --seconds $(SECONDS); \
	CGT_SANITIZE=thread $(PY) $(BUILD); \
	sanitized libtsan.so $(PY) -m pytest tests/core/test_crashes.py tests/core/test_threads.py; \
	sanitized libtsan.so $(PY) tests/stress.py --threads 8 --seconds $(SECONDS)

bench: ext
	$(PY) $(BENCH)

# Some 50 minutes on two cores. MOST: samples of each entry, none means all; JOBS: processes at once.
parity: DEVICE := cpu
parity: JOBS := 2
parity: MOST := 5
parity: ext
	$(PY) -m tests.databases --device $(DEVICE) --jobs $(JOBS) $(if $(MOST),--most $(MOST)) --json build/parity.jsonl --write docs/parity.md

# With PYTHON the libraries are that interpreter's; what is missing is told as absent.
zoo: ext
	$(if $(and $(READY),$(INSTALL)),$(PY) -m pip install -q -r bench/requirements-zoo.txt)
	$(PY) -m bench.zoo --write docs/zoo.md

applications: ext
	$(if $(and $(READY),$(INSTALL)),$(PY) -m pip install -q -r bench/requirements-applications.txt)
	$(PY) -m bench.applications --write

# Sources come from the package index into build/suites. The environment there has this interpreter's packages, too.
SUITES := build/suites/env
SITE   := import sysconfig; print(sysconfig.get_paths()["purelib"])
suites: ext
	if [ -n "$(INSTALL)" ]; then $(PY) -m venv $(SUITES); \
	$(PY) -c '$(SITE)' > "$$($(SUITES)/bin/python -c '$(SITE)')/outside.pth"; \
	$(SUITES)/bin/python -m pip install -q $$($(PY) -m tests.suites --needs); fi
	if [ -x $(SUITES)/bin/python ]; then suites=$(SUITES)/bin/python; else suites=$(PY); fi; \
	$$suites -m tests.suites --json build/suites/rows.json --write docs/suites.md

docs: $(READY)
	$(if $(and $(READY),$(INSTALL)),$(PY) -m pip install -q -r docs/requirements.txt)
	$(PY) -m mkdocs build --strict

# The interpreter that is there, with its CUDA build of torch.
gpu: PY := $(or $(PYTHON),python3)
gpu:
	$(PY) $(BUILD)
	$(PY) -m bench.patches --write docs/patches.md
	$(PY) bench/gpu.py

# A linter that a given interpreter lacks is skipped, and said so; .venv has them all. cython-lint reads file by file and
# so cannot see that the spine's imports are used in its chapters: test_layout.py looks after those.
CYTHON_LINT := from cython_lint.cython_lint import main; raise SystemExit(main())
has = $(PY) -c "import importlib.util as u, sys; sys.exit(not u.find_spec('$(1)'))"

# The same for several processes, on a machine with two of them.
gpu2: PY := $(or $(PYTHON),python3)
gpu2:
	$(PY) $(BUILD)
	$(PY) -m bench.ranks --tests

lint: $(READY)
	if $(call has,ruff); then $(PY) -m ruff check . && $(PY) -m ruff format --check cgt; else echo "ruff is not installed: skipped"; fi
	if $(call has,mypy); then $(PY) -m mypy; else echo "mypy is not installed: skipped"; fi
	if $(call has,cython_lint); then $(PY) -c "$(CYTHON_LINT)" cgt_core.pxd cgt/core/*.pxi; \
	else echo "cython-lint is not installed: skipped"; fi
	$(PY) -m pytest --noconftest tests/project/test_layout.py
	$(PY) tests/house.py

# $(OF): "/3" where these are the steps of `make demo`.
ext: $(READY)
	@$(if $(OF),echo "2$(OF)  building the extension with Cython and the C++ compiler (about a minute on two cores; nothing if it is there)")
	$(PY) $(BUILD)

# The wheel is made from the source distribution, so that this is whole, too.
wheel: $(READY)
	rm -rf dist *.egg-info
	$(PY) setup.py -q sdist
	CGT_LABEL=1 $(PY) -m pip -q wheel --no-build-isolation --no-deps -w dist dist/*.tar.gz
	$(PY) tests/installed.py dist/*.whl

.venv/ready: requirements.txt
	@echo "$(if $(OF),1$(OF)  )installing PyTorch and the tools that build and test into .venv (about a minute, and the downloads)"
	python3 -m venv .venv
	$(PY) -m pip install --disable-pip-version-check -q "pip>=25.1"    # the first that shows how far it is with installing
	$(PY) -m pip install --progress-bar on -r requirements.txt
	touch $@

clean:
	rm -rf build dist *.egg-info *.so cgt_core.cpp cgt_core.html
	find . -path ./.venv -prune -o -name __pycache__ -type d -exec rm -rf {} +
