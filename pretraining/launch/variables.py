"""Environment variables read as what they should be, or refused by name."""

from __future__ import annotations

from collections.abc import Mapping

from pretraining.errors import LaunchError


def read_text(environ: Mapping[str, str], name: str) -> str | None:
    """The value without surrounding blanks; None where it is unset or empty (`export NAME=` means unset)."""
    return environ.get(name, "").strip() or None


def read_integer(environ: Mapping[str, str], name: str, launcher: str) -> int:
    """A variable that `launcher` has to set to a number.

    Raises:
        LaunchError: it is missing or not an integer.
    """
    text = read_text(environ, name)
    if text is None:
        raise LaunchError(
            f"{name} is not set, though other variables say that {launcher} started this process. "
            f"Start the job with {launcher} itself, or unset what is left over from it."
        )
    try:
        return int(text)
    except ValueError:
        raise LaunchError(f"{name}={text!r} is not an integer; mend or unset it (launcher: {launcher}).") from None


def read_port(environ: Mapping[str, str]) -> int | None:
    """MASTER_PORT, None where it is not given.

    Raises:
        LaunchError: it is no port number.
    """
    text = read_text(environ, "MASTER_PORT")
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 65535):
        raise LaunchError(f"MASTER_PORT={text!r} is not a port: give a number from 1 to 65535.")
    return int(text)
