"""Who somebody is, when they do not send a token: browser sessions, device logins, a provider, a proxy.

`sessions` recognises a browser by its cookie and protects what it changes; `routes` opens a session from a
pasted token and ends it; `oidc` and `people` open one for whom an OpenID provider vouches; `people` also
believes a trusted proxy's header; `device` lets a command line in. What a user
may then do is not decided here.
"""

import re
from urllib.parse import urlsplit

from fastapi import FastAPI

from api.guard import LOOPBACK_NAMES
from api.login.people import identify_by_header
from api.login.sessions import identify_session
from api.principals import Identify
from api.throttle import Throttle
from service.config.groups import group_table
from service.config.settings import Settings

_HEADER = re.compile(r"[A-Za-z0-9-]{1,100}")
_TAKEN_HEADERS = frozenset({"authorization", "cookie", "host", "origin"})


def install(app: FastAPI, settings: Settings) -> None:
    """Sets `identities`, `throttle`, `trusted_proxies`, `groups` and `provider` of the application's state.

    ValueError says in one line which settings contradict each other, or what is wrong in the group table.
    """
    refuse_invalid(settings)
    identities: list[Identify] = [identify_session]
    if settings.proxy_user_header is not None:
        identities.insert(0, identify_by_header(settings.proxy_user_header))
    app.state.identities = identities
    app.state.throttle = Throttle()
    app.state.trusted_proxies = settings.trusted_proxies()
    app.state.groups = group_table(settings.data_dir)
    app.state.provider = None
    if settings.oidc_issuer is not None:
        from api.login.oidc import Provider  # Most installations need none of its libraries.

        app.state.provider = Provider(settings, app.state.groups.claim)


def refuse_invalid(settings: Settings) -> None:
    """Raises ValueError, in one line with the variable, its value and what to set."""
    trusted = settings.trusted_proxies()
    if any(network.prefixlen == 0 for network in trusted):
        raise ValueError(
            f"STILLHOUSE_PROXY_TRUSTED={settings.proxy_trusted}: every address would be trusted; name the "
            "proxy's own"
        )
    header = settings.proxy_user_header
    if header is not None:
        if not _HEADER.fullmatch(header) or header.lower() in _TAKEN_HEADERS:
            raise ValueError(
                f"STILLHOUSE_PROXY_USER_HEADER={header}: not a header for a user's name; take "
                "X-Forwarded-User, for instance"
            )
        if not trusted:
            raise ValueError(
                f"STILLHOUSE_PROXY_USER_HEADER={header} is trusted from no address: set "
                "STILLHOUSE_PROXY_TRUSTED to the proxy's address"
            )
    if settings.oidc_issuer is not None:
        _refuse_invalid_provider(settings, settings.oidc_issuer)
    group_table(settings.data_dir)


def _refuse_invalid_provider(settings: Settings, issuer: str) -> None:
    if not _is_safe(issuer):
        raise ValueError(
            f"STILLHOUSE_OIDC_ISSUER={issuer}: not an https address; over http anyone on the way could log in"
        )
    if settings.oidc_client_id is None:
        raise ValueError(
            "STILLHOUSE_OIDC_ISSUER needs STILLHOUSE_OIDC_CLIENT_ID: register this installation there"
        )
    if "openid" not in settings.oidc_scopes.split():
        raise ValueError(f"STILLHOUSE_OIDC_SCOPES={settings.oidc_scopes}: add openid, which OpenID requires")
    if not _is_safe(str(settings.url)):
        raise ValueError(
            f"STILLHOUSE_URL={settings.url}: logging in through a provider needs https; put TLS in front of "
            "the server and set STILLHOUSE_URL to its https address"
        )


def _is_safe(address: str) -> bool:
    parts = urlsplit(address)
    return bool(parts.hostname) and (
        parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in LOOPBACK_NAMES)
    )
