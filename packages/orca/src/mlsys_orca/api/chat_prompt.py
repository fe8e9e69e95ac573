"""A conversation to its prompt: the chat template's tokens, and those of images in the places that it shows.

Called by the endpoints of chats; :mod:`.images` has the steps.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlsys_core.errors import InvalidInputError

from mlsys_orca.api.errors import too_long
from mlsys_orca.api.images import Prompt, SentImage, has_images, lift_images, place_images, read_images
from mlsys_orca.api.service import ModelService, num_chars
from mlsys_orca.backends.transformers.image_rules import VISION_ARCHITECTURES


def encode_chat(
    service: ModelService,
    messages: Sequence[dict[str, object]],
    *,
    tools: Sequence[dict[str, object]] | None = None,
    variables: dict[str, object] | None = None,
    begins_turn: bool = True,
    continues: bool = False,
) -> Prompt:
    """Return the prompt of a conversation.

    Args:
        service: The model.
        messages: The conversation, as templates expect it; contents with images as :func:`.images.content_of`.
        tools: Functions that the model may call.
        variables: Variables of the template.
        begins_turn: End with the opening of the assistant's turn.
        continues: End with the last message's text instead.

    Raises:
        HttpError: it is longer than the context (400).
        InvalidInputError: the model has no chat template, or it refuses the messages; or there are images that
            cannot be read, or the model reads text alone.
    """
    template, reader = service.loaded.chat_template, service.loaded.images
    if template is None:
        raise InvalidInputError(f"model {service.name!r} has no chat template: use /v1/completions")
    sent: list[SentImage] = []
    if reader is not None:
        messages, sent = lift_images(messages)
        _check_images(service, len(sent), num_tokens=len(sent) * reader.least_tokens)
    elif has_images(messages):
        raise InvalidInputError(
            f"model {service.name!r} reads text alone: leave the images out, or serve a model that has a vision part "
            f"({', '.join(VISION_ARCHITECTURES)})"
        )
    service.check_length(num_chars((messages, tools)))
    token_ids = template.encode(
        messages,
        service.loaded.tokenizer,
        add_generation_prompt=begins_turn,
        tools=tools,
        variables=variables,
        continues=continues,
    )
    if reader is None or not sent:
        return Prompt(token_ids)
    found, num_tokens = [], len(token_ids)
    for pixels, shown in read_images(sent, reader):
        found.append((pixels, shown))
        num_tokens += len(shown) - 1
        _check_images(service, len(sent), num_tokens=num_tokens)
    return place_images(token_ids, found, image_token_id=reader.image_token_id)


def _check_images(service: ModelService, num_images: int, *, num_tokens: int) -> None:
    """See that images fit the context, as far as it is known what they take.

    Raises:
        HttpError: they do not (400).
    """
    if num_images and num_tokens >= service.engine.max_model_len:
        raise too_long(
            f"a prompt with these {num_images} images takes {num_tokens} tokens or more, and this model's context "
            f"is {service.engine.max_model_len}: send fewer or smaller images, or give them the detail 'low'"
        )
