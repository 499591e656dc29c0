"""A model, how it is served, and the memory that this takes."""

from dataclasses import dataclass

import torch

from model_zoo.chat_model import ChatModel
from runtime.engine.assembly import plan_engine_memory
from runtime.engine.engine_options import EngineOptions
from runtime.engine.memory_plan import MemoryPlan
from runtime.vision.encoder import PlannedEncoder
from runtime.worker.model import DecoderModel
from serve_app.replica.model_files import ModelFiles


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """A model, with or without its weights, and how it is served on `device`. `draft`: its draft
    model."""

    model: ChatModel
    files: ModelFiles
    options: EngineOptions
    device: torch.device
    draft: DecoderModel | None = None

    def memory(self, options: EngineOptions) -> MemoryPlan:
        """What the model takes with `options`, which may differ from its own; images are encoded in
        the same process. DoesNotFitError: too much."""
        vision, encoder = self.model.vision, None
        if vision is not None:
            weights = vision.weight_bytes
            encoder = PlannedEncoder.of(vision.tower, self.device, weight_bytes=weights)
        return plan_engine_memory(
            self.model.decoder,
            device=self.device,
            options=options,
            encoder=encoder,
            draft=self.draft,
        )
