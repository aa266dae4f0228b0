"""What a process writes to stdout and stderr, in the log of its run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

PROGRAM = """
import ctypes, json, os, subprocess, sys, time
from trainers.process import output_logged
from trainers.reporting import Sink

class Kept(Sink):
    def __init__(self):
        self.lines = []
    def log(self, level, message, stream="log"):
        self.lines.append([level, message, stream])

libc, folder = ctypes.CDLL(None), sys.argv[1]
own = os.dup(1), os.dup(2)

def write(case, out, err, within=lambda sink: None):
    sink = Kept()
    os.dup2(out, 1)
    os.dup2(err, 2)
    print("before", flush=True)
    with output_logged(sink):
        print("half a line, ", end="")
        print("and the rest")
        os.write(1, b"by a library\\n")
        libc.puts(b"held back by C")
        sys.stderr.write("a warning\\n")
        os.write(2, b"\\xffbytes\\n\\n   \\n")
        subprocess.run(["echo", "by a child"])
        within(sink)
        os.write(1, b"without an end")
    os.write(1, b"\\nafterwards\\n")
    os.dup2(own[0], 1)
    os.dup2(own[1], 2)
    open(f"{folder}/{case}.json", "w").write(json.dumps(sink.lines))

def file(name):
    return os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

def wait(sink):
    while not any(message == "by a library" for _, message, _ in sink.lines):
        time.sleep(0.01)

def flood(sink):
    os.write(1, b"x" * 9000 + b"\\n")
    for _ in range(11_000):
        os.write(1, b"z\\n")

def end(sink):
    os.write(1, b"last words\\n")
    os.abort()

write("files", file("files.out"), file("files.err"))
write("pipes", int(sys.argv[2]), int(sys.argv[3]))
write("one file", one := file("one file.out"), one)
write("while written", file("while written.out"), file("while written.err"), wait)
write("flood", file("flood.out"), file("flood.err"), flood)
write("end", file("end.out"), file("end.err"), end)
"""


@dataclass
class Written:
    """What a case put into the log of its run, and what its streams got."""

    lines: list[list[str]]
    out: str
    err: str


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Written]:
    """Runs all cases in one process: importing the trainers takes longer than all of them."""
    folder = tmp_path_factory.mktemp("output")
    (out, out_end), (err, err_end) = os.pipe(), os.pipe()
    command = [sys.executable, "-c", PROGRAM, str(folder), str(out_end), str(err_end)]
    ended = subprocess.run(command, check=False, pass_fds=(out_end, err_end), capture_output=True)
    for name, reading, writing in (("pipes.out", out, out_end), ("pipes.err", err, err_end)):
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            (folder / name).write_bytes(pipe.read())
    assert ended.returncode == -signal.SIGABRT, ended.stderr.decode()

    def read(case: str) -> Written:
        log = folder / f"{case}.json"
        lines = json.loads(log.read_text()) if log.exists() else []
        streams = (folder / f"{case}.{stream}" for stream in ("out", "err"))
        out, err = (file.read_bytes().decode(errors="replace") if file.exists() else "" for file in streams)
        return Written(lines, out, err)

    return read


@pytest.mark.parametrize("to", ["files", "pipes"])
def test_what_python_libraries_and_children_write_is_in_the_log_and_where_it_went(written, to):
    case = written(to)
    assert [message for _, message, stream in case.lines if stream == "stdout"] == [
        *sorted(
            ["half a line, and the rest", "by a library", "held back by C", "by a child"], key=case.out.find
        ),
        "without an end",
    ]
    assert [line for line in case.lines if line[2] == "stderr"] == [
        ["warning", "a warning", "stderr"],
        ["warning", "\ufffdbytes", "stderr"],
    ]
    assert case.out.startswith("before\n") and case.out.endswith("without an end\nafterwards\n")
    assert {"by a library", "held back by C", "by a child"} <= set(case.out.splitlines())
    assert case.err == "a warning\n\ufffdbytes\n\n   \n"


def test_streams_in_one_file_are_taken_once(written):
    case = written("one file")
    assert len(case.lines) == len([line for line in case.out.splitlines() if line.strip()]) - 2
    assert ["info", "a warning", "stdout"] in case.lines


def test_lines_are_taken_while_they_are_written(written):
    assert ["info", "by a library", "stdout"] in written("while written").lines


def test_a_flood_is_cut_off_in_the_log_alone(written):
    case = written("flood")
    logged = [message for _, message, stream in case.lines if stream == "stdout"]
    assert len(logged) == 10_001 and max(map(len, logged)) == 4000
    assert logged[-1] == "more than 10,000 lines were written; the rest is left out"
    assert case.out.count("z\n") == 11_000


def test_the_last_words_of_a_process_that_ends_are_in_its_file(written):
    assert "last words" in written("end").out.splitlines()
