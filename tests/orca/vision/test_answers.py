"""Answers about images are those of ``transformers``, with its own processors: token for token, in any company."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlsys_orca.api.items import parameters_of
from mlsys_orca.api.server import make_service
from mlsys_orca.api.service import ModelService
from mlsys_orca.engine.client import EngineConfig
from mlsys_orca.llm.answers import Answer
from mlsys_orca.llm.collecting import answer
from mlsys_orca.loading.loaded import LoadedModel

from tests.orca.vision.models import ARCHITECTURES, FACTOR, PATCH, SIDE, TEMPLATE, data_url, part, picture

pytestmark = pytest.mark.usefixtures("one_thread")
NUM_TOKENS = 10
Chat = list[dict[str, Any]]


def user(*parts: Any) -> dict[str, Any]:
    """A user's message of texts and images."""
    return {
        "role": "user",
        "content": [{"type": "text", "text": each} if isinstance(each, str) else each for each in parts],
    }


CHATS: list[Chat] = [
    [user(part(picture(90, 50, 1)), "What is this?")],
    [user(part(picture(40, 120, 2)), "And this, which is tall?")],
    [user("Before", part(picture(64, 64, 3)), "between", part(picture(200, 20, 4)), "and after.")],
    [user(part(picture(3, 5, 5)), part(picture(3, 5, 6)))],
    [{"role": "user", "content": "No image at all."}],
    [
        {"role": "system", "content": "Be brief."},
        user(part(picture(33, 97, 7)), "One."),
        {"role": "assistant", "content": "Blocks."},
        user("<image> is only text here; ", part(picture(96, 96, 8))),
    ],
]


async def answers(service: ModelService, bodies: Sequence[dict[str, Any]]) -> list[Answer]:
    """Ask all at once."""
    asked = [parameters_of({"max_tokens": NUM_TOKENS, "temperature": 0, **body}, service) for body in bodies]
    return await asyncio.gather(*(answer(service, *each) for each in asked))


def ask(loaded: LoadedModel, *rounds: Sequence[dict[str, Any]], **options: Any) -> tuple[list[list[Answer]], Any]:
    """Answers of one engine to rounds of requests, each round at once; and the counts of its pool."""
    config = EngineConfig(**{"max_batch_size": 8, "max_model_len": 512, "policy": "chunked", **options})
    service = make_service(loaded, "tiny", config)

    async def run() -> list[list[Answer]]:
        return [await answers(service, bodies) for bodies in rounds]

    try:
        with service.engine as engine:
            return asyncio.run(run()), engine.counts().pool
    finally:
        service.front.close()


def theirs(folder: Path, architecture: str, chat: Chat) -> tuple[list[int], list[int]]:
    """The prompt's ids and the answer's, all by transformers."""
    import transformers
    from transformers.image_utils import load_image

    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    urls = [piece["image_url"]["url"] for message in chat for piece in message["content"] if "image_url" in piece]
    messages = [
        {
            **message,
            "content": [
                {"type": "image"} if "image_url" in piece else piece
                for piece in (
                    [{"type": "text", "text": message["content"]}]
                    if isinstance(message["content"], str)
                    else message["content"]
                )
            ],
        }
        for message in chat
    ]
    text = tokenizer.apply_chat_template(messages, chat_template=TEMPLATE, tokenize=False, add_generation_prompt=True)
    images = [load_image(url) for url in urls]
    tokens = (SIDE // PATCH // FACTOR) ** 2
    if architecture.startswith("idefics3"):
        processor: Any = transformers.Idefics3Processor(
            transformers.Idefics3ImageProcessorPil.from_pretrained(folder), tokenizer, image_seq_len=tokens
        )
        inputs = dict(processor(text=text, images=images or None, return_tensors="pt"))
    else:  # its processor wants torchvision for videos: its parts
        from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string as shown

        inputs = {}
        if images:
            found = transformers.SmolVLMImageProcessorPil.from_pretrained(folder)(
                [images], return_row_col_info=True, return_tensors="pt"
            )
            first, *rest = text.split("<image>")
            marks = ("<fake_token_around_image>", "<image>", "<global-img>")
            places = [
                shown(rows, columns, tokens, *marks)
                for rows, columns in zip(found["rows"][0], found["cols"][0], strict=True)
            ]
            text = first + "".join(place + after for place, after in zip(places, rest, strict=True))
            inputs = {name: found[name] for name in ("pixel_values", "pixel_attention_mask")}
        inputs |= dict(tokenizer(text, return_tensors="pt"))
    inputs.pop("token_type_ids", None)
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype="float32").eval()
    out = model.generate(**inputs, max_new_tokens=NUM_TOKENS, do_sample=False)[0].tolist()
    num_prompt = inputs["input_ids"].shape[1]
    return out[:num_prompt], out[num_prompt:]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_answers_are_those_of_transformers_whatever_the_company(
    vision_folder: Callable[[str], Path], vision_model: Callable[[str], LoadedModel], architecture: str
) -> None:
    loaded = vision_model(architecture)
    assert loaded.is_native == ("helium" not in architecture)
    bodies = [{"messages": chat, "logprobs": True} for chat in CHATS]
    # 40 tokens an iteration: images are cut, and stand beside others' decodes.
    (company,), _ = ask(loaded, bodies, policy_options={"max_batch_tokens": 40})
    (alone,), _ = ask(loaded, bodies, max_batch_size=1, policy="paged")
    for chat, ours, by_itself in zip(CHATS[:-1], company, alone, strict=False):
        prompt, expected = theirs(vision_folder(architecture), architecture, chat)
        assert ours.num_prompt_tokens == len(prompt)
        assert list(ours.token_ids) == expected
        assert by_itself.choices[0].token_ids == ours.token_ids
        if loaded.is_native:
            assert by_itself.choices[0].logprobs == ours.choices[0].logprobs  # to the bit
        else:
            assert by_itself.choices[0].logprobs == pytest.approx(ours.choices[0].logprobs, abs=1e-4)


