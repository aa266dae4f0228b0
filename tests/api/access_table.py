"""Who may do what, written down apart from the code that decides it, and the people to try it with.

Imports nothing of `api`: a client over HTTP uses it as well.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from service.db import schema, statements
from service.domain.access import Role, Scope, UserKind
from service.spec.experiment import validate
from service.store import Store

FIRST_TOKEN = "stillhouse-" + "f" * 32
USER_CODE = "BCDF-GHJK"
METRICS_TOKEN = "stillhouse-metrics-" + "m" * 32

REFUSED = ("nobody", "expired", "revoked", "disabled", "unknown", "malformed", "metrics")
ACCEPTED = (
    "other", "viewer", "member", "owner", "maintainer", "administrator", "first_token",
    "owner_read", "owner_submit", "maintainer_read", "maintainer_submit",
    "administrator_read", "administrator_submit", "administrator_operate", "owner_elsewhere",
)  # fmt: skip
"""`other` is a member of another project; what follows an underscore is the token's scope, and `elsewhere` a
token for another project of the owner's."""


def _row(accepted: str, **exceptions: str) -> Mapping[str, str]:
    return {**dict.fromkeys(REFUSED, "401"), **dict.fromkeys(ACCEPTED, accepted), **exceptions}


PUBLIC = _row("ok", **dict.fromkeys(REFUSED, "ok"))
ANYONE_SIGNED_IN = _row("ok")
LOOK = _row("ok", other="404", owner_elsewhere="404")
STEER = _row(
    "ok",
    other="404",
    owner_elsewhere="404",
    viewer="403",
    member="403",
    owner_read="403",
    maintainer_read="403",
    maintainer_submit="403",
    administrator_read="403",
    administrator_submit="403",
)
SUBMIT = _row(
    "ok",
    other="422",
    owner_elsewhere="403",
    viewer="403",
    owner_read="403",
    maintainer_read="403",
    administrator_read="403",
)
WITH_SUBMIT = _row("ok", owner_read="403", maintainer_read="403", administrator_read="403")
MANAGE = _row(
    "403",
    other="404",
    owner_elsewhere="404",
    maintainer="ok",
    administrator="ok",
    administrator_operate="ok",
    first_token="ok",
)
ADMINISTER = _row("403", administrator="ok", first_token="ok")
OPERATE = _row("403", administrator="ok", administrator_operate="ok", first_token="ok", metrics="ok")

NO_PROVIDER = _row("404", **dict.fromkeys(REFUSED, "404"))
"""A provider is not set here."""

EXPECTED: Mapping[str, Mapping[str, str]] = {
    **dict.fromkeys(
        (
            "healthz", "openapi_document", "explain_problem", "documentation", "start_documentation",
            "documentation_asset", "page", "static", "plotly_script", "login_page", "login_options",
            "login_with_token", "device_page", "device_code", "device_token",
        ),
        PUBLIC,
    ),
    **dict.fromkeys(
        (
            "list_experiments", "list_runs", "export_runs", "get_queue", "list_hardware", "get_cluster",
            "list_held_devices", "list_shares", "list_examples", "stream_changes",
            "get_spec_schema", "readyz", "list_projects", "list_tokens",
            "list_subscriptions", "list_deleted_experiments", "list_views",
            "list_deliveries", "whoami", "logout", "list_sessions", "end_session", "describe_device_login",
            "decide_device_login",
        ),
        ANYONE_SIGNED_IN,
    ),
    **dict.fromkeys(
        (
            "get_experiment", "get_experiment_spec", "list_experiment_runs", "list_events", "get_ledger",
            "stream_experiment", "export_experiment", "compare_experiment", "score_experiment",
            "frontier_experiment", "effects_experiment", "recommend_experiment", "speedup_experiment",
            "report_experiment", "get_run", "get_points", "get_measurements", "get_run_ledger", "get_summary",
            "get_attempts", "get_logs", "get_model", "get_model_card", "get_run_config", "list_checkpoints",
            "get_trace", "get_kernel_trace", "get_predictions",
            "stream_run", "get_project", "get_project_limits", "get_project_usage",
            "list_figures", "get_figure",
        ),
        LOOK,
    ),
    **dict.fromkeys(
        (
            "delete_experiment", "cancel_experiment", "pause_experiment", "resume_experiment",
            "retry_experiment", "set_experiment_priority", "cancel_run", "retry_run",
            "restore_experiment", "tag_experiment", "annotate_experiment", "archive_experiment",
        ),
        STEER,
    ),
    **dict.fromkeys(("submit_experiment", "validate_spec", "preview_spec"), SUBMIT),
    **dict.fromkeys(
        (
            "create_token", "revoke_token", "add_subscription", "remove_subscription", "test_subscription",
            "save_view", "delete_view",
        ),
        WITH_SUBMIT,
    ),
    **dict.fromkeys(
        (
            "change_project", "set_project_limits", "archive_project", "set_member", "remove_member",
        ),
        MANAGE,
    ),
    **dict.fromkeys(
        ("list_users", "add_user", "change_user", "list_audit", "export_audit", "create_project"), ADMINISTER
    ),
    **dict.fromkeys(("login_with_provider", "login_from_provider"), NO_PROVIDER),
    "metrics": OPERATE,
}  # fmt: skip
"""What each operation answers to whom: `ok` is anything but a refusal, as `the body is missing`."""

