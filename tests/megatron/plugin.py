"""Register the engines of ``engine`` with verl.

A process that has ``VERL_USE_EXTERNAL_MODULES=tests.megatron.plugin`` imports this at ``import verl``. The processes that
it starts, Ray's too, inherit the variable.
"""

from tests.megatron import engine
from verl_ext.guard import when_imported

when_imported("verl.workers.config.engine", engine.accept_float32)
when_imported("verl.workers.engine.megatron.transformer_impl", engine.register)
