"""How a server's certificate is checked."""

import ssl

from foundation.errors import UserError


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
