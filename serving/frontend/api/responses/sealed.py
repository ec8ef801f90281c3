"""Reasoning for clients that keep it opaque: `include: ["reasoning.encrypted_content"]`.

Clients send `encrypted_content` back as they got it, so that a model sees what it thought before. Nothing has to be
kept secret from them here, as the same item has the text: it is encoded, not encrypted.
"""

import base64
import binascii

from serving.frontend.api.errors import ApiError

MARK = "dynabench:"


def sealed(text: str) -> str:
    """Return a text as `encrypted_content`."""
    return MARK + base64.b64encode(text.encode()).decode()


def unsealed(value: str, where: str) -> str:
    """Return the text of an `encrypted_content`.

    Raises:
        ApiError: it is not from here.
    """
    try:
        if not value.startswith(MARK):
            raise ValueError
        return base64.b64decode(value.removeprefix(MARK), validate=True).decode()
    except (ValueError, binascii.Error) as error:
        raise ApiError(400, f"{where} is not from this server, so it cannot be read", param=where) from error
