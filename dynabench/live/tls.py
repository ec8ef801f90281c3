"""How a server's certificate is checked, and whether it can be reached at all."""

import socket
import ssl
from urllib.parse import urlsplit

from dynabench.arm import ClientConfig
from dynabench.live.tunnel import tunnel_through
from dynabench.proxy import Proxy
from foundation.errors import UserError
from serving.runtime.config import masked


def tls_context(url: str, *, ca_file: str | None = None, insecure: bool = False) -> ssl.SSLContext | None:
    """Return the settings of connections to a server, None if they are not encrypted.

    Certificates must be signed by an authority that the system knows (or `SSL_CERT_FILE` names), or one of the file.

    Raises:
        UserError: the file cannot be read, or holds no certificate.
    """
    if not url.startswith("https://"):
        return None
    context = ssl.create_default_context()
    if ca_file is not None:
        try:
            context.load_verify_locations(ca_file)
        except OSError as error:  # an ssl.SSLError, which it includes, has no strerror of use
            why = "it holds no certificate" if isinstance(error, ssl.SSLError) else error.strerror
            raise UserError(f"--ca-file {ca_file}: {why}") from error
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def check_reachable(url: str, client: ClientConfig) -> None:
    """Refuse an endpoint with no server or an unknown certificate, before a whole workload is sent to it."""
    tls = tls_context(url, ca_file=client.ca_file, insecure=client.insecure)
    parts = urlsplit(url)
    host, proxy = parts.hostname or "", Proxy.at(client.proxy) if client.proxy is not None else None
    try:
        port = parts.port or (443 if tls else 80)
        place = (proxy.host, proxy.port) if proxy is not None else (host, port)
        with socket.create_connection(place, timeout=10) as plain:
            if tls is not None:
                if proxy is not None:
                    tunnel_through(plain, proxy, host, port)
                tls.wrap_socket(plain, server_hostname=host).close()
    except ssl.SSLCertVerificationError as error:
        raise UserError(
            f"the certificate of {masked(url)} is not accepted ({error.verify_message}); "
            "--ca-file names the authority that signed it, --insecure accepts any"
        ) from error
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        through = f" through the proxy {masked(client.proxy)}" if client.proxy is not None else ""
        raise UserError(f"no server responds at {masked(url)}{through} ({why})") from error