REFUSALS = {401: "401", 403: "403", 404: "404"}


def outcome(status: int, problem_type: str | None) -> str:
    """Returns an answer as the table writes it."""
    if status == 422 and problem_type == "/problems/unknown-project":
        return "422"
    return REFUSALS.get(status, "ok")


SPEC = {"name": "theirs", "project": "nlp", "task": {"name": "imdb", "path": "texts"}, "seeds": [0]}


@dataclass(frozen=True, slots=True)
class World:
    """Two projects, one person for each column of the table, and an experiment of `owner` that has ended."""

    store: Store
    experiment_id: int
    run_id: int

    def submit(self) -> tuple[int, int]:
        """Returns a queued experiment of `owner` in project `nlp`, and its run."""
        spec = validate(SPEC)
        new, _ = self.store.submit(spec, list(spec.runs()), spec_text=json.dumps(SPEC), owner="owner")
        (run,) = self.store.runs(experiment_id=new.id).items
        return new.id, run.id

    def path(self, template: str, *, steers: bool) -> str:
        """Returns a path with the numbers of an experiment and its run; one of its own to steer."""
        experiment_id, run_id = self.submit() if steers else (self.experiment_id, self.run_id)
        if "/members/" in template:
            insert(self.store, schema.members, [{"project": "nlp", "user": "disabled", "role": Role.member}])
        return (
            template.replace("{experiment_id}", str(experiment_id))
            .replace("{run_id}", str(run_id))
            .replace("{slug}", "forbidden")
            .replace("{project}", "nlp")
            .replace("{figure}", "curve")
            .replace("{user_code}", USER_CODE)
            .replace("{session_id}", "0" * 15)  # Refused for its form, after the rule.
            .replace("{name:path}", "app.js")
            .replace("{name}", _NAMES.get(template.split("/")[1], "disabled"))
        )


_NAMES = {"docs": "swagger-ui.css"}


def headers_of(column: str) -> dict[str, str]:
    """Returns the credential of a column of the table."""
    if column == "nobody":
        return {}
    own = {"malformed": "two words", "metrics": METRICS_TOKEN, "first_token": FIRST_TOKEN}
    return {"Authorization": f"Bearer {own.get(column) or token_of(column)}"}


def token_of(name: str) -> str:
    """Returns the text of a token."""
    return f"stillhouse_{name:_<32}"


def body_of(operation: str) -> dict[str, Any]:
    """Returns the body that an operation takes, as arguments of a client."""
    if operation in ("submit_experiment", "validate_spec", "preview_spec"):
        return {"content": json.dumps(SPEC)}
    return {"json": {"priority": 10}} if operation == "set_experiment_priority" else {}


def populate(store: Store) -> World:
    """Adds people, projects, tokens and an experiment."""
    now = time.time()
    people = ("other", "viewer", "member", "owner", "maintainer", "administrator", "disabled")
    users = [
        {
            "name": name,
            "kind": UserKind.person,
            "administrator": name == "administrator",
            "disabled_s": now if name == "disabled" else None,
            "created_s": now,
        }
        for name in people
    ]
    projects = [
        {"name": name, "title": name, "visible_to_all": False, "notes": "", "created_s": now, "settings": {}}
        for name in ("nlp", "vision")
    ]
    roles = {"viewer": Role.viewer, "maintainer": Role.maintainer}
    members = [
        {"project": "nlp", "user": name, "role": roles.get(name, Role.member)}
        for name in ("viewer", "member", "owner", "maintainer", "disabled")
    ]
    members += [{"project": "vision", "user": name, "role": Role.member} for name in ("other", "owner")]
    tokens = [
        token_row(name, name, Scope.admin if name == "administrator" else Scope.operate) for name in people
    ]
    tokens += [
        token_row(name, name.partition("_")[0], Scope(name.partition("_")[2]))
        for name in ACCEPTED
        if name.rpartition("_")[2] in set(Scope)
    ]
    tokens += [
        token_row("expired", "administrator", Scope.admin) | {"expires_s": now - 60},
        token_row("revoked", "administrator", Scope.admin) | {"revoked_s": now - 60},
        token_row("owner_elsewhere", "owner", Scope.operate) | {"project": "vision"},
    ]
    insert(store, schema.users, users)
    insert(store, schema.projects, projects)
    insert(store, schema.members, members)
    insert(store, schema.tokens, tokens)
    store.begin_device_login("0" * 64, USER_CODE, "laptop", Scope.operate, None)
    experiment_id, run_id = World(store, 0, 0).submit()
    store.request_cancel(experiment_id)
    return World(store, experiment_id, run_id)


def token_row(name: str, user: str, scope: Scope) -> dict[str, Any]:
    """Returns the row of a token whose text is `token_of(name)`."""
    return {
        "user": user,
        "name": name,
        "scope": scope,
        "project": None,
        "prefix": "stillhouse_",
        "sha256": hashlib.sha256(token_of(name).encode()).hexdigest(),
        "created_s": time.time(),
        "expires_s": None,
        "revoked_s": None,
    }


def insert(store: Store, table: sa.Table, rows: list[dict[str, Any]]) -> None:
    """Adds rows that are not there yet, bypassing everything that could refuse them."""
    keys = [column.name for column in table.primary_key]
    store.database.write(
        lambda connection: connection.execute(statements.insert_or_keep(connection, table, keys), rows)
    )
