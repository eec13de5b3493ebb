"""What bench/sanitize.py makes of a tool's report. The tool is a stand-in; the kernels need a GPU."""

from argparse import Namespace

import pytest

from bench import sanitize

SCRIPT = r"""#!/bin/sh
echo "========= COMPUTE-SANITIZER"
case "$2" in
memcheck) echo "caching $PYTORCH_NO_CUDA_MEMORY_CACHING, $*"; echo "========= ERROR SUMMARY: 0 errors";;
racecheck)
  echo "========= Error: Race reported between Read access at nvjet_sm90_hsh_64x8+0xa50"; hazards=1
  case "$*" in *eager*) echo "========= Error: Race reported between Read access at linear+0xa50"; hazards=2;; esac
  echo "========= "
  echo "========= RACECHECK SUMMARY: $hazards hazards displayed ($hazards errors, 0 warnings)"; exit 9;;
synccheck) exec sleep 60;;
initcheck)
  case "$*" in *eager*) echo "========= Error: process didn't terminate successfully"; exit 1;; esac
  printf "========= Uninitialized __global__ memory read of size 8 bytes\n=========     at %s+0x330\n========= \n" \
    "void at::native::vectorized_elementwise_kernel<(int)8, at::native::MulFunctor>(int, T2, T3)" \
    "void cublasLt::splitKreduce_kernel<(int)32>" $UNWRITTEN
  echo "========= Warning: Error buffer overflow has been detected. Some records have been dropped"
  set -- $UNWRITTEN; echo "========= ERROR SUMMARY: $((3 + $#)) errors"; exit 9;;
esac
"""


@pytest.fixture
def tool(tmp_path, monkeypatch):
    (tmp_path / "compute-sanitizer").write_text(SCRIPT)
    (tmp_path / "compute-sanitizer").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    args = Namespace(side=8, batch_rows=[1, 2], limit=1)
    return lambda name, mode="eager": sanitize.under(name, mode, args)


def test_a_run_is_clean_only_if_the_tool_says_so(tool):
    rows = [tool(name) for name in sanitize.TOOLS]
    assert [row["clean"] for row in rows] == [True, False, False, False]
    assert [row["errors"] for row in rows] == [0, 2, None, None]
    assert [row["status"] for row in rows] == [0, 9, None, 1]
    assert "clean" in sanitize.line(rows[0]) and "status 9, 2 errors" in sanitize.line(rows[1])
    assert "ran out of time" in sanitize.line(rows[2])
    assert rows[0]["report"] == [] and "RACECHECK SUMMARY" in rows[1]["report"][-1]


def test_races_in_libraries_are_counted_apart(tool):
    ours, theirs = tool("racecheck"), tool("racecheck", "captured")
    assert not ours["clean"] and ours["libraries"] == 1
    assert theirs["clean"] and theirs["errors"] == theirs["libraries"] == 1
    assert "1 reports in libraries" in sanitize.line(theirs)


def test_unwritten_memory(tool, monkeypatch):
    """That torch's and cuBLAS's kernels read what TMA wrote is no error; ours read what torch wrote again."""
    row = tool("initcheck", "captured")
    assert row["clean"] and row["errors"] == row["libraries"] == 2
    monkeypatch.setenv("UNWRITTEN", "adaln")
    row = tool("initcheck", "captured")
    assert not row["clean"] and (row["errors"], row["libraries"]) == (3, 2) and row["reported_in"] == {"adaln": 1}
    assert [line.split()[1] for line in row["report"][:3]] == ["Uninitialized", "at", "ERROR"]


def test_without_a_gpu(run):
    done = run("bench/sanitize.py", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "there is none here" in done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("mode", sanitize.MODES)
def test_every_kernel_runs(run, mode):
    done = run("bench/sanitize.py", "--work", "--rewrite", "--mode", mode, "--batch-rows", 1, 2, "--side", 16)
    assert done.returncode == 0, done.stderr
