"""Tokenizer, chat template, incremental detokenisation and stop strings on the real vocabulary."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metainfer_lab.checkpoints import smollm2
from metainfer_lab.errors import InputError
from metainfer_lab.text import Tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.open(smollm2.fetch())


def test_chat_form(tokenizer):
    text = tokenizer.render(
        [{"role": "system", "content": "Be."}, {"role": "user", "content": "Hi"}]
    )
    assert text == (
        "<|im_start|>system\nBe.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer.chat("Hi")
    assert ids[0] == 1 and ids.count(2) == 2
    assert "named SmolLM" in tokenizer.decode(ids)


def test_answers_end_on_im_end(tokenizer):
    assert tokenizer.eos_ids == {2}


def test_digits_are_split_one_by_one(tokenizer):
    assert len(tokenizer.encode("20261130")) == 8
    # the blank before a digit stays with what is before it
    assert tokenizer.decode(tokenizer.encode("x  1")[-1:]) == "1"


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=40))
def test_streamed_text_is_the_whole_text(tokenizer, text):
    stream = tokenizer.stream()
    ids = tokenizer.encode(text)
    pieces = [stream.push(token) for token in ids]
    assert "".join(pieces) + stream.flush() == tokenizer.decode(ids)


def test_a_character_comes_whole(tokenizer):
    stream = tokenizer.stream()
    pieces = [stream.push(token) for token in tokenizer.encode("a 😀 b")]
    assert "�" not in "".join(pieces)
    assert any("😀" in piece for piece in pieces)


@pytest.mark.parametrize("stop", ["brown fox", " fo", "q", "jumps over"])
def test_nothing_from_a_stop_string_on_is_shown(tokenizer, stop):
    text = "the quick brown fox jumps over"
    stream = tokenizer.stream(stop=[stop, "never seen"])
    shown = "".join(stream.push(token) for token in tokenizer.encode(text)) + stream.flush()
    assert shown == text.split(stop)[0]
    assert stream.stopped


def test_half_a_stop_string_is_given_back(tokenizer):
    stream = tokenizer.stream(stop=["fox trot"])
    text = "the brown fox"
    assert "".join(stream.push(t) for t in tokenizer.encode(text)) + stream.flush() == text


def test_missing_tokenizer_is_named(tmp_path):
    with pytest.raises(InputError, match=r"tokenizer\.json is missing"):
        Tokenizer.open(tmp_path)


def test_missing_chat_template_is_named(tokenizer):
    bare = Tokenizer(tokenizer.folder, tokenizer.tokenizer, {})
    with pytest.raises(InputError, match="no chat template"):
        bare.chat("Hi")
