"""A slice of the full and damaged disks, with a fresh seed each time."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.parametrize("count", [20, pytest.param(60, marks=pytest.mark.slow)])
def test_a_slice_of_disk_faults_keeps_the_last_good_state_and_says_so(count: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.disk", "--count", str(count)],
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout)
    answer = json.loads(done.stdout.splitlines()[-1])
    for target in ("checkpoints", "spools", "database", "full_disk"):
        counted = answer[target]
        found = (counted["count"], counted["wrong_state"], counted["silent"])
        assert found == (count // 4, 0, 0), done.stdout
    assert done.returncode == 0, done.stderr
