"""The model of a stand-in, as its frontend sees it."""

import asyncio
from functools import partial
from pathlib import Path

from serving.frontend.preparing.preparer import Preparer
from serving.frontend.reading import ReadingElsewhere
from serving.frontend.served_model import ServedModel
from serving.frontend.text_model import TextModel
from serving.model.card import ModelCard, ModelType
from serving.model.context import BYTES_CONTEXT
from serving.model.errors import ModelError
from serving.model.files import ModelFiles
from serving.runtime.world import world
from serving.stand_in.config import StandInConfig
from serving.stand_in.local import HERE, LocalCourse, LocalWorkers
from serving.worker.engine import EngineTraits

PREPARE_TIMEOUT_S = 10.0
"""How long a model's chat template and tokenizer may take for one request."""


class OneModel:
    """The only model, under each of its names, and with each of its adapters (see `KnownModels`)."""

    def __init__(self, names: tuple[str, ...], model: ServedModel) -> None:
        self.names = names
        self.model = model
        self.adapters: dict[str, ServedModel] = {}
        """The model with each of its adapters, by the adapter's name."""
        self.parents: dict[str, str] = {}
        """The name of the model that each adapter belongs to."""

    def get(self, name: str) -> ServedModel | None:
        """See `KnownModels`."""
        return self.model if name in self.names else self.adapters.get(name)

    def all(self) -> list[ServedModel]:
        """See `KnownModels`."""
        return [self.model]

    def adapters_of(self, model: ServedModel) -> list[ServedModel]:
        """See `KnownModels`."""
        return list(self.adapters.values())

    def is_expected(self, name: str) -> bool:
        """See `KnownModels`: what is not there now never comes."""
        return False

    def absence(self, name: str) -> str:
        """See `KnownModels`."""
        raise AssertionError("no model is expected")

    def absences(self) -> list[str]:
        """See `KnownModels`."""
        return []


async def served_model(
    config: StandInConfig, traits: EngineTraits, files: ModelFiles, workers: LocalWorkers, reading: ReadingElsewhere
) -> ServedModel:
    """Load the model's tokenizer and chat template; `reading` is how the server reads requests.

    Raises:
        ModelError: one of them cannot be used.
    """
    files = _with_template(files, config.api.chat_template)
    card = card_of(config, traits, files)
    text = await asyncio.to_thread(partial(TextModel, card, files, reading=reading.make()))
    preparer = Preparer(card, files, timeout_s=PREPARE_TIMEOUT_S, reading=reading)
    if files.contents:
        await preparer.start()
    return ServedModel(text, LocalCourse(workers), preparer)


def _with_template(files: ModelFiles, template: str) -> ModelFiles:
    """Return a model's files with another chat template, or with their own: a file's, or the text itself.

    Raises:
        ModelError: it is the name of a file that is not there.
    """
    if not template:
        return files
    path = Path(template).expanduser()
    if not any(sign in template for sign in "{}\n"):
        try:
            template = path.read_text()
        except OSError as error:
            raise ModelError(f"chat template {template!r} cannot be read: {error.strerror}") from error
    return ModelFiles(files.contents | {"chat_template.jinja": template.encode()})


def card_of(config: StandInConfig, traits: EngineTraits, files: ModelFiles) -> ModelCard:
    """Return the card of the model; nobody else reads it."""
    longest = files.context_length if files.contents else BYTES_CONTEXT
    return ModelCard(
        name=config.served_model_names[0],
        model_type=ModelType.Backend,
        namespace="local",
        component="stand_in",
        endpoint="generate",
        instance_id=HERE,
        model_path=config.model,
        context_length=traits.context_length or longest,
        kv_cache_block_size=traits.block_size,
        files=files.digests,
        eos_token_ids=files.eos_token_ids,
        num_ranks=traits.num_ranks,
        guided_decoding=list(traits.guided_decoding),
        continues_constrained=traits.continues_constrained,
        has_embeddings=traits.has_embeddings,
        tool_call_parser=config.api.tool_call_parser,
        reasoning_parser=config.api.reasoning_parser,
        created=int(world().wall_s()),
    )
