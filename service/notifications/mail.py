"""E-mail in plain text, through one SMTP server."""

from __future__ import annotations

import asyncio
import json
import re
import smtplib
import ssl
from email.message import EmailMessage
from email.utils import formatdate
from typing import Any

from service.config.settings import MailSecurity, Settings
from service.notifications.channels import BadSubscription, Undeliverable
from service.store.notifications import Outgoing

TIMEOUT_S = 10.0  # Longest wait for each of the server's answers
_ADDRESS = re.compile(r"[A-Za-z0-9.!#$%&'*+/=?^_`{|}~-]{1,64}@[A-Za-z0-9-]{1,63}(\.[A-Za-z0-9-]{1,63})*")
_LONGEST_ADDRESS = 254
_PERMANENT = 500  # SMTP's replies from here on say that the same message would be refused again


class Mail:
    name = "mail"
    described = "an e-mail address"
    personal = True

    def check(self, target: str, settings: Settings) -> str:
        if len(target) > _LONGEST_ADDRESS or not _ADDRESS.fullmatch(target):
            raise BadSubscription("target", f"{target[:100]!r} is not an e-mail address")
        if settings.smtp_host is None:
            why = "this server sends no e-mail; an operator sets STILLHOUSE_SMTP_HOST"
            raise BadSubscription("target", why)
        return target

    def new_secret(self) -> None:
        """Mail is not signed by us."""

    async def send(self, outgoing: Outgoing, settings: Settings) -> str:
        if settings.smtp_host is None:
            raise Undeliverable("STILLHOUSE_SMTP_HOST is not set")
        try:
            await asyncio.to_thread(_send, composed(outgoing, settings), settings)
        except smtplib.SMTPRecipientsRefused as error:
            code, text = next(iter(error.recipients.values()))
            raise Undeliverable(_reply(code, text), again=code < _PERMANENT) from None
        except smtplib.SMTPResponseException as error:
            raise Undeliverable(_reply(error.smtp_code, error.smtp_error)) from None
        except (OSError, smtplib.SMTPException) as error:
            raise Undeliverable(f"{settings.smtp_host}: {type(error).__name__}: {error}") from None
        return f"accepted by {settings.smtp_host}"


def composed(outgoing: Outgoing, settings: Settings) -> EmailMessage:
    content = json.loads(outgoing.body)
    data: dict[str, Any] = content["data"]
    experiment = data.get("experiment")
    mail = EmailMessage()
    mail["From"] = settings.smtp_from
    mail["To"] = outgoing.target
    mail["Date"] = formatdate()
    # The same in every attempt, so that mail programs show a message once that came twice.
    mail["Message-ID"] = f"<{outgoing.message_id}@{settings.smtp_from.rpartition('@')[2]}>"
    mail["Auto-Submitted"] = "auto-generated"
    subject = f"{experiment['name']}: {content['type']}" if experiment else content["type"]
    mail["Subject"] = " ".join(f"[stillhouse] {subject}".split())[:200]
    lines = [str(data["message"]), ""]
    if experiment:
        address = f"{str(settings.url).rstrip('/')}/experiments/{experiment['id']}"
        lines.append(f"experiment  {experiment['id']} ({experiment['name']}) of {experiment['owner']}")
        lines.append(f"see         {address}")
    if data.get("project"):
        lines.append(f"project     {data['project']}")
    lines.append(f"at          {content['timestamp']}")
    stop = f"stillhouse notify remove {outgoing.subscription_id}"
    lines += ["", f"You subscribed to this; stop it with: {stop}"]
    mail.set_content("\n".join(lines))
    return mail


def _send(mail: EmailMessage, settings: Settings) -> None:
    assert settings.smtp_host is not None
    address = (settings.smtp_host, settings.smtp_port)
    if settings.smtp_security is MailSecurity.tls:
        context = ssl.create_default_context()
        server: smtplib.SMTP = smtplib.SMTP_SSL(*address, timeout=TIMEOUT_S, context=context)
    else:
        server = smtplib.SMTP(*address, timeout=TIMEOUT_S)
    with server:
        if settings.smtp_security is MailSecurity.starttls:
            server.starttls(context=ssl.create_default_context())
        if settings.smtp_user is not None and settings.smtp_password is not None:
            server.login(settings.smtp_user, settings.smtp_password.get_secret_value())
        server.send_message(mail)


def _reply(code: int, text: bytes | str) -> str:
    return f"{code} {text.decode(errors='replace') if isinstance(text, bytes) else text}"
