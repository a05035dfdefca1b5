"""Checks of arguments: each returns the argument in a plain form, or raises a ValueError.

Messages read "name: expected ..., got ..." and show an array by its dtype and shape. Shapes and dtypes are always
checked, values where they are concrete. Functions that take arrays import JAX, so that `foveal.config` need not.
"""

from __future__ import annotations

import math
import numbers
import reprlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from foveal.typing import Array, Bool, DTypeLike, Int32, Precision, Size

FLOATS = ("bfloat16", "float16", "float32", "float64")
"""Names of the dtypes that floats may have."""

_SHORT = reprlib.Repr()
_SHORT.maxstring = 80
_PLAIN = (type(None), bool, numbers.Number, str, bytes, list, tuple, dict, set, frozenset, type)


def described(value: object) -> str:
    """Describe a value for an error message: an array's dtype and shape, a plain value cut short, or a type."""
    if isinstance(value, np.generic):
        return repr(value.item())
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype} of shape {value.shape}"  # pyright: ignore[reportAttributeAccessIssue]
    return _SHORT.repr(value) if isinstance(value, _PLAIN) else f"a {type(value).__name__}"


def as_int(name: str, value: object, minimum: int | None = None, maximum: int | None = None) -> int:
    """Return a Python or NumPy int as a Python int. Bools are refused: `o_groups=True` is a mistake."""
    if not isinstance(value, bool) and isinstance(value, numbers.Integral):
        number = int(value)
        if (minimum is None or number >= minimum) and (maximum is None or number <= maximum):
            return number
    bounds = [f">= {minimum}"] * (minimum is not None) + [f"<= {maximum}"] * (maximum is not None)
    raise ValueError(f"{name}: expected {' '.join(['an int', ' and '.join(bounds)]).strip()}, got {described(value)}")


def as_size(name: str, value: Any, minimum: int = 0, maximum: int | None = None) -> Size:
    """Return the size of an axis: an int, or a symbolic dimension of `jax.export`, which stands for any valid size."""
    from jax.export import is_symbolic_dim

    return value if is_symbolic_dim(value) else as_int(name, value, minimum, maximum)


def require_static_length(name: str, array: Any) -> None:
    """Raise NotImplementedError for an array [B, S, ...] whose S is a symbolic dimension of `jax.export`."""
    from jax.export import is_symbolic_dim

    shape = getattr(array, "shape", ())
    if len(shape) > 1 and is_symbolic_dim(shape[1]):
        raise NotImplementedError(
            f"{name}: expected a static S, got {shape}; export one program for each length (B may be symbolic)"
        )


def as_float(
    name: str, value: object, bound: str = "", minimum: float = -math.inf, *, inclusive: bool = False
) -> float:
    """Return a finite real number above `minimum`, or at it if `inclusive`; `bound` states this in the message."""
    if not isinstance(value, bool) and isinstance(value, numbers.Real):
        try:
            number = float(value)
        except OverflowError:  # an int beyond every float
            number = math.inf
        if math.isfinite(number) and (number > minimum or (inclusive and number == minimum)):
            return number
    raise ValueError(f"{name}: expected {f'a finite number {bound}'.strip()}, got {described(value)}")


def as_scale(scale: object, dim: int) -> float:
    """Return the scale of the logits: a finite number, or `dim` ** -0.5 for None."""
    return dim**-0.5 if scale is None else as_float("scale", scale)


