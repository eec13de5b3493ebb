"""What bench/sanitize.py makes of a tool's run. The tool is a stand-in; the kernels need a GPU."""

from argparse import Namespace

import pytest

from bench import sanitize

SCRIPT = r"""#!/bin/sh
echo "========= COMPUTE-SANITIZER"
case "$2" in
memcheck) echo "========= ERROR SUMMARY: 0 errors";;
racecheck) echo "========= Error: Race reported at linear+0xa50, not at $8"; echo "no report"; exit 9;;
synccheck) exec sleep 60;;
esac
"""


def test_a_run_is_clean_only_if_the_tool_says_so(tmp_path, monkeypatch):
    (tmp_path / "compute-sanitizer").write_text(SCRIPT)
    (tmp_path / "compute-sanitizer").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    args = Namespace(side=8, batch_rows=[1, 2], limit=1)
    rows = [sanitize.under(name, "eager", args) for name in sanitize.TOOLS]
    assert [row["clean"] for row in rows] == [True, False, False] and [row["status"] for row in rows] == [0, 9, None]
    assert "clean" in sanitize.line(rows[0]) and "ran out of time" in sanitize.line(rows[2])
    assert rows[0]["report"] == [] and "Race reported" in rows[1]["report"][1] and "kns=nvjet," in rows[1]["report"][1]
    assert "no report" not in str(rows[1]["report"])


@pytest.mark.gpu
@pytest.mark.parametrize("mode", sanitize.MODES)
def test_every_kernel_runs(run, mode):
    done = run("bench/sanitize.py", "--work", "--mode", mode, "--batch-rows", 1, 2, "--side", 16)
    assert done.returncode == 0, done.stderr
