"""T5 and its kin against transformers: small random checkpoints, the same tokens under every policy, in fp32."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
import torch
from mlsys_core.errors import InvalidInputError
from mlsys_orca.api import chat, completions
from mlsys_orca.api.answers import collect
from mlsys_orca.api.chat import ChatCompletionRequest, Message
from mlsys_orca.api.completions import CompletionRequest
from mlsys_orca.api.server import make_service
from mlsys_orca.engine.engine import EngineConfig
from mlsys_orca.loading.load import load_model
from mlsys_orca.loading.loaded import LoadedModel
from mlsys_orca.model.decoder import ForwardInputs
from mlsys_orca.model.encoder_decoder import EncoderDecoder
from mlsys_orca.model.kv_cache import KVCache
from mlsys_orca.scheduling.batch import BatchBuilder, GenerationRequest, SamplingParams
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.conformance.orca.served import serve

VOCAB, NEW, BLOCK, START = 256, 64, 4, 0
LENGTHS = [1, 20, 3, 33, 5, 2, 17, 9, 40, 4, 12, 26, 7, 1, 31, 15]
PROMPTS = [[(7 * i + 3 * j * j + 11) % VOCAB for j in range(length)] for i, length in enumerate(LENGTHS)]
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 64,
    "d_kv": 12,
    "d_ff": 112,
    "num_layers": 3,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 24,
    "decoder_start_token_id": START,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("T5", {}),
    "flan": ("T5", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "num_decoder_layers": 2}),
    "mt5": ("MT5", {}),
    "umt5": ("UMT5", {}),
}
POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "orca": ("orca", {}),
    "paged": ("paged", {}),
    "chunked": ("chunked", {"max_batch_tokens": 45}),
    "request-level": ("request-level", {}),
}


def write_checkpoint(path: Path, name: str, **more: Any) -> Any:
    """A directory as transformers saves one; those with a head of their own have it in the file, as Flan-T5 does."""
    import transformers

    family, changes = CASES[name]
    torch.manual_seed(11)
    config = getattr(transformers, f"{family}Config")(**(SHAPE | changes | more))
    model = transformers.AutoModelForSeq2SeqLM.from_config(config).eval()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim == 1:  # norms are ones otherwise
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
            elif parameter_name == "shared.weight":
                parameter.mul_(0.6)
            else:  # with T5's own small numbers the tied head says the last token again and again
                parameter.copy_(torch.randn_like(parameter)).mul_(_deviation(parameter_name))
    model.save_pretrained(path)
    if name == "flan":
        tensors = load_file(path / "model.safetensors")
        head = torch.randn(VOCAB, SHAPE["d_model"]) * 0.2
        save_file(tensors | {"lm_head.weight": head}, path / "model.safetensors", metadata={"format": "pt"})
        model = transformers.AutoModelForSeq2SeqLM.from_pretrained(path).eval()  # type: ignore[no-untyped-call]
        assert torch.equal(model.lm_head.weight, head)
    vocab = {f"t{token_id}": token_id for token_id in range(VOCAB)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, "t0")).save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({}))
    return model


def _deviation(name: str) -> float:
    if "relative" in name:
        return 1.0
    return 0.1 if name.endswith((".q.weight", ".k.weight")) else 0.3


@pytest.fixture(scope="module")
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, Any]:
    path = tmp_path_factory.mktemp(request.param)
    reference = write_checkpoint(path, request.param)
    return load_model(path, dtype="fp32"), reference


def expected_answers(reference: Any) -> list[list[int]]:
    """Greedy, by ``transformers.generate``, all prompts in one padded batch; it does not stop at an end token."""
    longest = max(LENGTHS)
    ids = torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in PROMPTS])
    mask = torch.tensor([[1] * length + [0] * (longest - length) for length in LENGTHS])
    with torch.inference_mode():
        out = reference.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, num_beams=1, eos_token_id=None
        )
    return out[:, 1:].tolist()


def log_probabilities(reference: Any, prompt: list[int], answer: list[int]) -> Tensor:
    """Return the log-probability of each token of ``answer``."""
    with torch.inference_mode():
        inputs = torch.tensor([[START, *answer[:-1]]])
        logits = reference(input_ids=torch.tensor([prompt]), decoder_input_ids=inputs).logits[0]
    assert logits.std() > 0.5  # distinct enough for greedy choices to mean something
    return logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]


@pytest.mark.parametrize(
    ("checkpoint", "policy"),
    [("flan", policy) for policy in POLICIES]
    + [("t5", "paged"), ("t5", "request-level"), ("mt5", "orca"), ("umt5", "orca")],
    indirect=["checkpoint"],
)
def test_answers_are_those_of_transformers(checkpoint: tuple[LoadedModel, Any], policy: str) -> None:
    """Under the policies that preempt, 45 blocks do not hold two of the longest requests."""
    loaded, reference = checkpoint
    assert isinstance(loaded.model, EncoderDecoder)
    expected = expected_answers(reference)
    assert len({tuple(answer) for answer in expected}) > 12, "prompts matter"
    assert max(len(set(answer)) for answer in expected) > 8, "and what was said before"
    preempts = policy in ("paged", "chunked")
    name, options = POLICIES[policy]
    run = serve(
        loaded.model,
        name,
        [[*prompt, START] for prompt in PROMPTS],
        num_tokens=NEW,
        num_blocks=45 if preempts else 120,
        block_size=BLOCK,
        max_batch_size=7,
        every_s=2.5,
        max_in_flight=2,
        request=lambda number: {
            "sampling": SamplingParams(num_logprobs=0),
            "num_encoder_tokens": len(PROMPTS[number]),
        },
        **options,
    )
    assert run.token_ids == expected
    assert (run.pool.num_preemptions > 5) == preempts
    assert run.pool.num_cached_tokens == 0
    for prompt, answer, found in zip(PROMPTS, expected, run.answers, strict=True):
        ours = torch.tensor([token.logprob for token in found])
        assert torch.allclose(ours, log_probabilities(reference, prompt, answer), atol=1e-4, rtol=0)


def all_log_probabilities(loaded: LoadedModel, prompt: list[int], answer: list[int]) -> Tensor:
    """Return our log-probabilities, all rows in one iteration; see :func:`log_probabilities`."""
    builder = BatchBuilder()
    builder.add(
        "a",
        [*prompt, START, *answer[:-1]],
        num_computed_tokens=0,
        block_table=tuple(range(8)),
        sampling=SamplingParams(),
        num_encoder_tokens=len(prompt),
    )
    batch = builder.build()
    cache = KVCache(loaded.config, num_blocks=8, dtype=loaded.model.dtype)
    rows = range(len(prompt), batch.num_tokens)
    with torch.inference_mode():
        logits = loaded.model(ForwardInputs(batch, block_size=cache.block_size, device="cpu", wanted=rows), cache)
    return logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]


def convert_to_gguf(model: Any, path: Path) -> Path:
    """Write a T5 as llama.cpp's converter does, with a small Unigram vocabulary."""
    config = model.config
    writer = gguf.GGUFWriter(path, "t5")
    writer.add_context_length(64)
    writer.add_embedding_length(config.d_model)
    writer.add_feed_forward_length(config.d_ff)
    writer.add_block_count(config.num_layers)
    writer.add_decoder_block_count(config.num_decoder_layers)
    writer.add_head_count(config.num_heads)
    writer.add_key_length(config.d_kv)
    writer.add_value_length(config.d_kv)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    writer.add_relative_attn_buckets_count(config.relative_attention_num_buckets)
    writer.add_decoder_start_token_id(config.decoder_start_token_id)
    writer.add_tokenizer_model("t5")
    writer.add_token_list(["<pad>", "</s>", "<unk>", *(f"▁w{number}" for number in range(3, VOCAB))])
    writer.add_token_scores([0.0, 0.0, 0.0, *(-1.0 - number / VOCAB for number in range(3, VOCAB))])
    writer.add_token_types([3, 3, 2] + [1] * (VOCAB - 3))
    writer.add_eos_token_id(1)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.T5, config.num_layers)
    for name, values in model.state_dict().items():
        if name != "shared.weight" and torch.equal(values, model.shared.weight):
            continue  # the same table again
        writer.add_tensor(str(names.get_name(name, (".weight",))), values.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", ["t5", "flan", "umt5"])
def test_a_converted_gguf_computes_as_the_original(tmp_path: Path, name: str) -> None:
    reference = write_checkpoint(tmp_path, name, relative_attention_max_distance=128)  # GGUF takes that for granted
    loaded = load_model(convert_to_gguf(reference, tmp_path / "model.gguf"), dtype="fp32")
    assert loaded.tokenizer.encode("w7 w9", add_bos=True) == [7, 9, 1]
    for prompt, answer in ((PROMPTS[3], PROMPTS[8]), (PROMPTS[0], PROMPTS[1])):
        ours = all_log_probabilities(loaded, prompt, answer)
        assert torch.allclose(ours, log_probabilities(reference, prompt, answer), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("options", "least"),
    [({"dtype": "bf16"}, 0.98), ({"weights": "int8"}, 0.98), ({"weights": "int4"}, 0.9)],
    ids=["bf16", "int8", "int4"],
)
def test_less_exact_weights_answer_nearly_as_fp32_does(tmp_path: Path, options: dict[str, Any], least: float) -> None:
    write_checkpoint(tmp_path, "flan")
    pairs = [(prompt, PROMPTS[8]) for prompt in PROMPTS[:6]]
    models = [load_model(tmp_path, **({"dtype": "fp32"} | changes)) for changes in ({}, options)]
    exact, rounded = (torch.cat([all_log_probabilities(model, *pair) for pair in pairs]) for model in models)
    assert not torch.equal(exact, rounded)
    assert torch.corrcoef(torch.stack((exact, rounded)))[0, 1] > least


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A checkpoint with T5's kind of tokenizer, which ends what the encoder reads; its answers end by themselves."""
    path = tmp_path_factory.mktemp("text")
    model = write_checkpoint(path, "flan")
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    pieces += [(space + letter, -3.0 - len(space)) for letter in letters for space in ("", "▁")]
    pieces += [(f"▁{one}{other}", -5.0) for one in letters for other in letters]
    backend = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces[:VOCAB], 2, False))
    backend.add_special_tokens(["<pad>", "</s>", "<unk>"])
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    backend.decoder = tokenizers.decoders.Metaspace()
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "pad_token": "<pad>"}))
    return path, model


