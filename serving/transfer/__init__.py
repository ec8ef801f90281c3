"""Moving KV between workers: one protocol, two ways. A port for engines of one's own; the mocker sends notices and tickets."""
