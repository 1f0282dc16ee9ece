"""What turns requests into prompts and tokens into replies: tokenizer, template, formats, pictures."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from firn.config import Config
from firn.core.ports import Pictures
from firn.core.units import MIB
from firn.core.values import ModelInfo
from firn.models.load import loader
from firn.models.tokenizer.hf_tokenizer import HfTokenizer
from firn.models.vision.processor import VisionProcessor
from firn.text.calls.call_parser import NativeParser
from firn.text.prompt.maker import PromptMaker
from firn.text.prompt.template import Template
from firn.text.prompt.template_losses import losses
from firn.text.reply.formats import ReplyFormat, detect_format

log = logging.getLogger("firn.models")


@dataclass(frozen=True, slots=True)
class TextParts:
    tokenizer: HfTokenizer
    template: Template | None
    reply_format: ReplyFormat
    processor: VisionProcessor | None
    """None: the model is served without pictures."""

    def prompt_maker(self, config: Config, model: ModelInfo) -> PromptMaker:
        return PromptMaker(
            self.tokenizer,
            context_length=model.context_length,
            n_ids=model.n_ids,
            pictures=self._pictures(config, model),
            tool_format=self.reply_format.tool,
            template=self.template,
        )

    def _pictures(self, config: Config, model: ModelInfo) -> Pictures | None:
        if self.processor is None or not model.vision:
            return None
        from firn.media import pictures  # imports decoders that a text model does not need

        options = config.images
        limits = pictures.PictureLimits(
            nbytes=options.max_image_mb * MIB, pixels=int(options.max_image_megapixels * 1e6)
        )
        return pictures.Pictures(self.processor, whole=model.whole_pictures, limits=limits)


def load_text(config: Config, folder: Path, *, with_pictures: bool) -> TextParts:
    """Before the model is loaded, so that a wrong parser is reported early. Raises SetupError."""
    options = config.model
    trust = options.trust_remote_code
    tokenizer = loader.load_tokenizer(folder, trust_remote_code=trust)
    template = None if tokenizer.chat_template is None else Template.read(tokenizer)
    if template is not None:
        for loss in losses(tokenizer, template, kwargs=config.sampling.defaults().template_kwargs):
            log.info("the chat template: %s", loss)
    native = tokenizer.tool_parser
    reply_format = detect_format(
        tokenizer,
        tool_override=options.tool_call_parser,
        reasoning_override=options.reasoning_parser,
        native=NativeParser(*native) if native else None,
        takes_tools=template is None or template.rules.tools,
    )
    processor = None
    if with_pictures and not options.text_only:
        processor = loader.load_processor(folder, tokenizer, trust_remote_code=trust)
    return TextParts(tokenizer, template, reply_format, processor)
