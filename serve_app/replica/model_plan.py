"""A model and the options with which it is served."""

from dataclasses import dataclass

import torch

from model_zoo.chat_model import ChatModel
from runtime.engine.engine_options import EngineOptions
from serve_app.replica.model_files import ModelFiles


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """A model, with or without its weights, and how it is served on `device`."""

    model: ChatModel
    files: ModelFiles
    options: EngineOptions
    device: torch.device
