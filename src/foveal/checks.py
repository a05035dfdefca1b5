"""One rule for what an argument must be: each check gives the argument in its plain form, or raises a ValueError.

Messages read "name: expected ..., got ..." and tell an array's dtype and shape, never its values. Shapes and dtypes are
checked always, values where they are concrete. JAX is imported by the functions that take arrays, so that
`foveal.config` needs none.
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
    """The value as an error message shows it: an array's dtype and shape, a plain value cut short, or a type."""
    if isinstance(value, np.generic):
        return repr(value.item())
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype} of shape {value.shape}"  # pyright: ignore[reportAttributeAccessIssue]
    return _SHORT.repr(value) if isinstance(value, _PLAIN) else f"a {type(value).__name__}"


def as_int(name: str, value: object, minimum: int | None = None, maximum: int | None = None) -> int:
    """Python's or NumPy's int as Python's. A bool is none: to Python it is, but `o_groups=True` is a mistake."""
    if not isinstance(value, bool) and isinstance(value, numbers.Integral):
        number = int(value)
        if (minimum is None or number >= minimum) and (maximum is None or number <= maximum):
            return number
    bounds = [f">= {minimum}"] * (minimum is not None) + [f"<= {maximum}"] * (maximum is not None)
    raise ValueError(f"{name}: expected {' '.join(['an int', ' and '.join(bounds)]).strip()}, got {described(value)}")


def as_size(name: str, value: Any, minimum: int = 0, maximum: int | None = None) -> Size:
    """The size of an axis: an int, or a symbolic dimension of `jax.export`, which stands for any that fits."""
    from jax.export import is_symbolic_dim

    return value if is_symbolic_dim(value) else as_int(name, value, minimum, maximum)


def require_static_length(name: str, array: Any) -> None:
    """Raises NotImplementedError for an array [B, S, ...] whose S is a symbolic dimension of `jax.export`."""
    from jax.export import is_symbolic_dim

    shape = getattr(array, "shape", ())
    if len(shape) > 1 and is_symbolic_dim(shape[1]):
        raise NotImplementedError(
            f"{name}: a program is cut for one length: expected a static S, got {shape}; export one for each length "
            "(B may be symbolic)"
        )


def as_float(
    name: str, value: object, bound: str = "", minimum: float = -math.inf, *, inclusive: bool = False
) -> float:
    """A finite real number above `minimum`, or at it if `inclusive`; `bound` says so in the message."""
    if not isinstance(value, bool) and isinstance(value, numbers.Real):
        try:
            number = float(value)
        except OverflowError:  # an int beyond every float
            number = math.inf
        if math.isfinite(number) and (number > minimum or (inclusive and number == minimum)):
            return number
    raise ValueError(f"{name}: expected {f'a finite number {bound}'.strip()}, got {described(value)}")


def as_scale(scale: object, dim: int) -> float:
    """The factor of the logits: a finite number, or `dim` ** -0.5 for None."""
    return dim**-0.5 if scale is None else as_float("scale", scale)


def as_bool(name: str, value: object) -> bool:
    """Python's or NumPy's bool as Python's."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise ValueError(f"{name}: expected a bool, got {described(value)}")


def as_choice(name: str, value: object, choices: tuple[str, ...]) -> str:
    """One of some words."""
    if isinstance(value, str) and value in choices:
        return value
    words = " or ".join(f'"{choice}"' for choice in choices)
    raise ValueError(f"{name}: expected {words}, got {described(value)}")


def as_dtype(name: str, dtype: DTypeLike) -> Any:
    """One of `jax.numpy`'s scalar types, whatever the dtype was spelled like: modules of one dtype have one graph."""
    import jax
    import jax.numpy as jnp

    try:
        # NumPy takes None for float64, and Python's float, which is JAX's default float.
        kind = None if dtype is None else (jnp.result_type(float) if dtype is float else jnp.dtype(dtype)).name
    except TypeError:
        kind = None
    if kind not in FLOATS or (kind == "float64" and not jax.config.read("jax_enable_x64")):
        names = f"{', '.join(FLOATS)} (the last with jax_enable_x64)"
        raise ValueError(f"{name}: expected one of {names}, got {described(dtype) if kind is None else kind}")
    return getattr(jnp, kind)


