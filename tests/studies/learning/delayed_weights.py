"""Engines that decode with the weights of some versions before: age without mixing and without selection.

An arm's trainer imports it (verl's ``model.external_lib``). The trainer's record does not know of it: staleness stays 0,
and a validation is of the delayed weights too.
"""

from __future__ import annotations

import os
from collections import deque
from typing import Any

VERSIONS = "STUDY_DELAYED_VERSIONS"
"""environment variable: how many versions the engines are behind"""


def delay(engine_class: Any, versions: int) -> None:
    """Have ``engine_class`` send what it held ``versions`` calls before; at first, what it began with."""
    present = engine_class.get_per_tensor_param

    def delayed(self: Any, *args: Any, **kwargs: Any) -> Any:
        weights, peft = present(self, *args, **kwargs)
        if not hasattr(self, "_sent"):
            self._sent = deque(maxlen=versions + 1)
        self._sent.append([(name, weight.detach().clone()) for name, weight in weights])
        return iter(self._sent[0]), peft

    engine_class.get_per_tensor_param = delayed


if VERSIONS in os.environ:
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    delay(FSDPEngine, int(os.environ[VERSIONS]))
