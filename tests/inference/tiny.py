"""A tiny exported model with and without a chat template."""

from pathlib import Path

import torch

from holdfast.inference.model import AnsweringModel
from holdfast.model.files import Folder
from tests.model.tiny_model import decoder, export, shape

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}</>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tiny_export(folder: Path, *, template: bool = True, context: int = 256, **changes: object) -> Path:
    """A model in the Hugging Face layout."""
    folder.mkdir(parents=True)
    export(folder, decoder(shape(context=context, **changes)), chat_template=TEMPLATE if template else None)
    return folder


def tiny_model(folder: Path, **options: object) -> AnsweringModel:
    return AnsweringModel.load(Folder(tiny_export(folder, **options)), torch.device("cpu"))  # type: ignore[arg-type]
