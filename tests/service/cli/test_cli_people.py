"""Commands about people, projects and the audit log, and those that keep order among experiments."""

from __future__ import annotations

import orjson
import pytest
import sqlalchemy as sa

from service.db import schema
from tests.service.cli.house import House


def test_a_team_is_set_up_from_the_command_line(house: House) -> None:
    assert house.run("user", "add", "ada", "--email", "ada@example.org").exit_code == 0
    assert house.run("user", "add", "ci", "--service").exit_code == 0
    assert [found["name"] for found in house.json("user", "list")["items"]] == ["ada", "ci"]
    assert "disabled" in house.run("user", "disable", "ci").stdout
    assert "disabled" in house.run("user", "list").stdout
    assert house.run("user", "enable", "ci").exit_code == 0

    house.run("project", "create", "nlp", "--title", "Language")
    assert house.run("project", "member", "add", "nlp", "ada", "--role", "maintainer").exit_code == 0
    shown = house.run("project", "show", "nlp").stdout
    assert "nlp: Language" in shown and "ada: maintainer" in shown and "its members" in shown
    house.run("project", "set", "nlp", "--visible-to-all")
    assert house.json("project", "show", "nlp")["visible_to_all"] is True
    assert "archived" in house.run("project", "archive", "nlp").stdout
    assert "archived" in house.run("project", "list").stdout
    house.run("project", "archive", "nlp", "--undo")
    house.run("project", "member", "remove", "nlp", "ada")
    assert house.json("project", "show", "nlp")["members"] == []


def test_a_token_is_all_that_is_printed(house: House) -> None:
    house.run("user", "add", "ada")
    made = house.run(
        "token", "create", "--name", "ci", "--scope", "submit", "--user", "ada", "--expires", "90d"
    )
    (secret,) = made.stdout.splitlines()
    assert secret.startswith("sth_") and "not shown again" in made.stderr
    listed = house.run("token", "list", "--user", "ada", width=200).stdout
    assert secret[:10] in listed and secret not in listed and "never" in listed
    assert house.run("token", "revoke", "1").stdout == "token 1 (ci of ada) is revoked\n"
    assert "revoked" in house.run("token", "list", "--all").stdout


def test_the_audit_log_is_a_line_per_change(house: House) -> None:
    house.run("user", "add", "ada")
    house.run("user", "disable", "ada")
    lines = house.run("audit", "--since", "1h", "--object", "user:ada").stdout.splitlines()
    assert len(lines) == 2
    assert "user.add ada" in lines[0] and "user.disable ada" in lines[1] and "null -> " in lines[1]
    assert house.json("audit", "--action", "project")["items"] == []
    exported = house.run("audit", "--export", "jsonl").stdout.splitlines()
    assert [orjson.loads(line)["action"] for line in exported] == ["user.add", "user.disable"]


def test_tags_notes_and_archive(house: House) -> None:
    number = str(house.submitted())
    assert house.run("tag", number, "nlp", "base").stdout == f"experiment {number}: base, nlp\n"
    assert house.run("tag", number, "--remove", "base").stdout == f"experiment {number}: nlp\n"
    house.run("note", number, "diverges")
    assert house.run("note", number).stdout == "diverges\n"
    shown = house.run("show", number).stdout
    assert "nlp" in shown and "diverges" in shown
    house.run("archive", number)
    assert house.json("list") == []
    assert [found["id"] for found in house.json("list", "--archived")] == [int(number)]
    assert len(house.json("list", "--filter", "tags LIKE '% nlp %'")) == 1
    house.run("archive", number, "--undo")
    assert len(house.json("list")) == 1


