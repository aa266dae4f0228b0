"""Logging in at an OpenID provider: the authorization code flow with PKCE, state and nonce.

The provider's description and keys are fetched when they are needed and kept for an hour, so that a provider
that is down at startup, or later, holds up no one but those who log in through it.
"""

import hmac
import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx
from authlib.common.errors import AuthlibBaseError
from authlib.common.urls import add_params_to_uri
from authlib.oauth2.client import OAuth2Client
from authlib.oidc.core import CodeIDToken
from cachetools import TTLCache
from joserfc import jwt
from joserfc.errors import InvalidKeyIdError, JoseError
from joserfc.jwk import KeySet
from joserfc.jws import JWSRegistry

from api.guard import LOOPBACK_NAMES
from api.login.people import Departure, Person, ProviderError, ProviderUnavailable
from service.config.settings import Settings

_KEPT_S = 3600.0
_TIMEOUT = httpx.Timeout(5.0, connect=3.0)
_LEEWAY_S = 60
_REFUSALS = frozenset({400, 401, 403})
_ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""Signatures that only the provider can make: neither `none` nor those with a shared secret."""

_logger = logging.getLogger(__name__)


class Provider:
    """One OpenID provider; thread-safe."""

    def __init__(
        self, settings: Settings, groups_claim: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        assert settings.oidc_issuer is not None
        self.issuer = settings.oidc_issuer.rstrip("/")
        # No proxy stands between a process and its own machine.
        self._beyond = urlsplit(self.issuer).hostname not in LOOPBACK_NAMES
        self._settings = settings
        self._groups_claim = groups_claim
        self._lock = threading.Lock()
        self._kept: TTLCache[str, dict[str, Any]] = TTLCache(2, _KEPT_S, clock)

    def depart(self, return_to: str) -> tuple[str, Departure]:
        """Returns where to send the browser, and what it must bring back."""
        state, nonce, verifier = (secrets.token_urlsafe(32) for _ in range(3))
        departure = Departure(state, nonce, verifier, return_to)
        endpoint = self._described("authorization_endpoint")
        with self._connection() as session:
            url, _ = self._client(session).create_authorization_url(
                endpoint, state=departure.state, nonce=departure.nonce, code_verifier=departure.verifier
            )
        return str(url), departure

    def arrive(self, departure: Departure, query: Mapping[str, str]) -> Person:
        """Returns whom the provider vouches for, by the parameters that the browser came back with."""
        if not hmac.compare_digest(query.get("state", "").encode(), departure.state.encode()):
            raise ProviderError("the state belongs to another login")
        if query.get("iss", self.issuer).rstrip("/") != self.issuer:
            raise ProviderError(f"the answer comes from another issuer: {query['iss'][:200]!r}")
        if "code" not in query:
            raise ProviderError(f"no code: {query.get('error', 'no error either')[:200]!r}")
        with self._connection() as session, _answers(self.issuer):
            token = self._token(session, query["code"], departure.verifier)
            claims = self._claims(token, departure.nonce)
            if self._groups_claim not in claims:
                claims = {**self._user_information(session, token, claims["sub"]), **claims}
        groups = claims.get(self._groups_claim) or ()
        listed = [groups] if isinstance(groups, str) else groups
        name = claims.get("preferred_username") or claims.get("email") or claims["sub"]
        email = claims.get("email")
        return Person(
            f"{self.issuer}|{claims['sub']}",
            str(name),
            email if isinstance(email, str) else None,
            frozenset(group for group in listed if isinstance(group, str)),
        )

    def end_url(self) -> str | None:
        """Returns where a browser ends its session at the provider; None if it has no such place."""
        try:
            described = self._description().get("end_session_endpoint")
        except ProviderUnavailable as error:
            _logger.warning("%s", error)
            return None
        if not described:
            return None
        home = str(self._settings.url).rstrip("/")
        where = {"client_id": str(self._settings.oidc_client_id), "post_logout_redirect_uri": f"{home}/login"}
        return str(add_params_to_uri(described, list(where.items())))

    def _client(self, session: httpx.Client) -> OAuth2Client:
        return OAuth2Client(
            session,
            client_id=self._settings.oidc_client_id,
            scope=self._settings.oidc_scopes,
            redirect_uri=str(self._settings.url).rstrip("/") + "/login/oidc/callback",
            code_challenge_method="S256",
        )

    def _connection(self) -> httpx.Client:
        return httpx.Client(timeout=_TIMEOUT, trust_env=self._beyond)

    def _token(self, session: httpx.Client, code: str, verifier: str) -> Mapping[str, Any]:
        named = {"client_id": self._settings.oidc_client_id}
        auth = httpx.Auth()  # A public client only names itself.
        if (secret := self._settings.oidc_client_secret) is not None:
            named, auth = {}, httpx.BasicAuth(str(self._settings.oidc_client_id), secret.get_secret_value())
        token: Mapping[str, Any] = self._client(session).fetch_token(
            self._described("token_endpoint"),
            code=code,
            code_verifier=verifier,
            grant_type="authorization_code",
            auth=auth,
            **named,
        )
        return token

    def _claims(self, token: Mapping[str, Any], nonce: str) -> dict[str, Any]:
        """Returns the claims of a token's ID token: signed by the provider, for us, now, for this login."""
        text = token.get("id_token")
        if not isinstance(text, str):
            raise ProviderError("the answer has no ID token")
        try:
            try:
                decoded = self._decoded(text)
            except InvalidKeyIdError:  # The provider has new keys.
                self._forget("jwks")
                decoded = self._decoded(text)
            claims = CodeIDToken(
                decoded.claims,
                decoded.header,
                {"iss": {"essential": True, "values": [self._description()["issuer"]]},
                 "aud": {"essential": True, "value": self._settings.oidc_client_id},
                 "nonce": {"essential": True, "value": nonce}},
                {"nonce": nonce, "client_id": self._settings.oidc_client_id,
                 "access_token": token.get("access_token")},
            )  # fmt: skip
            claims.validate(leeway=_LEEWAY_S)
        except (JoseError, AuthlibBaseError, ValueError) as error:
            raise ProviderError(f"the ID token is not valid: {error}") from None
        return dict(claims)

    def _decoded(self, text: str) -> jwt.Token:
        found: Any = self._fetched("jwks", self._described("jwks_uri"))
        keys = KeySet.import_key_set(found)
        registry = JWSRegistry(algorithms=list(_ALGORITHMS), strict_check_header=False)
        return jwt.decode(text, key=keys, registry=registry)

    def _user_information(self, session: httpx.Client, token: Mapping[str, Any], sub: str) -> dict[str, Any]:
        """Returns the provider's further claims about a person; none if it has no such endpoint."""
        endpoint = self._description().get("userinfo_endpoint")
        if not endpoint:
            return {}
        answer = session.get(endpoint, headers={"Authorization": f"Bearer {token.get('access_token')}"})
        answer.raise_for_status()
        claims = answer.json()
        if not isinstance(claims, dict) or claims.get("sub") != sub:
            raise ProviderError("the user information is about somebody else")
        return claims

    def _described(self, name: str) -> str:
        value = self._description().get(name)
        if not isinstance(value, str):
            raise ProviderUnavailable(f"{self.issuer} does not describe its {name}")
        return value

    def _description(self) -> dict[str, Any]:
        found = self._fetched("description", f"{self.issuer}/.well-known/openid-configuration")
        if str(found.get("issuer", "")).rstrip("/") != self.issuer:
            self._forget("description")
            raise ProviderUnavailable(f"{self.issuer} describes another issuer: {found.get('issuer')!r:.200}")
        return found

    def _fetched(self, name: str, url: str) -> dict[str, Any]:
        with self._lock:
            if (kept := self._kept.get(name)) is not None:
                return kept
        with _answers(self.issuer):
            answer = httpx.get(url, timeout=_TIMEOUT, trust_env=self._beyond)
            answer.raise_for_status()
            found = answer.json()
        if not isinstance(found, dict):
            raise ProviderUnavailable(f"{url} is not a JSON object")
        with self._lock:
            self._kept[name] = found
        return found

    def _forget(self, name: str) -> None:
        with self._lock:
            self._kept.pop(name, None)


@contextmanager
def _answers(issuer: str) -> Iterator[None]:
    try:
        yield
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        if isinstance(error, httpx.HTTPStatusError) and error.response.status_code in _REFUSALS:
            raise ProviderError(f"{issuer} refused: {error.response.text[:200]!r}") from None
        raise ProviderUnavailable(f"{issuer} does not answer: {error}") from None
    except AuthlibBaseError as error:
        raise ProviderError(f"{issuer} refused: {error}") from None
    except json.JSONDecodeError:
        raise ProviderUnavailable(f"{issuer} does not answer in JSON") from None
