"""Register encoders with mlsys; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterable

from mlsys_core.plugins.hookspecs import hookimpl
from mlsys_core.plugins.specs import CommandSpec, KernelSpec, ModelLoaderSpec, ServerExtensionSpec


@hookimpl
def mlsys_register_commands() -> Iterable[CommandSpec]:
    """Return the command ``mlsys orca embed``."""
    return [CommandSpec(name="orca embed", help="Turn lines of text into vectors.", app="mlsys_encoders.cli:app")]


@hookimpl
def mlsys_register_server_extensions() -> Iterable[ServerExtensionSpec]:
    """Return the routes for texts beside DVABatch's models, and the encoder beside Orca's language model."""
    return [
        ServerExtensionSpec(
            name="texts",
            help="Embeddings, rerank and text-embeddings-inference's routes for the encoders of a server.",
            systems=("dvabatch",),
            factory="mlsys_encoders.extension:beside_models",
        ),
        ServerExtensionSpec(
            name="encoder",
            help="Embeddings and rerank beside a language model.",
            systems=("orca",),
            factory="mlsys_encoders.extension:beside_language_model",
            options="mlsys_encoders.extension:EncoderOptions",
        ),
    ]


@hookimpl
def mlsys_register_kernels() -> Iterable[KernelSpec]:
    """Return the native kernels."""
    return [
        KernelSpec(
            name="encoders",
            help="Layers of text encoders, all texts of a batch a call.",
            factory="mlsys_encoders.models.native.library:ENCODER",
        )
    ]


@hookimpl
def mlsys_register_model_loaders() -> Iterable[ModelLoaderSpec]:
    """Return the loader of encoders for DVABatch: folders, and shapes with random weights by name."""
    return [
        ModelLoaderSpec(
            name="encoders",
            help="Folders of BERT-like encoders.",
            engine="dvabatch",
            suffixes=("config.json", "bert-base", "bert-large", "minilm-random"),
            factory="mlsys_encoders.loading:load_encoder",
        )
    ]