def test_a_deleted_experiment_is_restored_by_its_number(house: House) -> None:
    number = str(house.submitted())
    house.run("cancel", number)
    deleted = house.run("delete", number, "--yes")
    assert f"stillhouse restore {number}" in deleted.stderr
    assert house.run("show", number).exit_code == 3
    (listed,) = house.json("restore", "--list")
    assert (listed["id"], listed["state"]) == (int(number), "cancelled")
    assert listed["restorable_until_s"] == listed["deleted_s"] + 30 * 86_400
    assert number in house.run("restore", "--list").stdout
    assert "restored experiment" in house.run("restore", number).stdout
    assert house.run("show", number).exit_code == 0
    assert house.json("restore", "--list") == []
    house.run("delete", number, "--yes", "--now")
    assert house.json("restore", "--list") == [], "it is past restoring"
    refused = house.run("restore", number)
    assert refused.exit_code == 4 and "being removed" in refused.stderr


@pytest.mark.parametrize(
    ("command", "code", "says"),
    [
        ("token create --name x --user ada --expires soon", 2, "is not a length of time"),
        ("token create --name x --user ada --scope root", 2, "'read', 'submit', 'operate', 'admin'"),
        ("token create --name x --user bob", 3, "there is no user bob"),
        ("token revoke 9", 3, "no token has the id 9"),
        ("user add ada", 4, "user ada exists already"),
        ("user disable bob", 3, "there is no user bob"),
        ("project member add default ada --role king", 2, "'viewer', 'member', 'maintainer'"),
        ("project member add cv ada", 3, "there is no project cv"),
        ("project create default", 4, "exists already"),
        ("project archive default", 4, "cannot be archived"),
        ("audit --since yesterday", 2, "is not a length of time"),
        ("restore", 2, "stillhouse restore --list"),
        ("restore 99 --list", 2, "--list takes neither"),
        ("restore 99", 3, "no experiment has the id 99"),
        ("restore 99 --replace", 2, "--replace takes a backup"),
    ],
)
def test_bad_input_is_one_line(house: House, command: str, code: int, says: str) -> None:
    house.run("user", "add", "ada")
    refused = house.run(*command.split())
    assert (refused.exit_code, len(refused.stderr.splitlines())) == (code, 1), refused.output
    assert says in refused.stderr


def test_limits_are_set_and_shown(house: House) -> None:
    house.run("project", "create", "nlp")
    words = ("--weight", "2", "--ceiling", "cpu=4", "--priority", "member=normal", "--queued-runs", "50")
    shown = house.run("project", "limits", "nlp", *words).stdout
    assert "4 cpu" in shown and "member up to normal" in shown and "50" in shown
    house.run("project", "limits", "nlp", "--ceiling", "cpu=none", "--queued-runs", "none")
    limits = house.json("project", "limits", "nlp")
    assert (limits["weight"], limits["ceiling"], limits["queued_runs_per_user"]) == (2.0, {}, None)
    for words in (("--weight", "0"), ("--ceiling", "cpu"), ("--ceiling", "cpus=1")):
        assert house.run("project", "limits", "nlp", *words).exit_code != 0
    assert house.json("project", "limits", "nlp") == limits


def test_shares_and_use_are_shown(house: House) -> None:
    assert house.run("shares").output == "no one holds or is waiting for devices\n"
    house.submitted()
    shown = house.run("shares").output
    assert "entitled" in shown and "cpu" in shown and "default" in shown
    assert max(map(len, shown.splitlines())) <= 80
    (project, user) = house.json("shares")
    assert (project["project"], project["user"], project["entitled_part"]) == ("default", None, 1.0)
    assert (user["waits"], user["held_devices"]) == (True, 0.0)
    lane = {"project": "default", "owner": user["user"], "pool": "default", "hardware": "cpu"}
    used = sa.insert(schema.share_usage).values(**lane, usd=7.4851e-4, at_s=house.store.clock())
    house.store.database.write(lambda connection: connection.execute(used))
    assert "$0.000749" in house.run("shares").output
    house.run("project", "limits", "default", "--budget", "usd=5")
    use = house.run("project", "usage", "default", "--month", "2026-02").output
    assert "default, 2026-02" in use and "budget: 0 of 5 USD, 5 left" in use
    assert house.json("project", "usage", "default", "--month", "2026-02")["users"] == []
    wrong = house.run("project", "usage", "default", "--month", "February")
    assert wrong.exit_code == 2 and "month" in wrong.stderr and wrong.stderr.count("\n") == 1
