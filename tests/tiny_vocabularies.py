"""Tokenizers of tiny embedding models and rerankers, as `transformers` saves them in folders."""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import BertTokenizer, PreTrainedTokenizerFast, XLMRobertaTokenizer

from tests.tiny_models import CONTROL_TOKENS, END, END_OF_TEXT, tiny_tokenizer

PIECES = (
    "[PAD] [UNK] [CLS] [SEP] [MASK] the quick brown fox jump over lazy dog cafe hello world "
    "##s ##ed ##ing ##ly ##er un ##believ ##able a b c . , ! ? - 日 本 7 ##7"
).split()
TEXTS = (
    "the quick brown fox jumps over the lazy dog",
    "The QUICK Brown-Fox jumped!?",
    "  unbelievable\tlazy \n dogs  ",
    "Café CAFÉ cafe\u0301",
    "日本 hello, World 77",
    "zebra [MASK] quick [SEP] fox",
    "x" * 101 + " hello",
    ".",
)
PLAIN_TEXTS = tuple(text for text in TEXTS if "[" not in text)
QUERY = "which quick fox jumps?"
LONG = "the quick brown fox jumps over the lazy dog. " * 40


def save_word_pieces(folder: Path) -> None:
    (folder / "vocab.txt").write_text("\n".join(PIECES) + "\n")
    BertTokenizer(vocab=str(folder / "vocab.txt"), do_lower_case=True).save_pretrained(folder)


def save_byte_pieces(folder: Path) -> None:
    """As in Qwen 3's embedding models, a text ends in another token than a chat turn."""
    tokenizer = tiny_tokenizer()
    own = tokenizer.from_str(tokenizer.to_str())
    ends = [(END_OF_TEXT, own.token_to_id(END_OF_TEXT))]
    own.post_processor = TemplateProcessing(single=f"$A {END_OF_TEXT}", special_tokens=ends)
    saved = PreTrainedTokenizerFast(tokenizer_object=own, eos_token=END, pad_token=END_OF_TEXT)
    saved.save_pretrained(folder)


def save_framed_bytes(folder: Path) -> None:
    """As of ModernBERT: byte-level pieces between [CLS] and [SEP]."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.NFC()
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=310, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator(list(TEXTS), trainer)
    names = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]"}
    mask = AddedToken("[MASK]", lstrip=True, special=True)
    trained.add_special_tokens([*names.values(), mask])
    frame = [(text, trained.token_to_id(text)) for text in ("[CLS]", "[SEP]")]
    trained.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=frame
    )
    roles = {f"{name}_token": text for name, text in names.items()}
    saved = PreTrainedTokenizerFast(tokenizer_object=trained, mask_token=mask, **roles)
    saved.save_pretrained(folder)


def save_unigram(folder: Path) -> None:
    """Pieces learned from the texts, as XLM-RoBERTa's tokenizer has them."""
    trained = Tokenizer(models.Unigram())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=90, show_progress=False, unk_token="<unk>")
    trained.train_from_iterator([*PLAIN_TEXTS, QUERY, LONG], trainer)
    head = [(text, 0.0) for text in ("<s>", "<pad>", "</s>", "<unk>")]
    learned = [(text, -5.0 - id) for id, text in enumerate(sorted(trained.get_vocab()))]
    rows = [*head, *(row for row in learned if row[0] != "<unk>"), ("<mask>", 0.0)]
    XLMRobertaTokenizer(vocab=rows).save_pretrained(folder)


def save_answers(folder: Path) -> None:
    """Byte-level pieces with tokens for both answers, as in Qwen 3's vocabulary."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = tiny_tokenizer().pre_tokenizer
    trained.decoder = tiny_tokenizer().decoder
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator(["yes", "no", "fox jumps"] * 9, trainer)
    trained.add_special_tokens(list(CONTROL_TOKENS))
    saved = PreTrainedTokenizerFast(tokenizer_object=trained, eos_token=END, pad_token=END_OF_TEXT)
    saved.save_pretrained(folder)