def as_bool(name: str, value: object) -> bool:
    """Return a Python or NumPy bool as a Python bool."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise ValueError(f"{name}: expected a bool, got {described(value)}")


def as_choice(name: str, value: object, choices: tuple[str, ...]) -> str:
    """Return `value` if it is one of the words in `choices`."""
    if isinstance(value, str) and value in choices:
        return value
    words = " or ".join(f'"{choice}"' for choice in choices)
    raise ValueError(f"{name}: expected {words}, got {described(value)}")


def as_dtype(name: str, dtype: DTypeLike) -> Any:
    """Return a dtype, however spelled, as a `jax.numpy` scalar type: modules of one dtype then have equal graphs."""
    import jax
    import jax.numpy as jnp

    try:
        # NumPy reads None and Python's float as float64; here None is refused and float is JAX's default float.
        kind = None if dtype is None else (jnp.result_type(float) if dtype is float else jnp.dtype(dtype)).name
    except TypeError:
        kind = None
    if kind not in FLOATS or (kind == "float64" and not jax.config.read("jax_enable_x64")):
        names = f"{', '.join(FLOATS)} (the last with jax_enable_x64)"
        raise ValueError(f"{name}: expected one of {names}, got {described(dtype) if kind is None else kind}")
    return getattr(jnp, kind)


def as_precision(precision: Precision) -> Precision:
    """Return, unchanged, a precision that `jax.lax.dot_general` accepts."""
    import jax

    def known(value: Any) -> bool:
        if isinstance(value, jax.lax.Precision | jax.lax.DotAlgorithm | jax.lax.DotAlgorithmPreset):
            return True
        try:
            jax.lax.Precision(value)
        except (ValueError, TypeError):
            return value in jax.lax.DotAlgorithmPreset.__members__ if isinstance(value, str) else False
        return isinstance(value, str)

    pair = isinstance(precision, tuple) and len(precision) == 2 and all(map(known, precision))
    if precision is None or known(precision) or pair:
        return precision
    names = "default, high, highest or a jax.lax.Precision"
    raise ValueError(f"precision: expected None, {names}, got {described(precision)}")


def as_array(name: str, value: object, axes: str, sizes: tuple[Size | None, ...] = (), *, kind: str = "floats") -> Any:
    """Return an array, tracer or `jax.ShapeDtypeStruct` of the wanted shape and dtype; NumPy arrays become JAX's.

    Args:
        name: name of the argument, for messages.
        value: the argument.
        axes: one letter per axis, "B S E"; "B S *" allows any number of further axes.
        sizes: sizes of the leading axes; None for any.
        kind: "floats" (`FLOATS`), "integers", "bools", or "values" for any of these.
    """
    shape, dtype, rank = getattr(value, "shape", None), getattr(value, "dtype", None), len(axes.split())
    fits = False
    if shape is not None and dtype is not None:
        fits = len(shape) >= rank - 1 if axes.endswith("*") else len(shape) == rank
        fits = fits and all(size is None or size == n for size, n in zip(sizes, shape, strict=False))
    if fits and _is(kind, dtype):
        return _as_jax(value)
    got = described(value)
    if isinstance(value, list | tuple):
        got = f"a {type(value).__name__}; convert it with jnp.asarray"
    raise ValueError(f"{name}: expected {_wanted(axes.split(), sizes, kind)}, got {got}")


def as_hidden_states(x: Any, width: int) -> Any:
    """Return hidden states, floats [B, S, E] with E = `width`; raise NotImplementedError for a symbolic S."""
    require_static_length("x", x)
    return as_array("x", x, "B S E", (None, None, width))


def as_indices(name: str, value: object, rows: tuple[Size, Size]) -> Any:
    """Return integers [B, S, K]: slots for each of the (B, S) queries."""
    return as_array(name, value, "B S K", rows, kind="integers")


def same_shape(name: str, array: Any, other_name: str, other: Any) -> None:
    """Raise ValueError unless both arrays have the same shape."""
    if array.shape != other.shape:
        raise ValueError(f"{name}: expected {other_name}'s shape {other.shape}, got {array.shape}")


def same_dtype(name: str, array: Any, other_name: str, other: Any) -> None:
    """Raise ValueError unless both arrays have the same dtype."""
    if array.dtype != other.dtype:
        raise ValueError(f"{name}: expected {other_name}'s dtype {other.dtype}, got {array.dtype}")


def as_integers(
    name: str, values: Any, *, ndims: tuple[int, ...], fetch: bool = True
) -> tuple[Int32[Array, "..."], np.ndarray | None]:
    """Return integers as an int32 array, and as a NumPy array or, where their values are unknown, None.

    Args:
        name: name of the argument, for messages.
        values: an array, a sequence or a number; traced integers are clipped to the range of int32.
        ndims: the ranks they may have.
        fetch: whether to wait for the values of a JAX array; if not, they are as unknown as traced ones.
    """
    import jax
    import jax.numpy as jnp

    from foveal.typing import narrowed

    values, concrete = _few(name, values, "integers", fetch=fetch)
    if len(values.shape) not in ndims:
        raise ValueError(f"{name}: expected rank {' or '.join(map(str, ndims))}, got shape {values.shape}")
    limits = np.iinfo(np.int32)
    if concrete is not None:
        require(name, concrete, lambda a: (limits.min <= a) & (a <= limits.max), "int32 values")
        concrete = concrete.astype(np.int32)
    if isinstance(values, jax.Array):
        return values if values.dtype == jnp.int32 else narrowed(values, limits.min, limits.max), concrete
    return jnp.asarray(concrete), concrete


def as_lengths(
    name: str, values: Any, batch: Size | None, *, or_one: bool = False, fetch: bool = True
) -> tuple[Int32[Array, " B"], np.ndarray | None]:
    """Return integers [B], from an array or a sequence, in the two forms of `as_integers`.

    Args:
        name: name of the argument, for messages.
        values: the argument.
        batch: B; None for any.
        or_one: also accept one integer for all rows, which keeps rank 0.
        fetch: as in `as_integers`.
    """
    counts, concrete = as_integers(name, values, ndims=tuple(range(9)), fetch=fetch)
    if not (or_one and counts.ndim == 0) and (counts.ndim != 1 or batch not in (None, *counts.shape)):
        size = "" if batch is None else f" = {(batch,)}"
        wanted = "an integer or integers" if or_one else "integers"
        raise ValueError(f"{name}: expected {wanted} [B]{size}, got {described(values)}")
    return counts, concrete


def as_flags(name: str, values: object, batch: Size) -> Bool[Array, " B"]:
    """Return bools [B] from an array or a sequence."""
    import jax.numpy as jnp

    flags, _ = _few(name, values, "bools", fetch=False)
    if flags.shape != (batch,):
        raise ValueError(f"{name}: expected bools [B] = {(batch,)}, got shape {flags.shape}")
    return jnp.asarray(flags)


def require(
    name: str,
    values: np.ndarray | None,
    holds: Callable[[np.ndarray], np.ndarray],
    expected: str,
    hint: str = "",
) -> None:
    """Raise ValueError with the first value for which `holds` is False; None, for traced values, passes."""
    if values is None:
        return
    broken = np.argwhere(~holds(values))
    if len(broken):
        index = tuple(broken[0].tolist())
        where = f" at {index[0] if len(index) == 1 else index}" if index else ""
        raise ValueError(f"{name}: expected {expected}, got {values[index]}{where}{hint}")


def on_host(array: Any) -> np.ndarray | None:
    """Fetch the values of an array; None for a tracer, a shape, or an array that lies partly on other hosts."""
    import jax
    from jax.core import Tracer

    if isinstance(array, Tracer | jax.ShapeDtypeStruct) or not getattr(array, "is_fully_addressable", True):
        return None
    return np.asarray(array)


def _few(name: str, given: Any, kind: str, *, fetch: bool = True) -> tuple[Any, np.ndarray | None]:
    """Return integers or bools, from an array, a sequence or a number, and their values on the host, if known."""
    import jax
    import jax.numpy as jnp
    from jax.core import Tracer

    values, mixed = given, False
    if isinstance(given, list | tuple):
        leaves = jax.tree.leaves(given)
        mixed = kind == "integers" and any(
            isinstance(leaf, bool) for leaf in leaves
        )  # NumPy reads [True, 2] as integers
        if any(isinstance(leaf, Tracer) for leaf in leaves):
            values = jnp.asarray(given)
    try:
        values = values if isinstance(values, jax.Array) else np.asarray(values)
        if values.size == 0 and isinstance(given, list | tuple):  # an empty list has no dtype
            values = np.zeros(values.shape, np.int32 if kind == "integers" else bool)
    except (ValueError, TypeError):  # ragged, or no array at all
        values = np.asarray(None)
    if mixed or not _is(kind, values.dtype):
        raise ValueError(f"{name}: expected {kind}, got {described(given)}")
    return values, on_host(values) if fetch or isinstance(values, np.ndarray) else None


def _wanted(axes: list[str], sizes: tuple[Size | None, ...], kind: str) -> str:
    """Format the expectation, as "floats [B, S, E] = (2, S, 64)"; a letter stands for any size."""
    names = ["..." if axis == "*" else axis for axis in axes]
    known = [name if size is None else size for name, size in zip(names, sizes, strict=False)]
    shape = ", ".join(map(str, [*known, *names[len(known) :]])) + "," * (len(axes) == 1)
    what = "" if kind == "values" else f"{kind} "
    return f"{what}[{', '.join(names)}]" + f" = ({shape})" * any(size is not None for size in sizes)


def _is(kind: str, dtype: Any) -> bool:
    import jax.numpy as jnp

    if not isinstance(dtype, np.dtype) or dtype.kind in "OSUMm":
        return False
    if kind == "floats":
        return dtype.name in FLOATS
    return kind == "values" or jnp.issubdtype(dtype, jnp.integer if kind == "integers" else jnp.bool_)


def _as_jax(value: Any) -> Any:
    import jax.numpy as jnp

    return jnp.asarray(value) if isinstance(value, np.ndarray) or hasattr(value, "__jax_array__") else value
