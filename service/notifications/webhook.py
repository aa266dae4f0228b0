"""Signed webhooks, following the Standard Webhooks specification (https://www.standardwebhooks.com).

A URL that people enter must not let them reach what only this machine can: its own ports, a cloud's metadata
service, the network behind it. So a host is delivered to only if the operator lists it, its resolved
addresses are checked, and the connection goes to the very address that was checked: a name that resolves to
another address a moment later gains nothing. Redirects are not followed, and proxies from the environment are
not used.
"""

import asyncio
import base64
import hashlib
import hmac
import ipaddress
import json
import logging
import re
import secrets
import socket
import ssl
import time
from functools import cache
from urllib.parse import SplitResult, unquote, urlsplit

from service.config.hosts import Address, AllowedHosts, literal_address
from service.config.settings import Settings
from service.db.errors import BadValue
from service.notifications.channels import Undeliverable, Words
from service.store.notifications import Outgoing

TIMEOUT_S = 10.0  # Longest attempt, from resolving the name to the last byte of the answer that is read
LONGEST_URL = 2000
_READ_BYTES = 300  # Bytes of the answer's text that are kept for the log
_SECRET_PREFIX = "whsec_"
_SHORTEST_SECRET = 8  # Characters; shorter parts of a URL are words
_NOT_A_URL = "the target is not a URL; use https://host/path"  # The target's path may be secret
_GONE = 410
_PORTS = {"http": 80, "https": 443}


class Webhook:
    """A POST request to a URL, with a signature over id, time and body."""

    name = "webhook"
    personal = False
    signs = True  # Whether its receivers check signatures
    described = "an https:// or http:// URL of a host in STILLHOUSE_WEBHOOK_HOSTS"

    def problem(self, settings: Settings) -> str | None:
        if settings.webhook_hosts.strip():
            return None
        return "this server calls no webhooks; an operator names their hosts in STILLHOUSE_WEBHOOK_HOSTS"

    def check(self, target: str, settings: Settings) -> str:
        host = _host(_split(target))
        allowed = AllowedHosts.read(settings.webhook_hosts)
        if not allowed.takes_name(host):
            how = "an operator allows hosts with STILLHOUSE_WEBHOOK_HOSTS"
            raise BadValue("target", f"webhooks may not go to {host!r}; {how}")
        literal = literal_address(host)
        if literal is not None and not allowed.takes_address(host, literal):
            raise BadValue("target", _refused(host))
        return target

    def new_secret(self) -> str | None:
        bits = base64.b64encode(secrets.token_bytes(32)).decode()
        return f"{_SECRET_PREFIX}{bits}" if self.signs else None

    def content(self, outgoing: Outgoing, settings: Settings) -> str:
        """Returns the body of the request, JSON."""
        return outgoing.body

    async def send(self, outgoing: Outgoing, settings: Settings) -> str:
        import httpx  # Not by the API, which only checks targets, and stays small.

        logging.getLogger("httpcore").setLevel(logging.INFO)  # At DEBUG it logs what receivers quote.
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await self._send(outgoing, settings)
        except TimeoutError:
            raise Undeliverable(f"no answer within {TIMEOUT_S:g} s") from None
        except httpx.HTTPError as error:
            line = (str(error).splitlines() or [""])[0]
            raise Undeliverable(_without_secrets(f"{type(error).__name__}: {line}", outgoing)) from None

    async def _send(self, outgoing: Outgoing, settings: Settings) -> str:
        import httpx

        try:
            self.check(outgoing.target, settings)
        except BadValue as error:  # The operator's list has changed since.
            raise Undeliverable(error.message, again=False) from None
        url = _split(outgoing.target)
        host = _host(url)
        address = await _resolved(host, url.port or _PORTS[url.scheme], settings)
        body = self.content(outgoing, settings).encode()
        key = outgoing.secret
        signature = {} if key is None else signed(key, outgoing.message_id, int(time.time()), body)
        headers = {
            "Host": url.netloc.rpartition("@")[2],
            "Content-Type": "application/json",
            "User-Agent": "stillhouse-webhook",
            **signature,
        }
        at = httpx.URL(outgoing.target).copy_with(host=str(address), userinfo=b"")
        # The certificate is checked against the name, while the connection goes to the checked address.
        extensions = {"sni_hostname": host, "timeout": httpx.Timeout(TIMEOUT_S).as_dict()}
        # Without a client, which would log the URL: its path may be a secret.
        async with httpx.AsyncHTTPTransport(verify=_authorities(), trust_env=False) as transport:
            answer = await transport.handle_async_request(
                httpx.Request("POST", at, content=body, headers=headers, extensions=extensions)
            )
            reply = b""
            async for chunk in answer.aiter_raw():
                reply += chunk
                if len(reply) >= _READ_BYTES:
                    break
            await answer.aclose()
        text = _without_secrets(reply.decode(errors="replace"), outgoing)
        line = f"{answer.status_code} {text[:_READ_BYTES]}".strip()
        if answer.is_success:
            return line
        if answer.is_redirect:
            raise Undeliverable(f"{answer.status_code}: redirects are not followed; use the final URL")
        raise Undeliverable(line, gone=answer.status_code == _GONE)


