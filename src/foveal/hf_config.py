"""Read published DeepSeek-V4 configs, in any of their spellings, into `AttentionConfig`, and write them.

The spellings are those of the released `config.json`, of DeepSeek's `inference/config.json` and of transformers'
`DeepseekV4Config`. `_SPELLINGS` lists them all. A setting may be stated in several spellings if they agree.

The defaults of DeepSeek's `ModelArgs` and of `DeepseekV4Config` are never used: they describe no released model (no
YaRN, another rotary base, other layer types), and a wrong one changes every output without any error.
"""

import contextlib
import dataclasses
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from foveal.checks import as_int
from foveal.layers import LayerType, RopeConfig, YarnConfig, as_layer_type, layer_types_from_compress_ratios
from foveal.local_files import not_here, parse_json

_Found = dict[str, Any]

# Dots step into nested mappings. Keys are fields of AttentionConfig, or are `_COMBINED` into some.
_SPELLINGS: dict[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size", "dim"),
    "num_layers": ("num_hidden_layers", "n_layers"),
    "num_attention_heads": ("num_attention_heads", "n_heads"),
    "head_dim": ("head_dim",),
    "qk_rope_head_dim": ("qk_rope_head_dim", "rope_head_dim"),
    "partial_rotary_factor": (
        "partial_rotary_factor",
        "rope_parameters.main.partial_rotary_factor",
        "rope_parameters.compress.partial_rotary_factor",
    ),
    "q_lora_rank": ("q_lora_rank",),
    "o_groups": ("o_groups",),
    "o_lora_rank": ("o_lora_rank",),
    "sliding_window": ("sliding_window", "window_size"),
    "layer_types": ("layer_types",),
    "compress_ratios": ("compress_ratios",),
    "csa_ratio": (f"compress_rates.{LayerType.CSA}", "compress_rate_csa"),
    "hca_ratio": (f"compress_rates.{LayerType.HCA}", "compress_rate_hca"),
    "index_n_heads": ("index_n_heads",),
    "index_head_dim": ("index_head_dim",),
    "index_topk": ("index_topk",),
    "rope_theta": ("rope_theta", "rope_parameters.main.rope_theta"),
    "compress_rope_theta": ("compress_rope_theta", "rope_parameters.compress.rope_theta"),
    "rms_norm_eps": ("rms_norm_eps", "norm_eps"),
    "initializer_range": ("initializer_range",),
}
_OPTIONAL = ("csa_ratio", "hca_ratio", "rms_norm_eps", "initializer_range")
_COMBINED = ("num_layers", "partial_rotary_factor", "compress_ratios", "rope_theta", "compress_rope_theta")
_EITHER = (("qk_rope_head_dim", "partial_rotary_factor"), ("layer_types", "compress_ratios"))
_YARN_SOURCES = ("rope_scaling", "rope_parameters.compress", "original_seq_len")
_PUBLISHED_RATIOS = {"csa_ratio": 4, "hca_ratio": 128}

# Key, its only value in DeepSeek-V4 attention, and advice on any other value.
_FIXED: tuple[tuple[str, object, str], ...] = (
    ("model_type", "deepseek_v4", "other architectures are not supported, DeepSeek-V4.1 included"),
    ("num_key_value_heads", 1, "all query heads share one key-value head"),
    ("attention_bias", False, "the projections have no bias"),
    ("attention_dropout", 0.0, "attention dropout is not supported; set it to 0"),
)

