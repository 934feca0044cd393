"""Patch: a critic has the attention that its config names.

verl's FSDP engine builds every critic with flash-attn, and says of one that it cannot build that trl is missing. It may go
when ``load_valuehead_model`` reads the config's attention.
"""

from __future__ import annotations

from typing import Any

from verl_ext.guard import around
from verl_ext.packed_attention import FLASH


def patch(module: Any) -> None:
    """``module`` (``verl.utils.model``) builds critics of another attention than flash-attn, as token classifiers."""

    @around(module, "load_valuehead_model")
    def load_valuehead_model(
        verls: Any, local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool
    ) -> Any:
        from transformers import AutoModelForTokenClassification

        attention = model_config._attn_implementation
        if attention in (None, FLASH):
            return verls(local_path, torch_dtype, model_config, trust_remote_code)
        return AutoModelForTokenClassification.from_pretrained(
            local_path,
            dtype=torch_dtype,
            config=model_config,
            attn_implementation=attention,
            trust_remote_code=trust_remote_code,
        )
