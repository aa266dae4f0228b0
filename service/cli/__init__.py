"""The command line: `stillhouse`.

The story: `app` assembles the commands, `submitting`, `reading`, `acting`, `serving` and
`upkeep` are the commands, `rendering` and `progress` turn answers into text, `output` is
the door to the terminal. Nothing here imports torch or Ray before a command needs it, and a
command's own imports stand inside it, so that help and completion answer at once.
"""

from __future__ import annotations


def main() -> None:
    """Run the command line of this process and exit with the command's code."""
    from service.cli.app import app

    app(prog_name="stillhouse")
