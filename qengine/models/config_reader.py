"""Reads a model's config.json with types: a value that is missing or wrong is an error that names its key."""

from __future__ import annotations

from typing import Any

from qengine.errors import CheckpointError

_REQUIRED: Any = object()


class ConfigReader:
    """Typed access to a config. where: the file, for messages. defaults: a family's values for keys that may be absent.

    Only what transformers itself leaves out of the family's configs has a default; all else must be there.
    """

    def __init__(self, values: dict[str, Any], where: str, defaults: dict[str, Any] | None = None) -> None:
        self.values = values
        self.where = where
        self._defaults = defaults or {}

    def with_defaults(self, **defaults: Any) -> ConfigReader:
        """The same config with values for keys that may be absent."""
        return ConfigReader(self.values, self.where, {**self._defaults, **defaults})

    def has(self, key: str) -> bool:
        """Whether the file itself has `key` with a value other than null."""
        return self.values.get(key) is not None

    def integer(self, key: str, default: Any = _REQUIRED, *, least: int = 1) -> int:
        """An integer of at least `least`."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(key, value, "an integer")
        if value < least:
            raise self.wrong(key, value, f"an integer of at least {least}")
        return value

    def optional_integer(self, key: str, default: int | None = None) -> int | None:
        """An integer of at least 1, or None where the key is null, or absent without a default."""
        if key in self.values and self.values[key] is None:
            return None
        if key not in self.values and key not in self._defaults:
            return default
        return self.integer(key)

    def number(self, key: str, default: Any = _REQUIRED) -> float:
        """A positive number."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.wrong(key, value, "a number above 0")
        return float(value)

    def optional_number(self, key: str, default: float | None = None) -> float | None:
        """A positive number, or None where the key is null, or absent without a default."""
        if key in self.values and self.values[key] is None:
            return None
        if key not in self.values and key not in self._defaults:
            return default
        return self.number(key)

    def flag(self, key: str, default: Any = _REQUIRED) -> bool:
        """True or False."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, value, "true or false")
        return value

    def string(self, key: str, default: Any = _REQUIRED) -> str:
        """Text."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, value, "a string")
        return value

    def list_of(self, key: str, kind: type, length: int) -> list[Any] | None:
        """A list of `length` values of type `kind`, or None where there is none."""
        value = self._get(key, None)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
            raise self.wrong(key, value, f"a list of {kind.__name__}")
        if len(value) != length:
            raise self.wrong(key, f"{len(value)} entries", f"one entry for each of the {length} layers")
        return value

    def mapping(self, key: str) -> dict[str, Any] | None:
        """A JSON object, or None where there is none."""
        value = self._get(key, None)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(key, value, "an object")
        return value

    def wrong(self, key: str, got: Any, allowed: str) -> CheckpointError:
        """The error for a value that is not what it should be."""
        if got is None:
            return CheckpointError(f"{self.where}: {key} is missing, expected {allowed}; download the config again")
        return CheckpointError(f"{self.where}: {key} is {got!r}, expected {allowed}")

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is None:
            value = self._defaults.get(key)
        if value is None and default is not _REQUIRED:
            value = default
        return value
