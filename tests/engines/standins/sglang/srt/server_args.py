"""SGLang's settings as a value, which `Engine(server_args=...)` takes."""

from sglang import SERVER_ARGS


class ServerArgs:
    """Only what was given."""

    def __init__(self, **given):
        if unknown := given.keys() - SERVER_ARGS:
            raise TypeError(f"ServerArgs.__init__() got an unexpected keyword argument {sorted(unknown)[0]!r}")
        vars(self).update(given)
