"""The command line: `stillhouse`.

`app` assembles the commands, which are grouped by subject; `terminal` prints, `connection` finds the
service, and `tables`, `answer_tables` and `progress` turn records into text. Nothing here imports torch or
Ray before a command needs it, and imports that a command alone needs are inside it, so that help and
completion are fast.
"""


def main() -> None:
    """Runs the command line of this process and exits with the command's code."""
    from service.cli.app import app

    app(prog_name="stillhouse")
