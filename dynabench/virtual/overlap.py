"""How much of a transfer remains when the prefill ends.

overlap   how the driver calls `Links`                                           TTFT includes
none      start when the prefill ends                                           all of it
chunk     start with the first chunk's blocks, extend with those of the others   the last chunk, and any queue before it
layer     start when the prefill ends, `hidden_bytes` ahead                     the last layer, and any queue before it
"""


def hidden_bytes(num_bytes: float, *, bandwidth: float, prefill_s: float, num_layers: int) -> float:
    """Return the bytes that are sent layer by layer before the prefill ends, alone on links of a bandwidth (bytes/s).

    Layer i of L can be sent when it is computed, at `i / L` of the prefill, and takes `1 / L` of the transfer. Either
    each layer is sent before the next is computed, so only the last is exposed, or layers queue from the first on. In
    time:

        exposed = max(transfer / L, transfer - prefill * (L - 1) / L)
        hidden = transfer - exposed = min(transfer, prefill) * (L - 1) / L
    """
    sendable = bandwidth * prefill_s if prefill_s else 0.0
    return min(num_bytes, sendable) * (num_layers - 1) / num_layers
