"""Where an OpenAI server is, and the key for it."""

from urllib.parse import urlsplit

from foundation.text import one_line

KEY = "OPENAI_API_KEY"
"""Environment variable with the server's key, if it needs one."""


def root(url: str) -> str:
    """Return a server's URL without the trailing /v1 that it may have.

    Raises:
        ValueError: it is not a server's URL.
    """
    expected = f"{one_line(url)!r}: expected http://HOST:PORT, with or without /v1"
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError as error:
        raise ValueError(f"{expected} ({error})") from error
    if not is_url or parts.query or parts.fragment or not url.isprintable() or " " in url:
        raise ValueError(expected)
    if "@" in parts.netloc:
        raise ValueError(f"the URL of {parts.hostname} contains a user; the key is read from the environment ({KEY})")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")