def test_a_completion_is_what_the_encoder_made_of_the_prompt(directory: tuple[Path, Any]) -> None:
    import transformers

    path, model = directory
    reference = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path / "tokenizer.json"))
    service = make_service(load_model(path, dtype="fp32"), "t5", EngineConfig(max_batch_size=3, max_model_len=128))
    texts = ["translate the text", "b", "summarize a long and a short one"]

    async def complete(text: str, **options: Any) -> tuple[str, str, int]:
        body = CompletionRequest(model="t5", prompt=text, temperature=0, **options)
        generation = await service.start(completions.parameters_of(body, service))
        (answer,) = await collect(generation)
        return answer.text, answer.finish_reason, generation.choices[0].request.num_encoder_tokens

    async def complete_all() -> list[tuple[str, str, int]]:
        return await asyncio.gather(*(complete(text, max_tokens=20) for text in texts))

    with service.engine:
        found = asyncio.run(complete_all())
        body = ChatCompletionRequest(model="t5", messages=[Message(role="user", content="Hello")])
        with pytest.raises(InvalidInputError, match="no chat template: use /v1/completions"):
            chat.parameters_of(body, service)
    for text, (answer, finish_reason, num_encoder_tokens) in zip(texts, found, strict=True):
        ids = reference(text)["input_ids"]
        assert ids[-1] == 1, "the encoder's mark of an end"
        assert num_encoder_tokens == len(ids)
        with torch.inference_mode():
            out = model.generate(input_ids=torch.tensor([ids]), max_new_tokens=20, do_sample=False)[0].tolist()
        assert answer == reference.decode(out, skip_special_tokens=True)
        assert answer
        assert finish_reason == ("stop" if out[-1] == 1 else "length")