class Slack(Webhook):
    """An incoming webhook of Slack: its URL is its secret, and nothing is signed."""

    name = "slack"
    described = "the URL of an incoming webhook of Slack; an operator allows its host, hooks.slack.com"
    signs = False

    def content(self, outgoing: Outgoing, settings: Settings) -> str:
        words = Words.of(outgoing, settings)
        link = [] if words.link is None else [f"<{words.link}|{_escaped(words.link)}>"]
        return json.dumps(
            {"text": "\n".join((f"*{_escaped(words.title)}*", _escaped(words.happened), *link))}
        )


class Teams(Webhook):
    """A workflow of Microsoft Teams that posts the adaptive card that it is sent."""

    name = "teams"
    described = "the URL of a workflow of Teams that posts to a channel; an operator allows its host"
    signs = False

    def content(self, outgoing: Outgoing, settings: Settings) -> str:
        words = Words.of(outgoing, settings)
        lines = {"type": "TextBlock", "wrap": True}
        card = {
            "type": "AdaptiveCard",
            "version": "1.4",
            "body": [{**lines, "text": words.title, "weight": "bolder"}, {**lines, "text": words.happened}],
            "actions": [{"type": "Action.OpenUrl", "title": "Open", "url": words.link}] if words.link else [],
        }
        attached = {"contentType": "application/vnd.microsoft.card.adaptive", "content": card}
        return json.dumps({"type": "message", "attachments": [attached]})


def _escaped(text: str) -> str:
    """Returns text in which Slack finds no markup for links and mentions."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


@cache
def _authorities() -> ssl.SSLContext:
    """Returns what certificates are checked against, read once: that takes longer than a delivery."""
    import httpx

    return httpx.create_ssl_context(trust_env=False)


def signed(secret: str, message_id: str, at_s: int, body: bytes) -> dict[str, str]:
    """Returns the headers that let a receiver check who sent a message, and when.

    The signature is the base64 of HMAC-SHA256 over `<id>.<timestamp>.<body>`; its key is the base64-decoded
    part of the secret after `whsec_`.
    """
    key = base64.b64decode(secret.removeprefix(_SECRET_PREFIX))
    content = f"{message_id}.{at_s}.".encode() + body
    signature = base64.b64encode(hmac.digest(key, content, hashlib.sha256)).decode()
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(at_s),
        "webhook-signature": f"v1,{signature}",
    }


def _without_secrets(text: str, outgoing: Outgoing) -> str:
    """Removes what only receiver and subscriber may know: parts of the URL, and the key."""
    url = urlsplit(outgoing.target)
    parts = re.split(r"[/?&=#;]", f"{url.path}?{url.query}#{url.fragment}")
    known = {outgoing.secret or "", *parts, *map(unquote, parts)}
    for secret in sorted(known, key=len, reverse=True):
        if len(secret) >= _SHORTEST_SECRET:
            text = text.replace(secret, "***")
    return text


def _split(target: str) -> SplitResult:
    if len(target) > LONGEST_URL or not target.isascii() or not target.isprintable() or " " in target:
        limits = f"up to {LONGEST_URL} printable ASCII characters and no spaces"
        raise BadValue("target", f"a webhook's URL has {limits}")
    try:
        url = urlsplit(target)
        port = url.port
    except ValueError:
        raise BadValue("target", _NOT_A_URL) from None
    if url.scheme not in _PORTS or not url.hostname or port == 0:
        raise BadValue("target", _NOT_A_URL)
    if url.username is not None:
        why = "a webhook's URL takes no user and password; messages are signed instead"
        raise BadValue("target", why)
    return url


def _host(url: SplitResult) -> str:
    return (url.hostname or "").rstrip(".").lower()


async def _resolved(host: str, port: int, settings: Settings) -> Address:
    """Returns the checked address to connect to."""
    allowed = AllowedHosts.read(settings.webhook_hosts)
    try:
        entries = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise Undeliverable(f"{host} cannot be resolved: {error.strerror or error}") from None
    addresses = [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in entries]
    for address in addresses:
        # One that is refused refuses the name: a mixed answer is how a check is slipped past.
        if not allowed.takes_address(host, address):
            raise Undeliverable(_refused(host), again=False)
    return addresses[0]


def _refused(host: str) -> str:
    # Without the address: users read this, and names inside the network are not theirs to look up.
    return (
        f"{host} has an address that is not public; an operator allows it by the exact name or "
        "network in STILLHOUSE_WEBHOOK_HOSTS"
    )
