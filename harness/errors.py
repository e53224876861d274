"""The errors this package raises on purpose.

Every message says what was wrong, where, what was expected and what to do. The command line prints the
message alone and exits with `exit_code`; anything else that escapes is a bug and exits with 4, so that a
crash never reads as a verdict. All are picklable: they travel from worker processes.
"""

from __future__ import annotations


class LogitgateError(Exception):
    """The judgement could not be made: unreadable, mismatched or incomplete input."""

    exit_code = 4

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return self.message


class UsageError(LogitgateError):
    """The request itself is wrong: an unknown option, a value out of range, a model that cannot serve it."""

    exit_code = 2


class StorageError(LogitgateError):
    """A file is missing, truncated, altered, incomplete or not ours."""


class MismatchError(LogitgateError):
    """Two artefacts cannot be held against each other: other corpus, tokenizer, vocabulary or rows."""


class EngineError(LogitgateError):
    """The engine refused, died, or did not do what was asked of it."""


class PatchError(LogitgateError):
    """A patch could not be loaded or applied, did not fire, or changed nothing."""
