"""Parsers of numbers in arguments."""

from __future__ import annotations

import argparse
import decimal
import re
from collections.abc import Callable

TOKENS = "numbers of tokens may be written as 4k (4096), 1M (1048576) or 1e6"
"""Help text on how numbers of tokens may be written."""

_TOKENS = re.compile(r"(?P<number>\d+(\.\d*)?(e\+?\d{1,2})?)(?P<unit>[km]?)", re.ASCII | re.IGNORECASE)
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20}


def int_between(low: int, high: int) -> Callable[[str], int]:
    """Return a parser of whole numbers from `low` to `high` for `argparse`."""
    return _parser(low, high, "whole number", int)


def tokens_between(low: int, high: int) -> Callable[[str], int]:
    """Return a parser of numbers of tokens for `argparse`; as in context lengths, k is 1024 and M is 1024 k."""
    return _parser(low, high, "whole number of tokens", _tokens)


def _parser(low: int, high: int, what: str, read: Callable[[str], int]) -> Callable[[str], int]:
    def parse(value: str) -> int:
        try:
            number = read(value)
        except ValueError:
            number = None
        if number is None or not low <= number <= high:
            raise argparse.ArgumentTypeError(f"expected a {what} from {low} to {high}, got {value!r}")
        return number

    return parse


def _tokens(value: str) -> int:
    try:
        return int(value)
    except ValueError:
        found = _TOKENS.fullmatch(value)
    if not found:
        raise ValueError(value)
    number = decimal.Decimal(found["number"]) * _UNITS[found["unit"].lower()]
    if number != int(number):
        raise ValueError(value)
    return int(number)