def test_prompts_of_one_text_and_other_images_share_nothing_behind_them(
    vision_model: Callable[[str], LoadedModel],
) -> None:
    loaded = vision_model("smolvlm")
    first, second = ({"messages": [user("Look: ", part(picture(64, 64, seed)), "?")]} for seed in (1, 2))
    (one, two, again), _ = ask(loaded, [first], [second], [first])
    (fresh,), _ = ask(loaded, [second])
    assert one[0].token_ids != two[0].token_ids == fresh[0].token_ids
    assert again[0].token_ids == one[0].token_ids
    assert two[0].num_cached_tokens == 0
    assert again[0].num_cached_tokens > one[0].num_prompt_tokens - 32


def test_preempted_requests_bring_their_images_along(vision_model: Callable[[str], LoadedModel]) -> None:
    loaded = vision_model("idefics3")
    bodies = [{"messages": [user(part(picture(64, 64, seed)), "?")], "max_tokens": 60} for seed in range(3)]
    (roomy,), _ = ask(loaded, bodies)
    (tight,), counts = ask(loaded, bodies, num_kv_tokens=640, policy_options={"prefix_caching": False})
    assert [each.token_ids for each in tight] == [each.token_ids for each in roomy]
    assert counts.num_preemptions > 0


def test_an_image_of_low_detail_is_one_tile(vision_model: Callable[[str], LoadedModel]) -> None:
    loaded = vision_model("smolvlm")
    image = picture(90, 50, 1)
    (found,), _ = ask(loaded, [{"messages": [user(part(image, detail=detail))]} for detail in ("high", "low")])
    assert [each.num_prompt_tokens for each in found] == [137, 27]


def test_other_codings_of_the_same_pixels_are_the_same_image(vision_model: Callable[[str], LoadedModel]) -> None:
    loaded = vision_model("smolvlm")
    image = picture(40, 40, 1)
    coded = {"type": "image_url", "image_url": {"url": data_url(image.quantize(64), "GIF")}}
    (one, two), _ = ask(loaded, [{"messages": [user(part(image))]}], [{"messages": [user(coded)]}])
    assert one[0].token_ids == two[0].token_ids
    assert two[0].num_cached_tokens > 0


def test_a_template_without_a_place_for_images_is_named(vision_model: Callable[[str], LoadedModel]) -> None:
    from mlsys_core.errors import InvalidInputError
    from mlsys_orca.text.chat_template import ChatTemplate

    blind = replace(vision_model("smolvlm"), chat_template=ChatTemplate("{{ messages[0]['content'][-1]['text'] }}"))
    with pytest.raises(InvalidInputError, match="chat template shows 0 of 1 images"):
        ask(blind, [{"messages": [user(part(picture(9, 9, 1)), "?")]}])
