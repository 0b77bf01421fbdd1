"""Errors that a user can cause, and can act on.

Every message says what was wrong, what was got, what is allowed and what to do. The command line prints the message
alone and exits with `exit_code`; anything that is not a QEngineError is a defect of ours and keeps its traceback.
"""


class QEngineError(Exception):
    """Base of all errors that qengine raises on purpose."""

    exit_code = 1


class ConfigError(QEngineError, ValueError):
    """A setting, flag or combination of them that cannot be honoured."""

    exit_code = 2


class CheckpointError(QEngineError):
    """A model folder or file that is missing, damaged or contradicts itself."""


class UnsupportedError(QEngineError):
    """A valid checkpoint, layer or option that this engine cannot serve; the message says why and what to do."""


class RequestError(QEngineError, ValueError):
    """A prompt or sampling parameter that cannot be served. The engine goes on with the other requests."""


class CapacityError(QEngineError):
    """Not enough memory or cache; the message gives the numbers and what to lower."""


class ClosedError(QEngineError):
    """A closed LLM was used. With several callers its engine may also have failed between two lines of one of them."""
