# make check   lint, types and the quick tests, at most three minutes on two idle cores: for a change in one place
# make test    lint, types, generated code, every test once: for each commit
# make test-long  the tests marked `long`, which make test leaves out: repetition. And 1,000 cases of each property where
#              make test tries 100: before an issue is resolved
# make test-v3  the tests with version 3 of the SageMaker SDK, which fits into no environment beside version 2; needs
#              Python 3.11 or newer
# make test-pythons  the quick tests that need no framework, on the other versions of Python that are found here: 3.10
#              (with the oldest packages that pyproject allows), 3.12 and 3.13
# make demo    the same training script on simulated homogeneous and heterogeneous jobs, then the comparison;
#              DEMO_FLAGS="--step-seconds 0.6" emulates slower accelerators, for machines that are slow or busy
# make soak    kills, stops, slows and cuts off processes of simulated jobs at random, and compares what was fed to the
#              ranks with an undisturbed run; DURATION_S=600 SEED=1 EVENTS=1000000
# make tf-jobs   N=50 simulated TensorFlow jobs in a row, a third of them ended by an exception, SIGTERM or a kill: does
#              each leave nothing and end as documented? SEED=1; half an hour
# make repeat  the tests of faults in whole jobs, N=20 times each: hours
# make reliability   run the tests and write from what they show docs/reliability.md
# make bench   short form of the benchmarks against their peers, under ten minutes; see benchmarks/README.md
# make studies short forms of the studies, each at most five minutes on two idle cores; results in runs/studies/
# make fuzz    coverage-guided fuzzing of the parsers for DURATION_S=600 seconds; new inputs go into tests/fuzz/corpus.zip
# make protos  regenerate hetero/wire/proto from protos/
#
# Needs Linux, GNU make and Python 3.10 or newer; everything else goes into .venv and .venv-NAME. Variables:
#   PYTHON=/path/to/python3     the interpreter of the environments (default: the first that works of those below)
#   TORCH_INDEX=URL             where pip finds PyTorch's CPU builds (the "CPU" choice on PyTorch's install page). Without
#                               it, and on a machine without such a wheel, pip takes the CUDA builds: several GB.
#   PIP_FLAGS="..."             anything else for pip, for example --find-links DIR
#   PYTEST_FLAGS="..."          for example -k cluster

# Tests start thousands of processes. Without this, each compiles the package anew, and pytest each file of tests.
unexport PYTHONDONTWRITEBYTECODE

.DELETE_ON_ERROR:
.PHONY: test check quick test-long test-v3 test-pythons lint types protos protos-check pytest repeat demo bench bench-env studies fuzz soak tf-jobs reliability clean

# Candidates are run, not just looked up: a version manager's shim may exist without its Python.
PYTHON ?= $(shell for candidate in python3.11 python3.12 python3.10 python3.13 python3; do \
	"$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo $$candidate && break; done)
PIP_INSTALL = -m pip install -q --disable-pip-version-check $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) $(PIP_FLAGS)

DURATION_S = 600
SEED = 1
EVENTS = 1000000
EVIDENCE = .evidence.jsonl
N = 20

# Folders whose tests start no jobs, import no script in another process and need neither torch.distributed nor
# TensorFlow: the pure parts, the wire, and the rules for the package as a whole.
QUICK = $(addprefix tests/,audit control decide/pages documents metrics report system wire) $(wildcard tests/test_*.py) \
	tests/launch/test_placement.py tests/launch/test_roles.py tests/launch/data_services \
	tests/batches/test_fetch.py tests/batches/test_indices.py tests/pool/test_slot_liveness.py

# Of the quick tests, those that import no framework. They run on other Pythons too: torch is gigabytes for each.
PLAIN = $(addprefix tests/,audit control documents metrics system wire) $(patsubst %,tests/test_%.py,cli cluster config datasets platforms)
PYTHONS = 3.10 3.12 3.13
OLDEST = 3.10

