"""The files of TLS, read once before a server starts: uvicorn would name none of them."""

import ssl
from collections.abc import Callable

from serving.stand_in.config import TlsConfig


def check_files(tls: TlsConfig) -> None:
    """Check that a server can prove who it is with these files.

    Raises:
        ValueError: one cannot be used; the message has its flag.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate, key = tls.certificate, tls.key or tls.certificate
    _use(f"--ssl-certfile {certificate}", "a certificate (PEM)", lambda: context.load_verify_locations(certificate))
    of_key = f"--ssl-keyfile {tls.key}" if tls.key else f"--ssl-certfile {certificate}"
    _use(of_key, f"the key of {certificate} (PEM)", lambda: context.load_cert_chain(certificate, key))
    if authorities := tls.client_authorities:
        _use(f"--ssl-ca-certs {authorities}", "certificates (PEM)", lambda: context.load_verify_locations(authorities))
    if ciphers := tls.ciphers:
        _use(f"--ssl-ciphers {ciphers}", "ciphers of OpenSSL", lambda: context.set_ciphers(ciphers))


def _use(flag: str, expected: str, load: Callable[[], None]) -> None:
    try:
        load()
    except OSError as error:  # ssl.SSLError is one, too
        raise ValueError(f"{flag}: expected {expected} ({error.strerror or error})") from error
