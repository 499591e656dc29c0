"""BERT and XLM-RoBERTa: conversion of text model checkpoints to GGUF."""

from dataclasses import replace

from torch import Tensor

from model_zoo.convert import encoders
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import Conversion, Key, Rule
from model_zoo.models.bert.text import DEFAULT_EPS

CONVERSION = Conversion(
    serves=("BertModel", "BertForMaskedLM"),
    architecture="bert",
    keys=(
        *encoders.KEYS,
        Key("attention.layer_norm_epsilon", "layer_norm_eps", of=float),
    ),
    rules=(
        *encoders.EMBEDDINGS,
        Rule("embeddings.position_embeddings.weight", "position_embd.weight"),
        Rule("embeddings.LayerNorm.*", "token_embd_norm.*"),
        Rule("encoder.layer.{n}.attention.self.query.*", "blk.{n}.attn_q.*"),
        Rule("encoder.layer.{n}.attention.self.key.*", "blk.{n}.attn_k.*"),
        Rule("encoder.layer.{n}.attention.self.value.*", "blk.{n}.attn_v.*"),
        Rule("encoder.layer.{n}.attention.output.dense.*", "blk.{n}.attn_output.*"),
        Rule("encoder.layer.{n}.attention.output.LayerNorm.*", "blk.{n}.attn_output_norm.*"),
        Rule("encoder.layer.{n}.intermediate.dense.*", "blk.{n}.ffn_up.*"),
        Rule("encoder.layer.{n}.output.dense.*", "blk.{n}.ffn_down.*"),
        Rule("encoder.layer.{n}.output.LayerNorm.*", "blk.{n}.layer_output_norm.*"),
    ),
    roots=("bert.",),
    drop=encoders.UNUSED,
    defaults={"layer_norm_eps": DEFAULT_EPS},
)

# The pooler and the classifier, with the names of RoBERTa's head.
RANKING = replace(
    CONVERSION,
    serves=("BertForSequenceClassification",),
    rules=(
        *CONVERSION.rules,
        Rule("pooler.dense.*", "cls.*"),
        Rule("classifier.*", "cls.output.*"),
    ),
    drop=encoders.RANKING_UNUSED,
    check=encoders.check_one_score,
)


def _first_position(config: Configuration) -> int:
    """The number from which RoBERTa counts positions; GGUF files count from 0."""
    return int(config.require("pad_token_id")) + 1


def _positions(config: Configuration, table: Tensor) -> Tensor:
    return table[_first_position(config) :]


_PLACES = "embeddings.position_embeddings.weight"
XLM_ROBERTA = replace(
    CONVERSION,
    serves=("XLMRobertaModel", "XLMRobertaForMaskedLM"),
    keys=(
        *(key for key in CONVERSION.keys if key.name != "context_length"),
        Key(
            "context_length",
            lambda c: c.require_size("max_position_embeddings") - _first_position(c),
        ),
    ),
    rules=(
        *(rule for rule in CONVERSION.rules if rule.source != _PLACES),
        Rule(_PLACES, "position_embd.weight", _positions),
    ),
    roots=("roberta.",),
    defaults={"layer_norm_eps": DEFAULT_EPS, "pad_token_id": 1},
)
XLM_ROBERTA_RANKING = replace(
    XLM_ROBERTA,
    serves=("XLMRobertaForSequenceClassification",),
    rules=(
        *XLM_ROBERTA.rules,
        Rule("classifier.dense.*", "cls.*"),
        Rule("classifier.out_proj.*", "cls.output.*"),
    ),
    check=encoders.check_one_score,
)
