"""Numbers as arguments."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def int_between(low: int, high: int) -> Callable[[str], int]:
    """A parser of whole numbers for `argparse`."""

    def parse(value: str) -> int:
        try:
            number = int(value)
        except ValueError:
            number = None
        if number is None or not low <= number <= high:
            raise argparse.ArgumentTypeError(f"expected a whole number from {low} to {high}, got {value!r}")
        return number

    return parse