# Keys of a YaRN section besides YarnConfig's fields: any other value would change the outputs.
_YARN_FIXED = {"attention_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "truncate": True}
# Field of YarnConfig -> key in DeepSeek's inference/config.json.
_OFFICIAL_YARN = {
    "factor": "rope_factor",
    "original_max_position_embeddings": "original_seq_len",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
}
_HF_YARN = {field: field for field in _OFFICIAL_YARN}


def read_hf_config(source: Mapping[str, Any] | str | os.PathLike[str]) -> tuple[dict[str, Any], str]:
    """Return the fields of an `AttentionConfig` from a published config; see `AttentionConfig.from_hf_config`.

    Args:
        source: the parsed config, the path of a JSON file, or a directory that holds a `config.json`.

    Returns:
        The fields, and the source that errors about them should name: the file, or "config".

    Raises:
        ValueError: not a DeepSeek-V4 config, a key missing, contradictory or stated twice; the message names it.
        FileNotFoundError: there is no such file; models are not downloaded.
    """
    config, name = _load(source)
    with naming(name):
        _check_fixed(config)
        _check_nesting(config)
        found = {field: _lookup(config, field) for field in _SPELLINGS}
        _check_missing(config, found)
        combined = {
            "qk_rope_head_dim": _qk_rope_head_dim(found),
            "rope": _rope("rope_theta", found, _main_yarn(config)),
            "compress_rope": _rope("compress_rope_theta", found, _compress_yarn(config)),
            **_layers(found),
        }
        plain = {field: value for field, value in found.items() if field not in _COMBINED and value is not None}
        return plain | combined, name


def write_hf_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Published form of a config's fields, which `read_hf_config` reads; see `AttentionConfig.to_hf_config`."""
    numbers = {field: value for field, value in fields.items() if isinstance(value, (int, float))}
    plain = {field: value for field, value in numbers.items() if field not in _PUBLISHED_RATIOS}
    tables = {"main": fields["rope"], "compress": fields["compress_rope"]}
    factor = fields["qk_rope_head_dim"] / fields["head_dim"]
    yarn = fields["compress_rope"].yarn
    # The length that the factor implies, as in the releases: transformers warns about any other.
    length = {"max_position_embeddings": int(yarn.factor * yarn.original_max_position_embeddings)} if yarn else {}
    return {
        "model_type": "deepseek_v4",
        **plain,
        **length,
        "num_hidden_layers": len(fields["layer_types"]),
        "layer_types": [str(layer_type) for layer_type in fields["layer_types"]],
        "compress_rates": {str(LayerType.CSA): fields["csa_ratio"], str(LayerType.HCA): fields["hca_ratio"]},
        "partial_rotary_factor": factor,
        "rope_theta": fields["rope"].theta,
        "compress_rope_theta": fields["compress_rope"].theta,
        "rope_parameters": {name: _rope_section(rope, factor) for name, rope in tables.items()},
        **{key: value for key, value, _ in _FIXED},
    }


def _rope_section(rope: RopeConfig, partial_rotary_factor: float) -> dict[str, Any]:
    section = {"rope_theta": rope.theta, "partial_rotary_factor": partial_rotary_factor}
    if rope.yarn is None:
        return {"rope_type": "default", **section}
    return {"rope_type": "yarn", **dataclasses.asdict(rope.yarn), "attention_factor": 1.0, **section}


@contextlib.contextmanager
def naming(name: str) -> Iterator[None]:
    """Prefix errors with the place in the user's file that they are about."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _load(source: Mapping[str, Any] | str | os.PathLike[str]) -> tuple[Mapping[str, Any], str]:
    if isinstance(source, Mapping):
        return source, "config"
    if not isinstance(source, (str, os.PathLike)):
        raise ValueError(
            f"mapping_or_path: expected a mapping or a path, got {type(source).__name__}; "
            "for a transformers config object, pass config.to_dict()"
        )
    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
    if not path.exists():
        raise FileNotFoundError(f"{path}: {not_here(path)}")
    if not path.is_file():  # reading a pipe might never end
        raise ValueError(f"{path}: expected a JSON file, got something else")
    try:
        return parse_json(path.read_bytes()), str(path)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected a JSON file, got {error}") from error


def _check_fixed(config: Mapping[str, Any]) -> None:
    for key, expected, remedy in _FIXED:
        if config.get(key) is not None and config[key] != expected:
            raise ValueError(f"{key}: expected {expected!r}, got {config[key]!r}; {remedy}")


def _check_nesting(config: Mapping[str, Any]) -> None:
    """Check that the sections which dotted spellings step into have the expected form."""
    rates = config.get("compress_rates")
    known = {str(LayerType.CSA), str(LayerType.HCA)}
    if rates is not None and not (isinstance(rates, Mapping) and set(rates) <= known):
        raise ValueError(f"compress_rates: expected an object with the keys {sorted(known)}, got {rates!r}")
    tables = config.get("rope_parameters")
    if tables is None:
        return
    if not isinstance(tables, Mapping) or not all(isinstance(tables.get(k), Mapping) for k in ("main", "compress")):
        raise ValueError(
            "rope_parameters: expected an object with the objects 'main' and 'compress', as transformers saves it, "
            f"got {tables!r}; YaRN settings alone belong under rope_scaling"
        )


def _at(config: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path; None if it is absent or null."""
    value: Any = config
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _agreed(values: Mapping[str, Any]) -> Any:
    """The one value that all these spellings state."""
    first = next(iter(values.values()), None)
    if any(value is not first and value != first for value in values.values()):  # `is`: NaN equals itself here
        listed = ", ".join(f"{key} = {value!r}" for key, value in values.items())
        raise ValueError(f"conflicting spellings of one setting: {listed}; keep one of them")
    return first


def _lookup(config: Mapping[str, Any], field: str) -> Any:
    stated = {path: _at(config, path) for path in _SPELLINGS[field]}
    return _agreed({path: value for path, value in stated.items() if value is not None})


def _check_missing(config: Mapping[str, Any], found: _Found) -> None:
    """Raise one error that names every missing setting, by all the keys that could state it."""
    grouped = [field for fields in _EITHER for field in fields]
    needed = [(field,) for field in found if field not in grouped and field not in _OPTIONAL]
    missing = [
        " or ".join(path for field in fields for path in _SPELLINGS[field])
        for fields in [*needed, *_EITHER]
        if all(found[field] is None for field in fields)
    ]
    # An explicit `"rope_scaling": null` is a statement: no YaRN.
    if "rope_scaling" not in config and all(_at(config, path) is None for path in _YARN_SOURCES):
        missing.append(
            f"{' or '.join(_YARN_SOURCES)} (the releases have rope_scaling = {{'type': 'yarn', 'factor': 16, "
            "'original_max_position_embeddings': 65536, 'beta_fast': 32, 'beta_slow': 1}; set it to null for no YaRN)"
        )
    if missing:
        raise ValueError(f"missing keys, none of which has a safe default: {'; '.join(missing)}")


def _qk_rope_head_dim(found: _Found) -> Any:
    """The rotated dims, from the two ways to state them."""
    stated, factor, head_dim = found["qk_rope_head_dim"], found["partial_rotary_factor"], found["head_dim"]
    if factor is None:
        return stated
    if not isinstance(head_dim, int):
        raise ValueError(f"head_dim: expected an int >= 1, got {head_dim!r}")
    if not isinstance(factor, (int, float)) or not math.isfinite(factor):
        raise ValueError(f"partial_rotary_factor: expected a number, got {factor!r}")
    implied = round(head_dim * factor)
    if not math.isclose(head_dim * factor, implied, rel_tol=1e-6):
        raise ValueError(
            f"partial_rotary_factor: expected a whole number of rotated dims, got {factor!r} of head_dim = {head_dim}; "
            "state qk_rope_head_dim instead"
        )
    if stated is None:
        return implied
    return _agreed({"qk_rope_head_dim": stated, f"partial_rotary_factor * head_dim ({factor!r} * {head_dim})": implied})


def _rope(key: str, found: _Found, yarn: YarnConfig | None) -> RopeConfig:
    with naming(key):
        return RopeConfig(found[key], yarn)


def _layers(found: _Found) -> dict[str, Any]:
    """The layer types of the backbone and the two ratios, from `layer_types`, `compress_ratios` or both."""
    num_layers = as_int(" or ".join(_SPELLINGS["num_layers"]), found["num_layers"], 1)
    # compress_ratios states the ratios itself, so the published ones are safe defaults to read it with.
    ratios = {key: value if found[key] is None else found[key] for key, value in _PUBLISHED_RATIOS.items()}
    named, translated = found["layer_types"], None
    if found["compress_ratios"] is not None:
        translated = layer_types_from_compress_ratios(found["compress_ratios"], num_layers=num_layers, **ratios)
    if named is not None:
        named = _backbone_layer_types(named, num_layers)
        if translated is None:
            _check_ratios_stated(named, found)
        else:
            _check_same_layers(named, translated)
    return {"layer_types": translated if named is None else named, **ratios}


def _backbone_layer_types(values: Any, num_layers: int) -> tuple[LayerType, ...]:
    """The types of the first `num_layers` layers; any that follow belong to MTP layers."""
    if not isinstance(values, (list, tuple)):
        raise ValueError(f"layer_types: expected a list of layer types, got {values!r}")
    if len(values) < num_layers:
        raise ValueError(f"layer_types: expected one for each of {num_layers} layers, got {len(values)}")
    return tuple(as_layer_type(f"layer_types[{index}]", value) for index, value in enumerate(values[:num_layers]))


def _check_ratios_stated(layer_types: tuple[LayerType, ...], found: _Found) -> None:
    for field, layer_type in (("csa_ratio", LayerType.CSA), ("hca_ratio", LayerType.HCA)):
        if found[field] is None and layer_type in layer_types:
            raise ValueError(
                f"missing {' or '.join(_SPELLINGS[field])}: layer_types has {layer_type} layers but nothing states "
                f"their ratio (the releases have {_PUBLISHED_RATIOS[field]})"
            )


def _check_same_layers(named: tuple[LayerType, ...], translated: tuple[LayerType, ...]) -> None:
    for index, (left, right) in enumerate(zip(named, translated, strict=True)):
        if left != right:
            raise ValueError(
                f"conflicting spellings of one setting: layer_types[{index}] = {str(left)!r} but "
                f"compress_ratios[{index}] means {str(right)!r}; keep one of them"
            )


def _main_yarn(config: Mapping[str, Any]) -> YarnConfig | None:
    section = _at(config, "rope_parameters.main")
    return None if section is None else _transformers_yarn(section, "rope_parameters.main")


def _compress_yarn(config: Mapping[str, Any]) -> YarnConfig | None:
    """YaRN of the compressed layers, as stated; None means that the config says there is none."""
    stated: dict[str, YarnConfig | None] = {}
    if "rope_scaling" in config:
        scaling = config["rope_scaling"]
        stated["rope_scaling"] = None if scaling is None else _yarn_section(scaling, "rope_scaling")
    section = _at(config, "rope_parameters.compress")
    if section is not None:
        stated["rope_parameters.compress"] = _transformers_yarn(section, "rope_parameters.compress")
    if any(config.get(key) is not None for key in _OFFICIAL_YARN.values()):
        # DeepSeek's inference code switches YaRN off by a length of 0.
        off = config.get("original_seq_len") == 0
        stated["original_seq_len"] = None if off else _yarn(config, _OFFICIAL_YARN, "YaRN")
    return _agreed(stated)


def _transformers_yarn(section: Mapping[str, Any], name: str) -> YarnConfig | None:
    yarn = _yarn_section(section, name)
    if yarn is not None and section.get("attention_factor") is None:
        # transformers sets it to 1 on flat sections only; without it, cos and sin grow by 0.1 ln(factor) + 1.
        raise ValueError(
            f"{name}.attention_factor: expected 1.0, got none, with which transformers scales cos and sin; state 1.0"
        )
    return yarn


def _yarn_section(section: Any, name: str) -> YarnConfig | None:
    if not isinstance(section, Mapping):
        raise ValueError(f"{name}: expected an object or null, got {section!r}")
    kind = _agreed({f"{name}.{key}": section[key] for key in ("rope_type", "type") if section.get(key) is not None})
    if kind == "default":
        return None
    if kind != "yarn":
        raise ValueError(f"{name}.rope_type (or type): expected 'yarn' or 'default', got {kind!r}")
    for key, expected in _YARN_FIXED.items():
        if section.get(key) is not None and section[key] != expected:
            raise ValueError(f"{name}.{key}: expected {expected}, as DeepSeek-V4 has it, got {section[key]!r}")
    return _yarn(section, _HF_YARN, name)


def _yarn(section: Mapping[str, Any], keys: Mapping[str, str], name: str) -> YarnConfig:
    missing = [key for key in keys.values() if section.get(key) is None]
    if missing:
        released = "the releases have factor 16, original length 65536, beta_fast 32, beta_slow 1"
        raise ValueError(f"{name}: missing {', '.join(missing)} ({released})")
    with naming(f"{name} ({', '.join(f'{key} = {section[key]!r}' for key in keys.values())})"):
        return YarnConfig(**{field: section[key] for field, key in keys.items()})
