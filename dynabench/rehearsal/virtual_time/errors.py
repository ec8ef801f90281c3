"""Why a program cannot go on in virtual time."""


class VirtualLoopError(RuntimeError):
    """The program cannot go on in virtual time, or does not end; the message names what waits or spins."""


class OutsideError(VirtualLoopError):
    """The program wants something from outside of the simulation."""


class DeadlockError(VirtualLoopError):
    """Everything waits, and nothing is scheduled."""


class TooLongError(VirtualLoopError):
    """The bound on virtual time was reached."""


class LivelockError(VirtualLoopError):
    """Callbacks run without end at one instant."""


class StuckError(KeyboardInterrupt):
    """Code of one callback runs without end; a KeyboardInterrupt, because only these leave an event loop."""
