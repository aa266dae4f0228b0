"""Who may do what, written down apart from the code that decides it, and the people to try it with.

Imports nothing of `api`: a client over HTTP uses it as well.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import pytest
import sqlalchemy as sa

from service.db import schema, statements
from service.domain.access import EVERYTHING, Actor, Role, Scope, UserKind
from service.domain.events import Topic
from service.domain.people import public_id
from service.domain.studies import PartState
from service.specs.experiment import validate
from service.store import NewExperiment, Store

FIRST_TOKEN = "stillhouse-" + "f" * 32
USER_CODE = "BCDF-GHJK"
STUDY_ID = 1_000_000  # Not one that the database gives to a study
METRICS_TOKEN = "stillhouse-metrics-" + "m" * 32
HERE: Final = "nlp"
ELSEWHERE: Final = "vision"
MEMBERS: Final[Mapping[str, Mapping[str, str]]] = {
    HERE: {"viewer": "viewer", "member": "member", "owner": "member", "maintainer": "maintainer",
           "disabled": "member"},
    ELSEWHERE: {"other": "member", "owner": "member"},
    "default": {},
}  # fmt: skip
"""Roles by project and user. Everyone sees `default`, and no one is a member."""
WEBHOOK = "http://hooks.example.com/"

_SCOPES = ["read", "submit", "operate", "admin"]
_ROLES = ["viewer", "member", "maintainer"]
_PLACES: Mapping[str | None, str] = {None: "", HERE: "_here", ELSEWHERE: "_elsewhere"}


@dataclass(frozen=True, slots=True)
class Sender:
    """Someone whose token is accepted.

    Attributes:
        name: column of the table: the user, then the scope and the project where the token has less than all.
        user: whom the token stands for.
        scope: most that it may be used for.
        project: only project that it is for; None = all.
    """

    name: str
    user: str
    scope: str
    project: str | None = None

    @property
    def administrator(self) -> bool:
        return self.user in ("administrator", "admin")

    def may(self, scope: str) -> bool:
        """Returns whether the token has a scope."""
        return _SCOPES.index(self.scope) >= _SCOPES.index(scope)

    def reaches(self, project: str | None) -> bool:
        """Returns whether the token is for what belongs to a project; None = to none."""
        return self.project in (None, project)

    def has(self, role: str, project: str = HERE) -> bool:
        """Returns whether they have a role in a project, and a token for it."""
        held = MEMBERS.get(project, {}).get(self.user)
        enough = held is not None and _ROLES.index(held) >= _ROLES.index(role)
        return self.reaches(project) and (self.administrator or enough)

    def sees(self, project: str | None) -> bool:
        """Returns whether they see a project."""
        if project is None or project not in MEMBERS:
            return False
        return self.has("viewer", project) or (project == "default" and self.reaches(project))

    @property
    def administers(self) -> bool:
        return self.administrator and self.may("admin") and self.project is None


def _senders() -> dict[str, Sender]:
    """Everyone with every scope, for all projects, for `HERE` and for `ELSEWHERE` only."""
    found = [Sender("first_token", "admin", "admin")]
    for user in ("other", "viewer", "member", "owner", "maintainer", "administrator"):
        scopes = _SCOPES if user == "administrator" else _SCOPES[:3]
        for scope, (project, place) in itertools.product(scopes, _PLACES.items()):
            suffix = "" if scope == scopes[-1] else f"_{scope}"
            found.append(Sender(f"{user}{suffix}{place}", user, scope, project))
    return {sender.name: sender for sender in found}


SENDERS: Final[Mapping[str, Sender]] = _senders()
"""By column. `other` is a member of another project."""
REFUSED = ("nobody", "expired", "revoked", "disabled", "unknown", "malformed", "metrics")
"""Columns of those whose credential is not accepted."""
COLUMNS = (*REFUSED, *SENDERS)


_FAST = {"nobody", *list(SENDERS)[::8]}
"""Covers every user, scope and place, though not every combination."""


def some_fast(columns: Iterable[str], slow: pytest.MarkDecorator) -> list[Any]:
    """Returns a case for each column; most are `slow`."""
    return [column if column in _FAST else pytest.param(column, marks=slow) for column in columns]


Rule = Callable[[Sender], str]
"""What an operation answers to a sender: `ok` is anything but a refusal, as `the body is missing`."""


def _if(allowed: bool, otherwise: str = "403") -> str:
    return "ok" if allowed else otherwise


def PUBLIC(sender: Sender) -> str:
    return "ok"


def ANYONE_SIGNED_IN(sender: Sender) -> str:
    return "ok"


def NO_PROVIDER(sender: Sender) -> str:
    """A provider is not set here."""
    return "404"


def LOOK(sender: Sender) -> str:
    return _if(sender.sees(HERE), "404")


def MANAGE(sender: Sender) -> str:
    """An experiment of `owner`."""
    if not sender.sees(HERE):
        return "404"
    if sender.user == "owner":
        return _if(sender.may("submit"))
    return _if(sender.may("operate") and sender.has("maintainer"))


def MANAGE_PROJECT(sender: Sender) -> str:
    if not sender.sees(HERE):
        return "404"
    return _if(sender.may("operate") and sender.has("maintainer"))


def ADMINISTER(sender: Sender) -> str:
    return _if(sender.administers)


def OPERATE(sender: Sender) -> str:
    return _if(sender.administrator and sender.may("operate") and sender.project is None)


def WITH_SUBMIT(sender: Sender) -> str:
    return _if(sender.may("submit"))


def submits_to(project: str) -> Rule:
    """A spec that names a project."""

    def rule(sender: Sender) -> str:
        if not sender.may("submit") or not sender.reaches(project):
            return "403"
        return _if(sender.has("member", project)) if sender.sees(project) else "422"

    return rule


SUBMIT: Final = submits_to(HERE)


def SUBMIT_FROM_RUN(sender: Sender) -> str:
    """A run of `owner`, to whose project the new experiment belongs."""
    if not sender.sees(HERE):
        return "404"
    return _if(sender.may("submit") and sender.has("member"))


EXPECTED: Mapping[str, Rule] = {
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
            "list_held_devices", "list_shares", "list_examples", "stream_changes", "get_guide",
            "get_spec_schema", "readyz", "list_projects", "list_tokens", "list_studies",
            "list_subscriptions", "list_subscription_choices", "list_deleted_experiments", "list_views",
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
            "rank_over_tasks", "list_run_groups",
            "report_experiment", "get_run", "get_points", "get_measurements", "get_run_ledger", "get_summary",
            "get_attempts", "get_logs", "get_model", "get_model_card", "get_run_config", "list_checkpoints",
            "get_trace", "get_kernel_trace", "get_predictions", "list_predictions",
            "get_prediction_summary", "get_run_data", "get_patch", "get_model_trial", "evaluate_texts",
            "get_histograms",
            "stream_run", "get_project", "get_project_limits", "get_project_usage",
            "list_figures", "get_figure", "get_curves", "get_study",
        ),
        LOOK,
    ),
    **dict.fromkeys(
        (
            "delete_experiment", "cancel_experiment", "pause_experiment", "resume_experiment",
            "retry_experiment", "set_experiment_priority", "cancel_run", "retry_run",
            "restore_experiment", "tag_experiment", "annotate_experiment", "archive_experiment",
            "rename_experiment", "cancel_study", "change_run", "change_runs", "cancel_runs", "retry_runs",
        ),
        MANAGE,
    ),
    **dict.fromkeys(("continue_run", "retrain_run"), SUBMIT_FROM_RUN),
    **dict.fromkeys(("submit_experiment", "submit_study", "validate_spec", "preview_spec"), SUBMIT),
    **dict.fromkeys(
        (
            "create_token", "revoke_token", "add_subscription", "remove_subscription", "test_subscription",
            "pause_subscription", "inspect_data", "save_view", "delete_view",
        ),
        WITH_SUBMIT,
    ),
    **dict.fromkeys(
        (
            "change_project", "set_project_limits", "archive_project", "set_member", "remove_member",
        ),
        MANAGE_PROJECT,
    ),
    **dict.fromkeys(
        ("list_users", "add_user", "change_user", "list_audit", "export_audit", "create_project"), ADMINISTER
    ),
    **dict.fromkeys(("login_with_provider", "login_from_provider"), NO_PROVIDER),
    "metrics": OPERATE,
}  # fmt: skip
"""The rule of each operation; where it depends on the object or the body, `CASES` has more."""

REFUSALS = {401: "401", 403: "403", 404: "404"}


def outcome(status: int, problem_type: str | None) -> str:
    """Returns an answer as the table writes it."""
    if status == 422 and problem_type == "/problems/unknown-project":
        return "422"
    return REFUSALS.get(status, "ok")


SPEC = {"name": "theirs", "project": HERE, "task": {"name": "imdb", "path": "texts"}, "seeds": [0]}
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class World:
    """Two projects, one person for each user of the table, and an experiment of `owner` that has ended.

    Attributes:
        store: what holds them.
        experiment_id, run_id: of that experiment.
        fixed: by what it is, a token, subscription, view or session of `owner` that no one may touch.
    """

    store: Store
    experiment_id: int
    run_id: int
    fixed: dict[tuple[Any, ...], str] = field(default_factory=dict)

    def submit(self, project: str = HERE, owner: str = "owner") -> tuple[int, int]:
        """Returns a queued experiment, and its run."""
        document = {**SPEC, "project": project}
        spec = validate(document)
        new, _ = self.store.submissions.submit(
            NewExperiment(spec, list(spec.runs()), spec_text=json.dumps(document), owner=owner)
        )
        (run,) = self.store.runs.page(experiment_id=new.id).items
        return new.id, run.id

    def own(self, kind: str, *limits: Any, fresh: bool = True) -> str:
        """Returns the number of something of `owner`: a new one, or one that is there all the time."""
        if fresh:
            return str(getattr(self, f"_{kind}")(*limits))
        if (kind, *limits) not in self.fixed:
            self.fixed[kind, *limits] = self.own(kind, *limits)
        return self.fixed[kind, *limits]

    def _token(self, scope: str, project: str | None) -> int:
        name = f"own_{next(_numbers)}"
        insert(self.store, schema.tokens, [token_row(name, "owner", Scope(scope)) | {"project": project}])
        return next(token.id for token in self.store.people.tokens("owner") if token.name == name)

    def _subscription(self, project: str | None, by_token_for: str | None) -> int:
        token_id = int(self.own("token", "submit", by_token_for, fresh=False)) if by_token_for else None
        made = self.store.notifications.subscribe(
            "owner", "webhook", WEBHOOK, [Topic.end], project=project, actor=Actor("owner", token_id)
        )
        return made.id

    def _view(self, project: str | None, shared: bool) -> int:
        name = f"own {next(_numbers)}"
        return self.store.views.save("owner", name, "state=failed", project=project, shared=shared).id

    def _session(self, scope: str | None, project: str | None) -> str:
        secret, token = hashlib.sha256(f"session {next(_numbers)}".encode()).hexdigest(), None
        if scope is not None:
            name = f"own_{next(_numbers)}"
            insert(self.store, schema.tokens, [token_row(name, "owner", Scope(scope)) | {"project": project}])
            token = hashlib.sha256(token_of(name).encode()).hexdigest()
        self.store.sessions.begin(
            secret, "owner", csrf="x", lasting_s=9e5, idle_s=9e5, token_sha256=token, agent=None,
            replaces=None, actor=Actor("owner"),
        )  # fmt: skip
        return public_id(secret)

    def _experiment(self, project: str) -> int:
        return self.submit(project)[0]

    def untouched(self) -> bool:
        """Returns whether what no one may touch is as it was."""
        kept = {
            "token": {str(one.id) for one in self.store.people.tokens("owner") if one.revoked_s is None},
            "subscription": {
                str(one.id)
                for one in self.store.notifications.subscriptions("owner")
                if one.disabled_s is None
            },
            "view": {str(one.id) for one in self.store.views.visible("owner", EVERYTHING)},
            "session": {one.id for one in self.store.sessions.live(9e5, None, "owner")},
        }
        return all(number in kept[kind] for (kind, *_), number in self.fixed.items() if kind in kept)

    def path(self, template: str, *, manages: bool) -> str:
        """Returns a path with the numbers of an experiment and its run; one of its own to manage."""
        experiment_id, run_id = self.submit() if manages else (self.experiment_id, self.run_id)
        if "/members/" in template:
            insert(self.store, schema.members, [{"project": HERE, "user": "disabled", "role": Role.member}])
        return (
            template.replace("{experiment_id}", str(experiment_id))
            .replace("{run_id}", str(run_id))
            .replace("{study_id}", str(STUDY_ID))
            .replace("{slug}", "forbidden")
            .replace("{project}", HERE)
            .replace("{figure}", "curve")
            .replace("{user_code}", USER_CODE)
            .replace("{name:path}", "app.js")
            .replace("{name}", _NAMES.get(template.split("/")[1], "disabled"))
        )


_NAMES = {"docs": "swagger-ui.css"}


@dataclass(frozen=True, slots=True)
class Case:
    """A request whose answer depends on more than its operation.

    Attributes:
        operation: whose path it goes to.
        rule: what it answers.
        target: kind and limits of what of `owner` the path names.
        query: added to the path.
        body: returns what is sent.
        headers: sent as well.
    """

    operation: str
    rule: Rule
    target: tuple[Any, ...] = ()
    query: str = ""
    body: Callable[[], Mapping[str, Any]] = dict
    headers: Mapping[str, str] = field(default_factory=dict)


def _revokes(scope: str, project: str | None) -> Rule:
    def rule(sender: Sender) -> str:
        if not sender.may("submit"):
            return "403"
        if not sender.reaches(project) or not (sender.user == "owner" or sender.administers):
            return "404"
        return _if(sender.may(scope))

    return rule


def _ends(scope: str, project: str | None) -> Rule:
    def rule(sender: Sender) -> str:
        theirs = sender.user == "owner" or sender.administers
        return _if(theirs and sender.reaches(project) and sender.may(scope), "404")

    return rule


def _creates(scope: str, project: str | None) -> Rule:
    def rule(sender: Sender) -> str:
        if not sender.may("submit") or not sender.may(scope) or not sender.reaches(project):
            return "403"
        is_user = sender.user != "admin"  # Until someone logs in with the first token.
        return _if(is_user and (project is None or sender.sees(project)), "404")

    return rule


def _owns_within(project: str | None) -> Rule:
    def rule(sender: Sender) -> str:
        if not sender.may("submit"):
            return "403"
        return _if(sender.user == "owner" and sender.reaches(project), "404")

    return rule


def _subscribes_to(project: str | None) -> Rule:
    def rule(sender: Sender) -> str:
        if not sender.may("submit"):
            return "403"
        if project == "nowhere" and sender.administrator and sender.reaches(None):
            return "ok"  # A mistake in the body: they would see it.
        return _if(project is None or sender.sees(project), "404")

    return rule


def _saves(project: str | None, shared: bool) -> Rule:
    def rule(sender: Sender) -> str:
        if not sender.may("submit"):
            return "403"
        if project is not None and not sender.sees(project):
            return "404"
        return _if(sender.reaches(project) and (not shared or sender.has("member", str(project))))

    return rule


def _deletes(project: str | None, shared: bool) -> Rule:
    def rule(sender: Sender) -> str:
        if not sender.may("submit"):
            return "403"
        if sender.user == "owner" and sender.reaches(project):
            return "ok"
        if not shared or not sender.sees(project):
            return "404"
        return _if(sender.may("operate") and sender.has("maintainer", str(project)))

    return rule


def _deletes_at_once(sender: Sender) -> str:
    return MANAGE(sender) if MANAGE(sender) != "ok" else ADMINISTER(sender)


def _as_viewer(sender: Sender) -> str:
    return _if(sender.user == "viewer" or sender.administers)


def _sees_both(sender: Sender) -> str:
    return _if(sender.sees(HERE) and sender.sees(ELSEWHERE), "404")


def _json(**fields: Any) -> Callable[[], Mapping[str, Any]]:
    return lambda: {"json": {**fields, "name": f"case {next(_numbers)}"}}


def _paused() -> Mapping[str, Any]:
    return {"json": {"paused": True}}


def _spec(project: str) -> Callable[[], Mapping[str, Any]]:
    return lambda: {"content": json.dumps({**SPEC, "project": project})}


_ANYWHERE = (None, HERE, ELSEWHERE, "nowhere")
_LIMITS = (("operate", None), ("read", None), ("submit", HERE), ("read", ELSEWHERE))


def _cases() -> dict[str, Case]:
    found: dict[str, Case] = {}

    def add(words: str, *arguments: Any, **named: Any) -> None:
        found[words] = Case(*arguments, **named)

    for scope, project in _LIMITS:
        words = f"{scope} in {project}"
        target = (scope, project)
        add(f"revoke a token: {words}", "revoke_token", _revokes(*target), ("token", *target))
        add(f"end a session: {words}", "end_session", _ends(*target), ("session", *target))
    add("end a session of a provider", "end_session", _ends("admin", None), ("session", None, None))
    for scope, project in (*_LIMITS, ("submit", ELSEWHERE), ("submit", "nowhere"), ("read", "nowhere")):
        body = _json(scope=scope, project=project)
        add(f"create a token: {scope} in {project}", "create_token", _creates(scope, project), body=body)
    for project, by in ((None, None), (HERE, None), (ELSEWHERE, None), (None, HERE), (None, ELSEWHERE)):
        for operation in ("remove_subscription", "test_subscription", "pause_subscription"):
            words = f"{operation}: to {project}, by a token for {by}"
            body = _paused if operation == "pause_subscription" else dict
            add(words, operation, _owns_within(project or by), ("subscription", project, by), body=body)
        words = f"deliveries: to {project}, by a token for {by}"
        target = ("subscription", project, by)

        def rule(sender: Sender, project: str | None = project or by) -> str:
            return _if(sender.user == "owner" and sender.reaches(project), "404")

        add(words, "list_deliveries", rule, target, query="?subscription={subscription_id}")
    for project in _ANYWHERE:
        body = _json(scope="read", project=project)
        wanted = {"channel": "webhook", "target": WEBHOOK, "topics": ["end"], "project": project}
        add(f"subscribe to {project}", "add_subscription", _subscribes_to(project),
            body=lambda wanted=wanted: {"json": wanted})  # fmt: skip
        for shared in (False, True):
            body = _json(query="state=failed", project=project, shared=shared)
            if project is not None or not shared:
                add(f"save a view: {project}, {shared=}", "save_view", _saves(project, shared), body=body)
    for project, shared in (
        (None, False),
        (HERE, False),
        (HERE, True),
        (ELSEWHERE, False),
        (ELSEWHERE, True),
    ):
        target = ("view", project, shared)
        add(f"delete a view: {project}, {shared=}", "delete_view", _deletes(project, shared), target)
    for project in (ELSEWHERE, "default", "nowhere"):
        add(f"submit to {project}", "submit_experiment", submits_to(project), body=_spec(project))
        add(f"validate for {project}", "validate_spec", submits_to(project), body=_spec(project))
    add("delete at once", "delete_experiment", _deletes_at_once, query="?now=true")
    add("compare with another project's", "compare_experiment", _sees_both, query="?also={elsewhere}")
    add("list everyone's tokens", "list_tokens", ADMINISTER, query="?everyone=true")
    add("list the viewer's tokens", "list_tokens", _as_viewer, query="?user=viewer")
    add("list everyone's sessions", "list_sessions", ADMINISTER, query="?everyone=true")
    for operation in ("list_experiments", "list_tokens", "list_subscriptions", "add_subscription"):
        named = {"Stillhouse-Owner": "viewer"}

        def as_viewer(sender: Sender, operation: str = operation) -> str:
            return EXPECTED[operation](sender) if _as_viewer(sender) == "ok" else "403"

        add(f"{operation} as the viewer", operation, as_viewer, headers=named)
    return found


CASES: Final[Mapping[str, Case]] = _cases()


def expected(rule: Rule, column: str) -> str:
    """Returns what a rule answers to a column of the table."""
    if column in SENDERS:
        return rule(SENDERS[column])
    if rule in (PUBLIC, NO_PROVIDER):
        return rule(SENDERS["first_token"])
    return "ok" if rule is OPERATE and column == "metrics" else "401"


@dataclass(frozen=True, slots=True)
class Cell:
    """One request of the table, with what it should answer."""

    row: str
    column: str
    method: str
    path: str
    expected: str
    sent: Mapping[str, Any]


def cells(world: World, operations: Mapping[str, tuple[str, str]], column: str) -> list[Callable[[], Cell]]:
    """Returns the requests of a column; what each one needs is made when it is called.

    Args:
        world: what they are about.
        operations: method and path of each operation; a name may have `#2` and so on for further paths.
        column: who sends them.
    """

    def plain(row: str) -> Cell:
        operation, (method, template) = row.partition("#")[0], operations[row]
        rule = EXPECTED[operation]
        answer = expected(rule, column)
        path = world.path(template, manages=rule is MANAGE and answer == "ok")
        sent = {"headers": headers_of(column), **body_of(operation)}
        return Cell(row, column, method, path, answer, sent)

    def special(row: str) -> Cell:
        case = CASES[row]
        method, template = operations[case.operation]
        answer = expected(case.rule, column)
        fresh = answer == "ok" and method.upper() in ("DELETE", "PUT")
        if case.target:
            kind = case.target[0]
            number = world.own(*case.target, fresh=fresh)
            template = (template + case.query).replace(f"{{{kind}_id}}", number)
        else:
            template += case.query.replace("{elsewhere}", world.own("experiment", ELSEWHERE, fresh=False))
        manages = EXPECTED[case.operation] is MANAGE and answer == "ok"
        sent = {"headers": {**headers_of(column), **case.headers}, **case.body()}
        return Cell(row, column, method, world.path(template, manages=manages), answer, sent)

    return [*(partial(plain, row) for row in operations), *(partial(special, row) for row in CASES)]


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
    if operation == "submit_study":
        return {"content": json.dumps({"study": "theirs", "project": HERE, "parts": {"only": SPEC}})}
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
            "email": f"{name}@example.com",
        }
        for name in people
    ]
    projects = [
        {"name": name, "title": name, "visible_to_all": False, "notes": "", "created_s": now, "settings": {}}
        for name in (HERE, ELSEWHERE)
    ]
    members = [
        {"project": project, "user": name, "role": Role(role)}
        for project, roles in MEMBERS.items()
        for name, role in roles.items()
    ]
    tokens = [
        token_row(one.name, one.user, Scope(one.scope)) | {"project": one.project}
        for one in SENDERS.values()
        if one.name != "first_token"
    ]
    tokens += [
        token_row("disabled", "disabled", Scope.operate),
        token_row("expired", "administrator", Scope.admin) | {"expires_s": now - 60},
        token_row("revoked", "administrator", Scope.admin) | {"revoked_s": now - 60},
    ]
    insert(store, schema.users, users)
    insert(store, schema.projects, projects)
    insert(store, schema.members, members)
    insert(store, schema.tokens, tokens)
    study = {
        "id": STUDY_ID,
        "name": "theirs",
        "project": HERE,
        "owner": "owner",
        "text": "",
        "created_s": now,
    }
    insert(store, schema.studies, [{**study, "body_sha256": ""}])
    part = {"study_id": STUDY_ID, "position": 0, "name": "one", "state": PartState.waiting, "needs": "none"}
    insert(store, schema.study_parts, [part])
    store.sessions.begin_device_login("0" * 64, USER_CODE, "laptop", Scope.operate, None)
    experiment_id, run_id = World(store, 0, 0).submit()
    store.requests.cancel(experiment_id)
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
