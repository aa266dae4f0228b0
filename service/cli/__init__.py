"""The command line: `stillhouse`.

The story: `app` assembles the commands, which stand in modules named by what they do (`submitting`,
`reading`, `acting`, `comparing`, `deciding`, `serving`, ...); `rendering`, `answer_rendering` and
`progress` turn answers into text, `output` is the door to the terminal. Nothing here imports torch or
Ray before a command needs it, and a command's own imports stand inside it, so that help and completion
answer at once.
"""

from __future__ import annotations


def main() -> None:
    """Run the command line of this process and exit with the command's code."""
    from service.cli.app import app

    app(prog_name="stillhouse")
