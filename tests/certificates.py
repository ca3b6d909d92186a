"""Certificates of servers on this machine, made by openssl; each is its own authority."""

import pathlib
import ssl
import subprocess
from dataclasses import dataclass


@dataclass(frozen=True)
class MadeCertificate:
    """A certificate and its key, in two PEM files."""

    certfile: pathlib.Path
    keyfile: pathlib.Path

    @property
    def der(self) -> bytes:
        return ssl.PEM_cert_to_DER_cert(self.certfile.read_text())

    def client_context(self) -> ssl.SSLContext:
        """Return a context that trusts this certificate only."""
        return ssl.create_default_context(cafile=self.certfile)


def make_certificate(folder: pathlib.Path) -> MadeCertificate:
    """Write `tls.crt` and `tls.key` into `folder`, for localhost and 127.0.0.1."""
    folder.mkdir(parents=True, exist_ok=True)
    made = MadeCertificate(folder / "tls.crt", folder / "tls.key")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=noria"
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    usage = ["-addext", "keyUsage=critical,digitalSignature,keyCertSign"]  # else Python 3.13 rejects an authority
    files = ["-out", str(made.certfile), "-keyout", str(made.keyfile)]
    subprocess.run([*command.split(), *names, *usage, *files], check=True, capture_output=True)
    return made
