"""What several test files say alike."""

import asyncio
from types import SimpleNamespace


class Local:
    """An actor handle without Ray; ``broken`` verbs raise instead."""

    def __init__(self, actor):
        self.actor = actor
        self.broken = {}

    def __getattr__(self, verb):
        async def call(*arguments):
            if verb in self.broken:
                raise self.broken[verb]
            return await getattr(self.actor, verb)(*arguments)

        return SimpleNamespace(remote=lambda *arguments: asyncio.ensure_future(call(*arguments)))


def begin(manager):
    """The version after the last batch."""
    return manager.begin_version(manager.version + manager._batch_taken)


def byte_tokenizer(template, *tokens, **special):
    """A token a byte and each of ``tokens``; ``special`` are named by their role."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(letters, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    core.add_tokens([AddedToken(name, normalized=False) for name in tokens])
    made = PreTrainedTokenizerFast(tokenizer_object=core, **special)
    made.chat_template = template
    return made
