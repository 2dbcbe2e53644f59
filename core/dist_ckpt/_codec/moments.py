"""Dates, times and their zones.

Here: what each turns into, and back. Not here: the table that names them (``table``).
"""

from __future__ import annotations

import datetime as dt
import zoneinfo
from collections.abc import Callable
from typing import Any

from dist_ckpt.errors import ConfigError

__all__ = ["dump_moment", "dump_timezone", "dump_zone", "load_moment", "load_timezone", "load_zone"]


def dump_moment(value: dt.datetime | dt.time) -> Any:
    """Return ``[text without zone, fold, zone]``; a zone without a name is its offset."""
    zone: Any = value.tzinfo
    if type(zone) is dt.timezone:
        zone = _nameless_offset(zone) if _nameless_offset(zone) is not None else zone
    elif zone is not None and type(zone) is not zoneinfo.ZoneInfo:
        return NotImplemented  # a zone of somebody else
    # The offset goes apart: fromisoformat of python 3.11 loses one below a second.
    return [value.replace(tzinfo=None).isoformat(), value.fold, zone]


def load_moment(cls: type[Any]) -> Callable[[list[Any]], Any]:
    """Return what makes a ``datetime`` or a ``time``."""

    def load(payload: list[Any]) -> Any:
        text, fold, zone = payload
        zone = dt.timezone(zone) if type(zone) is dt.timedelta else zone
        return cls.fromisoformat(text).replace(fold=fold, tzinfo=zone)

    return load


def _nameless_offset(zone: dt.timezone) -> dt.timedelta | None:
    offset = zone.utcoffset(None)
    return offset if zone.tzname(None) == dt.timezone(offset).tzname(None) else None


def dump_timezone(value: dt.timezone) -> list[Any]:
    """Return ``[offset, name]``; the name null if the zone has none of its own."""
    is_nameless = _nameless_offset(value) is not None
    return [value.utcoffset(None), None if is_nameless else value.tzname(None)]


def load_timezone(payload: list[Any]) -> dt.timezone:
    """Return the zone of a fixed offset."""
    offset, name = payload
    return dt.timezone(offset) if name is None else dt.timezone(offset, name)


def dump_zone(value: zoneinfo.ZoneInfo) -> Any:
    """Return the zone's name in the IANA database; one made from a file has none."""
    key: Any = value.key
    return NotImplemented if key is None else key


def load_zone(key: str) -> zoneinfo.ZoneInfo:
    """Return the zone of the IANA database, whose rules are this system's.

    Raises:
        ConfigError: This system does not have it.
    """
    try:
        return zoneinfo.ZoneInfo(key)
    except (zoneinfo.ZoneInfoNotFoundError, OSError) as error:  # as a folder of zones
        raise ConfigError(
            f"time zone {key!r} is not known on this system.", hint="install `tzdata`."
        ) from error
