# make sample: eight pictures of the demo model on whatever device there is. make test: the tests. Both build .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: sample test clean

sample: $(VENV)/ready
	$(BIN)/python sample.py --model DiT-Demo/2 --output sample.png

test: $(VENV)/ready
	$(BIN)/python -m pytest tests

# Debian and Ubuntu may come without venv or pip: python3-venv is then the one package to add.
$(VENV)/ready: requirements.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "python 3.10 or later is needed")'
	$(PYTHON) -m venv $(VENV) || { echo "no venv: apt-get install python3-venv"; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

clean:
	rm -rf $(VENV) sample.png
