"""Keeps one local Ray head alive for exactly as long as its parent lives.

Run as `python -m service.local.ray_head FOLDER -- COMMAND...` by `service.local.local_ray`.
It starts the command, and ends it when its standard input closes: a pipe closes however the
parent ends, `kill -9` included. As a subreaper it becomes the parent of every process that Ray
leaves behind, so that ending its descendants ends all of Ray, and nothing else on the machine.
The folder, which holds Ray's sockets, logs and token, is removed last; when the command ended by
itself it stays, for its logs.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil

_PR_SET_CHILD_SUBREAPER = 36
_GRACE_S = 3.0


def main(arguments: list[str]) -> int:
    """Runs the command until it ends or the parent does; the exit status says which (0 = the parent)."""
    folder, command = Path(arguments[0]), arguments[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # The parent decides when Ray ends: signals from the terminal or to the group do not.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    head = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        while head.poll() is None:
            readable, _, _ = select.select([sys.stdin], [], [], 0.5)
            if readable and not os.read(sys.stdin.fileno(), 1024):
                return 0
        return head.returncode or 1
    finally:
        failed = head.poll() is not None
        end_descendants()
        if not failed:
            shutil.rmtree(folder, ignore_errors=True)


def end_descendants() -> None:
    """Asks every process below this one to end, then kill those that stay."""
    me = psutil.Process()
    for process in me.children():
        process.terminate()
    psutil.wait_procs(me.children(), timeout=_GRACE_S)
    # Killing a process hands its children to this one, so ask until none is left.
    while left := me.children(recursive=True):
        for process in left:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(left, timeout=_GRACE_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
