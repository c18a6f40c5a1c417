"""Which device spec prices a graph: the one that the user names, else that of the device the graph runs on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from remat_passes.device import BUILT_IN, DeviceSpec, spec_from_json
from remat_passes.errors import ConfigError, nearest

from .calibrate import cpu_spec

NAMES = ("cpu", *BUILT_IN)

# By the whole text of ``torch.cuda.get_device_name``: "NVIDIA GeForce RTX 4090 D", "NVIDIA H200 NVL" and a MIG slice
# begin like one of these and are other devices.
GPU_NAMES: Mapping[str, str] = {
    "NVIDIA A100-SXM4-80GB": "a100-80g",
    "NVIDIA A100 80GB PCIe": "a100-80g",  # bandwidth 5 % lower
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA GeForce RTX 4090": "rtx4090",
    "NVIDIA GeForce RTX 3090": "rtx3090",
    "NVIDIA L40S": "l40s",
}


def device_spec(
    name_or_path: str | None,
    device_type: str,
    device_name: str | None,
    total_memory_bytes: int | None,
    cache_dir: Path,
) -> DeviceSpec:
    """The spec called ``name_or_path``, or when that is None the spec of the device at hand.

    Raises:
        ConfigError: there is no such spec, its file is damaged, or the device at hand is not known.
    """
    if name_or_path is None:
        return _at_hand(device_type, device_name, total_memory_bytes, cache_dir)
    if name_or_path == "cpu":
        return cpu_spec(cache_dir)
    if name_or_path in BUILT_IN:
        return BUILT_IN[name_or_path]
    return _from_file(name_or_path)


def _at_hand(device_type: str, device_name: str | None, total_memory_bytes: int | None, cache_dir: Path) -> DeviceSpec:
    if device_type == "cpu":
        return cpu_spec(cache_dir)
    name = GPU_NAMES.get(device_name or "") if device_type == "cuda" else None
    if name is None:
        raise ConfigError(
            f"remat has no figures for the device {device_name or device_type!r}."
            f" Set option device_spec (REMAT_DEVICE_SPEC) to one of {', '.join(NAMES)}, or to a JSON file."
        )
    spec = BUILT_IN[name]
    return spec if total_memory_bytes is None else replace(spec, memory_bytes=total_memory_bytes)


def _from_file(path: str) -> DeviceSpec:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:  # ValueError: a null character in the path
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(
            f"Option device_spec is {path!r}: it is not one of {', '.join(NAMES)},"
            f" and it cannot be read as a JSON file ({reason}).{nearest(path.lower(), NAMES)}"
        ) from None
    return spec_from_json(text, path)
