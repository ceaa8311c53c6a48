"""Prompt cleaning against diffusers' own, and the limits."""

import pytest
from diffusers.pipelines.wan import pipeline_wan

from wanfit.errors import InputError
from wanfit.pipeline.text import clean_prompt, load_tokenizer, prompt_ids


@pytest.fixture(scope="module")
def tokenizer(layouts):
    return load_tokenizer(layouts["diffusers"].parent)


@pytest.mark.parametrize(
    "text",
    [
        "  a   cat\n\n on\tthe grass ",
        "a cat &amp;amp; a dog &lt;3",
        "schÃ¶n, donâ€™t",
        "ＦＵＬＬ ﬁsh “quoted”",
        "猫　和 狗\u2028",
        "bell\x07 and \x1f unit",
        "",
    ],
)
def test_cleaning_is_that_of_diffusers(text):
    assert pipeline_wan.is_ftfy_available()
    assert clean_prompt(text) == pipeline_wan.prompt_clean(text)


def test_ids_of_a_cleaned_prompt(tokenizer):
    assert prompt_ids(tokenizer, "  a  cat\n runs ") == tokenizer.encode("a cat runs")


@pytest.mark.parametrize("text", ["", "  \n\t "])
def test_only_the_negative_prompt_may_be_empty(tokenizer, text):
    assert prompt_ids(tokenizer, text, name="negative_prompt") == [1]
    with pytest.raises(InputError, match="prompt is empty") as caught:
        prompt_ids(tokenizer, text)
    assert caught.value.code == "prompt_invalid"
    assert "<prompt>" in caught.value.what


@pytest.mark.parametrize(("unit", "joiner"), [("cat", " "), ("猫", "")])
def test_too_long_prompt_says_by_how_much(tokenizer, unit, joiner):
    """The advice must work: cutting what it says makes the prompt fit, one character less does not."""
    text = joiner.join([unit] * 700)
    count = len(tokenizer.encode(text))
    with pytest.raises(InputError) as caught:
        prompt_ids(tokenizer, text)
    error = caught.value
    assert error.code == "prompt_invalid"
    assert f"{count} tokens" in error.what
    assert "512" in error.what
    words, characters = (int(part) for part in error.change.replace("(", "").split() if part.isdigit())
    kept = text[: len(text) - characters]
    assert len(prompt_ids(tokenizer, kept)) <= 512
    assert len(tokenizer.encode(text[: len(kept) + 1])) > 512
    assert words == len(text[len(kept) :].split())


def test_a_prompt_of_exactly_the_limit_fits(tokenizer):
    ids = prompt_ids(tokenizer, "猫" * 200, name="prompt")
    assert prompt_ids(tokenizer, "猫" * 200, max_length=len(ids)) == ids
    with pytest.raises(InputError, match=f"takes {len(ids) - 1}"):
        prompt_ids(tokenizer, "猫" * 200, max_length=len(ids) - 1)
