"""Real receivers on this machine: an HTTP server, and an SMTP server with STARTTLS."""

from __future__ import annotations

import datetime
import ipaddress
import socketserver
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass
class HttpReceiver:
    """What was posted, and what is answered next."""

    url: str = ""
    requests: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    answers: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    """Answers to the next requests, in order; then 204."""
    echoes: bool = False
    """Whether an answer has the request's path as its text."""


@contextmanager
def http_receiver(host: str = "127.0.0.1") -> Iterator[HttpReceiver]:
    """An HTTP server that takes posts."""
    receiver = HttpReceiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            receiver.requests.append((self.path, {k.lower(): v for k, v in self.headers.items()}, body))
            status, headers = receiver.answers.pop(0) if receiver.answers else (204, {})
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            text = self.path.encode() if receiver.echoes and status != 204 else b""
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer((host, 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    receiver.url = f"http://{host}:{server.server_port}/hook"
    try:
        yield receiver
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@dataclass
class SmtpReceiver:
    """What was mailed, and what is answered."""

    port: int = 0
    mails: list[tuple[str, bytes]] = field(default_factory=list)
    """(recipient, text) of each mail."""
    encrypted: list[bool] = field(default_factory=list)
    logins: list[str] = field(default_factory=list)
    to_recipient: bytes = b"250 ok"


@contextmanager
def smtp_receiver(folder: Path, *, starttls: bool = True) -> Iterator[SmtpReceiver]:
    """An SMTP server; its certificate is in `<folder>/certificate.pem`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*_certificate(folder))
    receiver = SmtpReceiver()

    class Handler(socketserver.StreamRequestHandler):
        encrypted = False

        def say(self, line: bytes) -> None:
            self.wfile.write(line + b"\r\n")

        def handle(self) -> None:
            self.say(b"220 receiver")
            recipient = ""
            while line := self.rfile.readline().strip():
                word = line.split()[0].upper()
                if word == b"EHLO":
                    offers = b"250 STARTTLS" if starttls and not self.encrypted else b"250 AUTH PLAIN"
                    self.say(b"250-receiver")
                    self.say(offers)
                elif word == b"STARTTLS":
                    self.say(b"220 go on")
                    try:
                        self.request = context.wrap_socket(self.request, server_side=True)
                    except ssl.SSLError:  # The client does not trust the certificate.
                        return
                    self.setup()
                    self.encrypted = True
                elif word == b"AUTH":
                    receiver.logins.append(line.decode())
                    self.say(b"235 ok")
                elif word == b"RCPT":
                    recipient = line.decode().partition("<")[2].partition(">")[0]
                    self.say(receiver.to_recipient)
                elif word == b"DATA":
                    self.say(b"354 go on")
                    text = b""
                    while not text.endswith(b"\r\n.\r\n"):
                        text += self.rfile.readline()
                    receiver.mails.append((recipient, text))
                    receiver.encrypted.append(self.encrypted)
                    self.say(b"250 taken")
                elif word == b"QUIT":
                    self.say(b"221 bye")
                    return
                else:
                    self.say(b"250 ok")

        def finish(self) -> None:
            super().finish()
            if self.encrypted:
                self.request.close()

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = False
        allow_reuse_address = True

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    receiver.port = server.server_address[1]
    try:
        yield receiver
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _certificate(folder: Path) -> tuple[Path, Path]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    names = x509.SubjectAlternativeName(
        [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    )
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    paths = folder / "certificate.pem", folder / "key.pem"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return paths
