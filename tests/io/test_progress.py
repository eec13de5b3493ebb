"""Progress in a log file."""

from io import StringIO

from accel.io.progress import ProgressLines, progress_line

JOB = dict(n=1200, total=50_000, initial=0, elapsed=280.0, rate=4.31, unit="picture", prefix="")
JOB["unit_scale"] = False
FILE = JOB | dict(n=3e8, total=2.7e9, rate=8.5e7, unit="B", unit_scale=True, prefix="x.pt")


def test_a_line_of_progress():
    assert progress_line(JOB) == "1,200 of 50,000 pictures, 4.3/s, 3 h left"
    resumed = JOB | dict(n=49_900, initial=49_340, rate=None)
    assert progress_line(resumed) == "49,900 of 50,000 pictures, 2/s, 50 s left"
    assert (
        progress_line(JOB | dict(total=2400, rate=0.25))
        == "1,200 of 2,400 pictures, 0.25/s, 80 min left"
    )
    assert progress_line(FILE) == "x.pt: 300M of 2.70GB, 85.0MB/s, 28 s left"
    assert progress_line(FILE | dict(total=None)) == "x.pt: 300MB, 85.0MB/s"


def test_lines_of_an_interval():
    """Lines only after it, and none for work that is done before."""
    for interval, count in ((0, 3), (1e9, 0)):
        file = StringIO()
        with ProgressLines(total=6, unit="step", file=file, mininterval=interval) as bar:
            for _ in range(3):
                bar.update(2)
        lines = file.getvalue().splitlines(keepends=True)
        assert len(lines) == count and all(line.endswith("s left\n") for line in lines)
