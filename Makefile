# make sample: eight pictures of the demo model, on a GPU if there is one. make page: serves the page for the browser. make test:
# the tests. Each builds .venv first, with the versions of constraints.txt.
# make constraints: writes the newest versions that requirements*.txt allow, for every Python from 3.10 on, to
# constraints.txt, and installs them. Run make test then.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: sample test page constraints clean
unexport PYTHONDONTWRITEBYTECODE # Python keeps the compiled modules that it imports; pip below compiles none

sample: $(VENV)/ready
	$(BIN)/python sample.py --model DiT-Demo/2 --output sample.png
	@# GPU and CPU have different random streams, and each its golden picture. LPIPS would need weights to be fetched.
	@kind=$$($(BIN)/python -c 'import torch; print("cuda" if torch.cuda.is_available() else "cpu")'); \
	  $(BIN)/python evaluate.py pretrained_models/demo/golden-$$kind.png sample.png --metrics mae psnr ssim

test: $(VENV)/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadscope --no-loadscope-reorder tests

page: $(VENV)/ready
	$(BIN)/python scripts/page.py

constraints: $(VENV)/ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.10 --no-annotate \
	  --custom-compile-command "make constraints" requirements-test.txt --output-file constraints.txt
	$(MAKE) $(VENV)/ready

# Debian and Ubuntu keep the part of python that makes a venv in a package of its own; root installs it, others are told.
$(VENV)/ready: requirements.txt requirements-test.txt constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "python 3.10 or later is needed: make PYTHON=python3.12")'
	@$(PYTHON) -m ensurepip --version >/dev/null 2>&1 || { \
	  [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -q && apt-get install -qy --no-install-recommends python3-venv; } || { \
	  echo "python cannot make a venv: sudo apt-get install python3-venv, then make again"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -r requirements-test.txt -c constraints.txt
	@# `import accel` works from any folder: a folder of the path has a link to it alone. pip's editable installation would add
	@# 40 ms to every start of Python.
	mkdir -p $(VENV)/checkout && ln -sfn ../../accel $(VENV)/checkout/accel
	echo "$(CURDIR)/$(VENV)/checkout" >$$(echo $(VENV)/lib/python*/site-packages)/checkout.pth
	@touch $@

clean:
	rm -rf $(VENV) sample.png
