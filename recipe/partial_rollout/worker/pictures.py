"""The images of a sample: from its agent loop to the trainer.

A finished sample stores an image of its dataset row as the image's index in that row, and an image that its agent loop
made as a PNG file. The trainer makes pixels of them only when it reads a batch. So neither a report nor Ray's store nor
a checkpoint has pixels, which in the form of verl's trainer take 24 MiB a megapixel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, AgentLoopWorker
from verl.utils.tokenizer.tokenizer import get_processor_token_id

from recipe.partial_rollout.checkpoint.row_images import MESSAGES, digest, has_images, listed, opened_row, png
from recipe.partial_rollout.manager.types import SampleOutput

SEES = "Qwen2-VL, Qwen2.5-VL, Qwen3-VL, GLM-4.1V or GLM-4.6V"
"""models for which verl computes position ids of images; used in error messages"""


class Pictures:
    """Turns images into the inputs that verl's trainer reads, with the code of verl's own agent-loop worker.

    Args:
        config: the whole config.
        tokenizer, processor: the model's tokenizer and processor; a model without a processor takes no images.
        dataset_cls: class of the dataset, verl's or the user's; it reads images from messages.
    """

    _compute_multi_modal_inputs = AgentLoopWorker._compute_multi_modal_inputs
    _compute_position_ids = AgentLoopWorker._compute_position_ids
    _get_mm_processor_kwargs = AgentLoopWorker._get_mm_processor_kwargs

    def __init__(self, config: Any, tokenizer: Any, processor: Any, dataset_cls: type) -> None:
        self.tokenizer, self.processor = tokenizer, processor
        self.mm_processor_kwargs = config.data.get("mm_processor_kwargs", {})
        self._loop: Any = SimpleNamespace(processor=processor, dataset_cls=dataset_cls, data_config=config.data)

    @property
    def known(self) -> bool:
        """Whether the model is one of ``SEES``."""
        return hasattr(self.processor, "get_rope_index")

    async def of_row(self, row: dict[str, Any]) -> list[Image.Image]:
        """The images of a dataset row, in the order of its messages, as an agent loop gets them from verl's dataset."""
        messages: Any = opened_row(row).get(MESSAGES)
        if not has_images(messages):
            return []
        found: dict[str, Any] = await AgentLoopBase.process_multi_modal_info(self._loop, [*messages])
        return found.get("images") or []

    def inputs(self, images: Sequence[Image.Image], ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Make the model's inputs of ``images``, whose image tokens are in ``ids`` [1, L].

        ``pixel_values`` [patches, values of a patch], ``image_grid_thw`` [images, 3], ``images_seqlens`` [images], and
        ``mm_token_type_ids``, which only ``positions`` reads.
        """
        shown: Any = SimpleNamespace(multi_modal_data={"images": [*images] or None}, mm_processor_kwargs=None)
        return self._compute_multi_modal_inputs(shown, ids)

    def positions(self, ids: torch.Tensor, mask: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the position ids [1, 4, L] of ``ids`` [1, L] under the attention ``mask`` [1, L].

        The first of the four counts the text. The other three are time, height and width in an image.
        """
        # verl takes a part out of the dictionary.
        return self._compute_position_ids(ids, mask, dict(inputs))

    def check(
        self, output: SampleOutput, images: Sequence[Image.Image], kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Raise if the trainer would fail on ``output``, which shows ``images``, or would see other images.

        Without this check the error would come in the trainer, and fail the whole batch.

        Args:
            kwargs: ``mm_processor_kwargs`` that the agent loop returned; None: those of the configuration.
        """
        if not self.known:
            words = f"partial rollout cannot train images of this model, only of {SEES}"
            raise ValueError(f"{words}: set partial_rollout.enable=False")
        if kwargs is not None and kwargs != (own := self._get_mm_processor_kwargs()):
            raise ValueError(
                f"mm_processor_kwargs={kwargs} beside the images of the sample: partial rollout trains images under "
                f"data.mm_processor_kwargs={own} alone; set that key, or partial_rollout.enable=False"
            )
        ids = torch.from_numpy(np.concatenate([output.prompt_ids, output.response_ids]))[None].long()
        patches = self.inputs(images, ids)["image_grid_thw"].prod(dim=1).sum()
        needed = int(patches) // self.processor.image_processor.merge_size**2
        found = int((ids == get_processor_token_id(self.processor, "image")).sum())
        if found != needed:
            raise RuntimeError(
                f"{found} tokens of the sample stand for images, but its {len(images)} images need {needed}: its agent "
                "loop must return each image with all its image tokens, as data.mm_processor_kwargs makes them"
            )
        if films := int((ids == get_processor_token_id(self.processor, "video")).sum()):
            raise RuntimeError(f"{films} tokens of the sample stand for a video, but it shows none")


def images_in(output: AgentLoopOutput, sample_id: str) -> list[Image.Image]:
    """The images that ``output`` of an agent loop shows.

    Raises:
        ValueError: it has other media, or images that are not PIL's.
    """
    given = {kind: listed(data) for kind, data in (output.multi_modal_data or {}).items()}
    images = [each for each in given.pop("images", []) if each is not None]
    others = [kind for kind, data in given.items() if any(each is not None for each in data)]
    if others or not all(isinstance(image, Image.Image) for image in images):
        raise ValueError(
            f"sample {sample_id} shows {', '.join(others) or 'images that are not PIL.Image'}: partial rollout trains text "
            "and images of PIL; set partial_rollout.enable=False"
        )
    return images


def kept(
    images: Sequence[Image.Image], digests: Sequence[bytes], own: Sequence[Image.Image]
) -> tuple[int | bytes, ...]:
    """Return what ``SampleOutput.images`` stores for each of ``images``.

    An image of the row (``own``) is stored as its index there, any other as the bytes of a PNG file.
    """
    places = {digest(image): place for place, image in enumerate(own)}
    return tuple(places[mark] if mark in places else png(image) for image, mark in zip(images, digests, strict=True))
