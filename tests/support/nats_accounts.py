"""Accounts of a NATS server in operator mode, as NATS' own tool `nsc` makes them: JWTs that are signed with nkeys."""

import base64
import json
import os
import time

import nkeys

SYSTEM = dict.fromkeys(("subs", "conn", "data", "payload", "imports", "exports"), -1)
UNLIMITED = SYSTEM | dict.fromkeys(("mem_storage", "disk_storage", "streams", "consumer"), -1)
CREDENTIALS = """\
-----BEGIN NATS USER JWT-----
{jwt}
------END NATS USER JWT------

-----BEGIN USER NKEY SEED-----
{seed}
------END USER NKEY SEED------
"""


def operator(folder):
    """Write a server's configuration, and a user's credentials; return their paths."""
    root, account, system, user = map(
        _pair, (nkeys.PREFIX_BYTE_OPERATOR, *[nkeys.PREFIX_BYTE_ACCOUNT] * 2, nkeys.PREFIX_BYTE_USER)
    )
    limited = ((account, UNLIMITED), (system, SYSTEM))
    accounts = {_id(each): _signed(root, each, "account", limits=limits) for each, limits in limited}
    preloaded = "\n".join(f"  {id}: {jwt}" for id, jwt in accounts.items())
    config, credentials = folder / "nats.conf", folder / "user.creds"
    config.write_text(
        f"operator: {_signed(root, root, 'operator')}\nsystem_account: {_id(system)}\n"
        f"resolver: MEMORY\nresolver_preload: {{\n{preloaded}\n}}\n"
    )
    limits = {"subs": -1, "data": -1, "payload": -1}
    credentials.write_text(CREDENTIALS.format(jwt=_signed(account, user, "user", **limits), seed=user.seed.decode()))
    return str(config), str(credentials)


def _pair(prefix):
    return nkeys.from_seed(nkeys.encode_seed(os.urandom(32), prefix))


def _id(pair):
    return pair.public_key.decode()


def _signed(signer, subject, kind, **facts):
    claims = {"jti": _id(subject), "iat": int(time.time()), "iss": _id(signer), "sub": _id(subject), "name": kind}
    claims["nats"] = {"version": 2, "type": kind, **facts}
    parts = [_text(json.dumps(each).encode()) for each in ({"typ": "JWT", "alg": "ed25519-nkey"}, claims)]
    return ".".join([*parts, _text(signer.sign(".".join(parts).encode()))])


def _text(data):
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
