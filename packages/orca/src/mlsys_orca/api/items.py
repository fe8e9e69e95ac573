"""Requests that do not come over HTTP: an endpoint's fields as a mapping."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlsys_core.errors import InvalidInputError
from mlsys_serving.http.describe import refused_body
from pydantic import ValidationError

from mlsys_orca.api import chat, completions
from mlsys_orca.api.answers import GenerationParameters
from mlsys_orca.api.conversation import AnswerForm
from mlsys_orca.api.service import ModelService


def parameters_of(fields: Mapping[str, Any], service: ModelService) -> tuple[GenerationParameters, AnswerForm]:
    """Return what ``fields`` ask to generate: a chat's if there are "messages", else a completion's.

    Args:
        fields: Fields of the endpoint; "model" is the service's if it is left out.
        service: Its model tokenises.

    Raises:
        InvalidInputError: a field is refused.
    """
    whole = {"model": service.name, **fields}
    try:
        if "messages" in whole:
            return chat.parameters_of(chat.ChatCompletionRequest(**whole), service)
        return completions.parameters_of(completions.CompletionRequest(**whole), service), AnswerForm()
    except ValidationError as error:
        raise InvalidInputError(refused_body(error, whole).message) from error