def test_an_engine_refuses_requests_for_another_kind_of_model(directory: tuple[Path, Any]) -> None:
    service = make_service(load_model(directory[0], dtype="fp32"), "t5", EngineConfig(max_model_len=128))
    assert service.loaded.weights_nbytes > (directory[0] / "model.safetensors").stat().st_size // 2

    async def generate() -> None:
        async for _ in service.engine.generate(
            GenerationRequest(request_id="a", prompt_token_ids=(5, 6), max_new_tokens=2)
        ):
            pass

    with service.engine, pytest.raises(InvalidInputError, match="has an encoder that needs some"):
        asyncio.run(generate())


@pytest.mark.parametrize("key", ["decoder_start_token_id", "forced_bos_token_id"])
def test_a_decoders_start_token_is_read_from_either_file(tmp_path: Path, key: str) -> None:
    reference = write_checkpoint(tmp_path, "t5")
    raw = json.loads((tmp_path / "generation_config.json").read_text())
    (tmp_path / "generation_config.json").write_text(json.dumps(raw | {key: 7}))
    encoder = load_model(tmp_path, dtype="fp32").config.encoder
    assert encoder is not None
    assert encoder.start_token_ids == ((7,) if key == "decoder_start_token_id" else (START, 7))
    setattr(reference.generation_config, key, 7)
    with torch.inference_mode():
        out = reference.generate(input_ids=torch.tensor([PROMPTS[3]]), max_new_tokens=3, do_sample=False)
    assert tuple(out[0, : len(encoder.start_token_ids)].tolist()) == encoder.start_token_ids


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"forced_eos_token_id": 1}, "forced_eos_token_id"),
        ({"feed_forward_proj": "gated-tanh"}, "activation 'tanh'"),
        ({"relative_attention_num_buckets": 7}, "7 buckets"),
        ({"is_encoder_decoder": False}, "an encoder without its decoder"),
        ({"model_type": "longt5"}, "'longt5'"),
    ],
    ids=["forced-eos", "activation", "buckets", "encoder-only", "longt5"],
)
def test_unimplemented_options_are_refused_by_name(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    write_checkpoint(tmp_path, "t5")
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | changes))
    with pytest.raises(InvalidInputError, match=said):
        load_model(tmp_path, dtype="fp32")
