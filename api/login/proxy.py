"""Identity from a trusted proxy: it has logged the user in, and names them in a header."""

from __future__ import annotations

from fastapi import Request

from api.addresses import from_trusted_proxy
from api.login.people import ensure_user
from api.login.sessions import refuse_foreign_page
from api.principals import Identify, Identity, Via
from api.problems import ProblemError
from service.domain.access import is_user_name
from service.store import Store

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_MOST_KNOWN = 10_000


def identify_by_header(header: str) -> Identify:
    """Returns what recognises the user that a trusted proxy names in a header.

    A user is created when they are first named. Any other peer's header is ignored, as if it were absent.
    """
    known: set[str] = set()

    def identify(request: Request) -> Identity | None:
        if not from_trusted_proxy(request):
            return None
        names = request.headers.getlist(header)
        if not names:
            return None
        if len(names) > 1 or not is_user_name(names[0]):
            raise ProblemError(
                "invalid-parameter",
                f"header {header}: {', '.join(names)[:100]!r} is not one user's name; it takes up to 100 "
                "letters, digits and . _ @ -, starting with a letter or digit",
            )
        if request.method not in _SAFE_METHODS:
            refuse_foreign_page(request)  # The proxy's own cookie comes with another site's request too.
        if names[0] not in known:
            store: Store = request.app.state.store
            ensure_user(store, names[0])
            if len(known) < _MOST_KNOWN:
                known.add(names[0])
        return Identity(names[0], Via.proxy)

    return identify
