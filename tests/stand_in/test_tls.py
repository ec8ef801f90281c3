"""The files of TLS are read before the server starts."""

import re

import pytest
import trustme

from serving.stand_in.config import TlsConfig
from serving.stand_in.tls import check_files


@pytest.fixture
def files(tmp_path):
    """Paths of a certificate, of its key, and of a file that is neither."""
    authority = trustme.CA()
    mine = authority.issue_cert("localhost")
    paths = [tmp_path / name for name in ("mine.crt", "mine.key", "other.txt")]
    mine.cert_chain_pems[0].write_to_path(paths[0])
    mine.private_key_pem.write_to_path(paths[1])
    paths[2].write_text("neither")
    return list(map(str, paths))


def test_a_certificate_and_its_key_are_accepted(files):
    certificate, key, _ = files
    check_files(TlsConfig(certificate=certificate, key=key, client_authorities=certificate, ciphers="HIGH"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"certificate": "/nope"}, "--ssl-certfile /nope: expected a certificate (PEM) (No such file or directory)"),
        ({"certificate": "OTHER"}, "--ssl-certfile OTHER: expected a certificate (PEM) ("),
        ({"certificate": "CERTIFICATE"}, "--ssl-certfile CERTIFICATE: expected the key of CERTIFICATE (PEM) ("),
        ({"key": "OTHER"}, "--ssl-keyfile OTHER: expected the key of CERTIFICATE (PEM) ("),
        ({"key": "KEY", "client_authorities": "/nope"}, "--ssl-ca-certs /nope: expected certificates (PEM) ("),
        ({"key": "KEY", "ciphers": "nope"}, "--ssl-ciphers nope: expected ciphers of OpenSSL ("),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_its_flag(settings, message, files):
    paths = dict(zip(("CERTIFICATE", "KEY", "OTHER"), files, strict=True))
    given = {name: paths.get(value, value) for name, value in ({"certificate": "CERTIFICATE"} | settings).items()}
    for name, path in paths.items():
        message = message.replace(name, path)
    with pytest.raises(ValueError, match=re.escape(message)):
        check_files(TlsConfig(**given))