def as_precision(precision: Precision) -> Precision:
    """A precision that `jax.lax.dot_general` accepts, unchanged."""
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
    """An array, a tracer or a `jax.ShapeDtypeStruct` of the wanted shape and dtype; NumPy's become JAX's.

    Args:
        name: of the argument.
        value: what came.
        axes: a letter an axis, "B S E"; "B S *" leaves it open how many more there are.
        sizes: the size of each axis, from the first on; None for any.
        kind: "floats" (`FLOATS`), "integers", "bools" or "values", which are any of them.
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
        got = f"a {type(value).__name__}; convert it, as by jnp.asarray"
    raise ValueError(f"{name}: expected {_wanted(axes.split(), sizes, kind)}, got {got}")


def as_hidden_states(x: Any, width: int) -> Any:
    """Floats [B, S, E] of a width; NotImplementedError for a symbolic S."""
    require_static_length("x", x)
    return as_array("x", x, "B S E", (None, None, width))


def as_indices(name: str, value: object, rows: tuple[Size, Size]) -> Any:
    """Integers [B, S, K]: slots for each of the (B, S) queries."""
    return as_array(name, value, "B S K", rows, kind="integers")


def same_shape(name: str, array: Any, other_name: str, other: Any) -> None:
    """Raises ValueError unless both arrays have one shape."""
    if array.shape != other.shape:
        raise ValueError(f"{name}: expected {other_name}'s shape {other.shape}, got {array.shape}")


def same_dtype(name: str, array: Any, other_name: str, other: Any) -> None:
    """Raises ValueError unless both arrays have one dtype."""
    if array.dtype != other.dtype:
        raise ValueError(f"{name}: expected {other_name}'s dtype {other.dtype}, got {array.dtype}")


def as_integers(
    name: str, values: Any, *, ndims: tuple[int, ...], fetch: bool = True
) -> tuple[Int32[Array, "..."], np.ndarray | None]:
    """Integers as int32, and on the host where they are known there.

    Args:
        name: of the argument.
        values: an array, a sequence or a number; traced integers beyond int32 end up at its ends.
        ndims: the ranks they may have.
        fetch: whether to wait for the values of a JAX array; without, they are as unknown as traced ones.
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
    """Integers [B], of an array or a sequence, as `as_integers` gives them.

    Args:
        name: of the argument.
        values: what came.
        batch: B; None for any.
        or_one: take one integer for all rows too, which stays without an axis.
        fetch: as in `as_integers`.
    """
    counts, concrete = as_integers(name, values, ndims=tuple(range(9)), fetch=fetch)
    if not (or_one and counts.ndim == 0) and (counts.ndim != 1 or batch not in (None, *counts.shape)):
        size = "" if batch is None else f" = {(batch,)}"
        wanted = "an integer or integers" if or_one else "integers"
        raise ValueError(f"{name}: expected {wanted} [B]{size}, got {described(values)}")
    return counts, concrete


def as_flags(name: str, values: object, batch: Size) -> Bool[Array, " B"]:
    """Bools [B], of an array or a sequence."""
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
    """Raises ValueError with the first of the concrete values for which `holds` gives False; traced ones are None."""
    if values is None:
        return
    broken = np.argwhere(~holds(values))
    if len(broken):
        index = tuple(broken[0].tolist())
        where = f" at {index[0] if len(index) == 1 else index}" if index else ""
        raise ValueError(f"{name}: expected {expected}, got {values[index]}{where}{hint}")


def on_host(array: Any) -> np.ndarray | None:
    """The values of an array, fetched where that is possible: not of a tracer, a shape, or what other hosts hold."""
    import jax
    from jax.core import Tracer

    if isinstance(array, Tracer | jax.ShapeDtypeStruct) or not getattr(array, "is_fully_addressable", True):
        return None
    return np.asarray(array)


def _few(name: str, given: Any, kind: str, *, fetch: bool = True) -> tuple[Any, np.ndarray | None]:
    """Integers or bools of an array, a sequence or a number: JAX's array or NumPy's, and on the host."""
    import jax
    import jax.numpy as jnp
    from jax.core import Tracer

    values, mixed = given, False
    if isinstance(given, list | tuple):
        leaves = jax.tree.leaves(given)
        mixed = kind == "integers" and any(isinstance(leaf, bool) for leaf in leaves)  # to NumPy [True, 2] is integers
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
    """As "floats [B, S, E] = (2, S, 64)", with a letter where any size will do."""
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
