"""What a process writes to stdout and stderr, in the log of its run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import ctypes, json, os, subprocess, sys
from trainers.process import output_logged
from trainers.reporting import Sink

class Kept(Sink):
    def __init__(self):
        self.lines = []
    def log(self, level, message, stream="log"):
        self.lines.append([level, message, stream])

sink, libc = Kept(), ctypes.CDLL(None)
print("before", flush=True)
with output_logged(sink):
    print("half a line, ", end="")
    print("and the rest")
    os.write(1, b"by a library\\n")
    libc.puts(b"held back by C")
    sys.stderr.write("a warning\\n")
    os.write(2, b"\\xffbytes\\n\\n   \\n")
    subprocess.run(["echo", "by a child"])
    {within}
    os.write(1, b"without an end")
os.write(1, b"\\nafterwards\\n")
open(sys.argv[1], "w").write(json.dumps(sink.lines))
"""


def told(tmp_path: Path, *, within: str = "pass", to: str = "files") -> tuple[list[list[str]], str, str]:
    """Runs the program with both streams in files, one file or pipes; returns the log, and what they got."""
    command = [sys.executable, "-c", PROGRAM.format(within=within), str(tmp_path / "log.json")]
    if to == "pipes":
        ended = subprocess.run(command, check=True, capture_output=True)
        out, err = ended.stdout, ended.stderr
    else:
        with (tmp_path / "out").open("ab") as first, (tmp_path / "err").open("ab") as second:
            subprocess.run(command, check=True, stdout=first, stderr=first if to == "one" else second)
        out, err = (tmp_path / "out").read_bytes(), (tmp_path / "err").read_bytes()
    lines = json.loads((tmp_path / "log.json").read_text())
    return lines, out.decode(errors="replace"), err.decode(errors="replace")


@pytest.mark.parametrize("to", ["files", "pipes"])
def test_what_python_libraries_and_children_write_is_in_the_log_and_where_it_went(tmp_path, to):
    lines, out, err = told(tmp_path, to=to)
    assert [message for _, message, stream in lines if stream == "stdout"] == [
        *sorted(["half a line, and the rest", "by a library", "held back by C", "by a child"], key=out.find),
        "without an end",
    ]
    assert [line for line in lines if line[2] == "stderr"] == [
        ["warning", "a warning", "stderr"],
        ["warning", "\ufffdbytes", "stderr"],
    ]
    assert out.startswith("before\n") and out.endswith("without an end\nafterwards\n")
    assert {"by a library", "held back by C", "by a child"} <= set(out.splitlines())
    assert err == "a warning\n\ufffdbytes\n\n   \n"


def test_streams_in_one_file_are_taken_once(tmp_path):
    lines, out, _ = told(tmp_path, to="one")
    assert len(lines) == len([line for line in out.splitlines() if line.strip()]) - 2
    assert ["info", "a warning", "stdout"] in lines


def test_lines_are_taken_while_they_are_written(tmp_path):
    look = "any(message == \\'by a library\\' for _, message, _ in sink.lines)"
    wait = f"exec('import time\\nwhile not {look}: time.sleep(0.01)')"
    lines, _, _ = told(tmp_path, within=wait)
    assert ["info", "by a library", "stdout"] in lines


def test_a_flood_is_cut_off_in_the_log_alone(tmp_path):
    flood = "os.write(1, b'x' * 9000 + b'\\n'); [os.write(1, b'z\\n') for _ in range(11_000)]"
    lines, out, _ = told(tmp_path, within=flood)
    written = [message for _, message, stream in lines if stream == "stdout"]
    assert len(written) == 10_001 and max(map(len, written)) == 4000
    assert written[-1] == "more than 10,000 lines were written; the rest is left out"
    assert out.count("z\n") == 11_000


def test_the_last_words_of_a_process_that_ends_are_in_its_file(tmp_path):
    with (tmp_path / "out").open("ab") as first:
        end = "os.write(1, b'last words\\n'); os.abort()"
        command = [sys.executable, "-c", PROGRAM.format(within=end), str(tmp_path / "log.json")]
        assert subprocess.run(command, check=False, stdout=first).returncode < 0
    assert "last words" in (tmp_path / "out").read_text().splitlines()