# pyenv's Pythons count too, in use or not.
python_of = $(shell for candidate in python$(1) "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/$(1).*/bin/python; do \
	"$$candidate" -c '' 2>/dev/null && echo "$$candidate" && break; done)

ENV = .venv/bin
DEV = .venv/.installed-dev
DEMO = .venv/.installed-demo
PROTOS = .venv-protos/.installed
BENCH = .venv-bench/.installed
FUZZ = .venv-fuzz/.installed
V3 = .venv-v3/.installed

# Types are checked while the tests run: one process among many.
test: lint protos-check
	$(MAKE) --no-print-directory -j2 types pytest

# Types and tests run at the same time, because each needs one core.
check: lint
	$(MAKE) --no-print-directory --output-sync=target -j2 types quick

quick: $(DEV)
	$(ENV)/python -m pytest -q $(QUICK) $(PYTEST_FLAGS)

lint: $(DEV)
	$(ENV)/ruff check .
	$(ENV)/ruff format --check .

types: $(DEV)
	$(ENV)/mypy

pytest: $(DEV)
	$(ENV)/python -m tests.run_parts $(PYTEST_FLAGS)

# With a longer limit of time for each test, because it has ten times as many cases.
test-long: $(DEV)
	$(ENV)/python -m tests.run_parts -m "long or hypothesis" --hypothesis-profile long --timeout 1800 $(PYTEST_FLAGS)

test-v3: $(V3)
	.venv-v3/bin/python -m pytest $(wildcard tests/sagemaker/test_*_v3.py tests/sagemaker/*/test_*_v3.py) tests/sagemaker/test_submit_job.py $(PYTEST_FLAGS)

# Installed after .venv, and one after the other, because each installation writes this folder's egg-info. The tests then
# run side by side, because they wait for three quarters of their time.
test-pythons: $(DEV)
	@for version in $(PYTHONS); do $(MAKE) --no-print-directory install-python-$$version || exit; done
	$(MAKE) --no-print-directory --output-sync=target -j$(words $(PYTHONS)) $(addprefix test-python-,$(PYTHONS))

install-python-%: $(DEV)
	$(if $(call python_of,$*),$(MAKE) --no-print-directory .venv-py$*/.installed,@echo "skipped: no Python $* here")

test-python-%: install-python-%
	$(if $(call python_of,$*),.venv-py$*/bin/python -m pytest -q -p no:cacheprovider $(PLAIN) $(PYTEST_FLAGS))

repeat: $(DEV)
	$(ENV)/python -m pytest tests/integration -m fault --repeat $(N) $(PYTEST_FLAGS)

protos: $(PROTOS)
	.venv-protos/bin/python protos/generate.py

protos-check: $(PROTOS)
	.venv-protos/bin/python protos/generate.py --check

soak: $(DEV)
	$(ENV)/python -m tests.chaos.soak --duration-s $(DURATION_S) --seed $(SEED) --events $(EVENTS)

tf-jobs: N = 50
tf-jobs: $(BENCH)
	.venv-bench/bin/python -m tests.chaos.tf_jobs --jobs $(N) --seed $(SEED)

# The document's own tests come last: they would end the run that is to write it anew.
reliability: $(DEV)
	rm -f $(EVIDENCE)
	HETERO_TEST_EVIDENCE=$(EVIDENCE) $(ENV)/python -m tests.run_parts --ignore=tests/reliability/test_document.py $(PYTEST_FLAGS)
	$(ENV)/python -m tests.reliability.reliability_document $(EVIDENCE)
	$(ENV)/python -m pytest -q tests/reliability/test_document.py

demo: $(DEMO)
	$(ENV)/python examples/photos/demo.py $(DEMO_FLAGS)

bench: $(BENCH)
	@for question in transport pipelines scaling interference memory compression gpu_feed tf_feed unauthenticated safeguards planner; do \
		echo "== bench_$$question.py"; .venv-bench/bin/python benchmarks/bench_$$question.py --short || exit; done
	.venv-bench/bin/python benchmarks/plots.py --results benchmarks/results/short

bench-env: $(BENCH)

# One line per study.
studies: $(DEV)
	$(ENV)/hetero study examples/text_scaling/studies/short.yaml --fresh --output-dir runs/studies/text_scaling
	$(ENV)/hetero study benchmarks/mlbench/1a-short.yaml --fresh --output-dir runs/studies/mlbench-1a-short
	$(ENV)/hetero study benchmarks/mlbench/2a-short.yaml --fresh --output-dir runs/studies/mlbench-2a-short
	$(ENV)/hetero study benchmarks/mlbench/open-short.yaml --fresh --output-dir runs/studies/mlbench-open-short

fuzz: $(FUZZ)
	mkdir -p build/fuzz
	.venv-fuzz/bin/python -m tests.fuzz.fuzz_decoder --unpack build/fuzz
	.venv-fuzz/bin/python -m tests.fuzz.fuzz_decoder build/fuzz -max_total_time=$(DURATION_S) -max_len=8192 \
		-rss_limit_mb=1024 -artifact_prefix=build/ -print_final_stats=1
	.venv-fuzz/bin/python -m tests.fuzz.fuzz_decoder --pack build/fuzz

.venv/bin/python:
	@test -n "$(PYTHON)" || { echo "error: found no Python 3.10 or newer; install one, or say PYTHON=/path/to/python3" >&2; exit 2; }
	@$(PYTHON) -m venv .venv || { rm -rf .venv; echo "error: $(PYTHON) cannot make environments (Debian: python3-venv)" >&2; exit 2; }

$(DEV) $(DEMO): .venv/.installed-%: pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing what $* needs into .venv (minutes the first time)"
	$(ENV)/python $(PIP_INSTALL) -c constraints.txt -e '.[$*]'
	@touch $@

# The generator needs protobuf 4, which nothing else here uses: see protos/generate.py.
$(PROTOS): | .venv/bin/python
	.venv/bin/python -m venv .venv-protos
	.venv-protos/bin/python $(PIP_INSTALL) --only-binary :all: grpcio-tools==1.62.3 'setuptools<81'
	@touch $@

# The peers (TensorFlow, Ray) are large and slow to import: not in everyone's environment.
$(BENCH): pyproject.toml constraints.txt | .venv/bin/python
	test -x .venv-bench/bin/python || .venv/bin/python -m venv .venv-bench
	@echo "installing the benchmarks' peers into .venv-bench (minutes the first time)"
	.venv-bench/bin/python $(PIP_INSTALL) -c constraints.txt -e '.[bench]'
	@touch $@

# atheris has wheels for some versions of Python only, and nothing else here needs it.
$(FUZZ): pyproject.toml constraints.txt | .venv/bin/python
	test -x .venv-fuzz/bin/python || .venv/bin/python -m venv .venv-fuzz
	.venv-fuzz/bin/python $(PIP_INSTALL) -c constraints.txt -e '.[compression]' atheris
	@touch $@

# The oldest versions are pyproject's floors, read as exact ones. Those of the tests' own tools promise nothing to users.
.venv-py%/.installed: pyproject.toml constraints.txt
	$(call python_of,$*) -m venv --clear .venv-py$*
	sed '/^test = /,$$d' pyproject.toml | grep -oE '"[A-Za-z0-9_-]+>=[0-9.]+"' | tr -d '"' | sed 's/>=/==/' > .venv-py$*/floors.txt
	.venv-py$*/bin/python $(PIP_INSTALL) -c $(if $(filter $(OLDEST),$*),.venv-py$*/floors.txt,constraints.txt) -e '.[test]'
	@touch $@

# Both versions of the SageMaker SDK are one package by name.
$(V3): constraints-v3.txt | .venv/bin/python
	.venv/bin/python -m venv --clear .venv-v3
	@echo "installing version 3 of the SageMaker SDK into .venv-v3"
	.venv-v3/bin/python $(PIP_INSTALL) --no-deps -r constraints-v3.txt
	@touch $@

clean:
	rm -rf .venv .venv-bench .venv-fuzz .venv-protos .venv-py* .venv-v3 .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info
