"""`support_of`: whether this engine runs a model that is on this machine, and why not, without reading its weights.

For `streamserve_models`. What is refused here is refused at a load by the same functions, with the same words.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from streamserve.engine.model.load.loader import read_config
from streamserve.engine.model.load.source import ModelLoadError, find, require_safetensors
from streamserve.engine.model.load.support import PROVEN, max_model_len, require_supported

# What a model can be.
IS_PROVEN, IS_TRIED, IS_REFUSED, IS_ABSENT = "supported", "tried at load", "refused", "not here"


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """One model. `traits` are what its attention has beside the plain kind; `reason` says why it is refused."""

    verdict: str
    model_type: str = ""
    traits: tuple[str, ...] = ()
    reason: str = ""


def support_of(path: str) -> Support:
    """Return what is known of the model named `path`: a folder, or a hub id that was downloaded."""
    folder = find(path)
    if folder is None:
        return Support(verdict=IS_ABSENT, reason="It is no folder, and was not downloaded from the hub yet.")
    try:
        config = read_config(folder)
        require_supported(config)
        require_safetensors(folder)
    except ModelLoadError as error:
        return Support(verdict=IS_REFUSED, model_type=_type_of(folder), reason=str(error))
    verdict = IS_PROVEN if config.get_text_config().model_type in PROVEN else IS_TRIED
    return Support(verdict=verdict, model_type=config.model_type, traits=tuple(_traits(config.get_text_config())))


def _type_of(folder: Any) -> str:
    from streamserve.engine.model.load.source import read_config as read_json

    try:
        return str(read_json(folder).get("model_type", ""))
    except ModelLoadError:
        return ""


def _traits(text: Any) -> list[str]:
    """Return the parts of the model that the paged attention takes care of, each in a few words."""
    out = [f"context of {max_model_len(text, None):,}"]
    kinds = list(getattr(text, "layer_types", None) or ())
    window = getattr(text, "sliding_window", None)
    if window and (not kinds or "sliding_attention" in kinds):
        share = f" in {kinds.count('sliding_attention')} of {len(kinds)} layers" if kinds else ""
        out.append(f"window of {window:,}{share}")
    rope = getattr(text, "rope_parameters", None) or {}
    scaled = {part.get("rope_type", "default") for part in (rope, *rope.values()) if isinstance(part, dict)}
    out += [f"rope {kind}" for kind in sorted(scaled - {"default"})]
    if getattr(text, "attn_logit_softcapping", None):
        out.append("softcap")
    if text.model_type == "gpt_oss":
        out.append("attention sinks")
    if getattr(text, "tie_word_embeddings", False):
        out.append("tied head")
    return out
