"""E-mail in plain text, through one SMTP server."""

import asyncio
import re
import smtplib
import ssl
from email.message import EmailMessage
from email.utils import formatdate

from service.config.settings import MailSecurity, Settings
from service.db.errors import BadValue
from service.notifications.channels import Undeliverable, Words
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
            raise BadValue("target", f"{target[:100]!r} is not an e-mail address")
        if why := self.problem(settings):
            raise BadValue("target", why)
        return target

    def problem(self, settings: Settings) -> str | None:
        if settings.smtp_host is not None:
            return None
        return "this server sends no e-mail; an operator sets STILLHOUSE_SMTP_HOST"

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
    words = Words.of(outgoing, settings)
    mail = EmailMessage()
    mail["From"] = settings.smtp_from
    mail["To"] = outgoing.target
    mail["Date"] = formatdate()
    # The same in every attempt, so that mail programs show a message once that came twice.
    mail["Message-ID"] = f"<{outgoing.message_id}@{settings.smtp_from.rpartition('@')[2]}>"
    mail["Auto-Submitted"] = "auto-generated"
    mail["Subject"] = " ".join(f"[stillhouse] {words.title}".split())[:200]
    lines = [words.happened, ""]
    if one := words.experiment:
        lines.append(f"experiment  {one['id']} ({one['name']}) of {one['owner']}")
        lines.append(f"see         {words.link}")
    if words.project:
        lines.append(f"project     {words.project}")
    lines.append(f"at          {words.at}")
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
