"""Texts that are likely to reveal a difference between two tokenizers."""

from collections.abc import Iterator, Mapping
from typing import Any

MAX_ADDED = 24
"""Added tokens that get texts of their own."""

TEXTS = (
    "",
    " ",
    "\n",
    "a",
    "Hello, world!",
    " leading and trailing ",
    "  two   three    four     spaces",
    "tabs\tand\t\tmore\t \t mixed",
    "line\nline\r\nline\rline\n\n\n  indented\n \n",
    "The quick brown fox jumps over the lazy dog; it's 7 o'clock, isn't it? WE'LL SEE, they'Ve said.",
    "0 12 345 6789 12345678901234567890 3.14159 1,000,000 1e-10 0xDEADBEEF v1.2.3-rc4",
    "def f(x: int) -> str:\n    return f'{x!r:>10}'  # comment\n\n\nclass A(B):\n\tpass\n",
    '{"key": [1, 2.5, null, true], "nested": {"a\\n": "\\u00e9"}}',
    "<html><body class='x'>&nbsp;</body></html>",
    "https://example.org/path?query=1&other=%20#fragment user@example.org",
    "snake_case camelCase PascalCase SCREAMING_CASE kebab-case __dunder__ a_b_c",
    "!!! ??? ... --- === *** ~~~ ``` ((( ))) [[[ ]]] {{{ }}} <<< >>> ||| \\\\\\ ///",
    "naïve café résumé Übergröße Ærøskøbing Łódź İstanbul ſtraße ŒUVRE",
    "e\u0301 cafe\u0301 A\u030a \u1100\u1161\u11a8 \u212b \ufb01 \u2460 x\u0323\u0307",
    "Ελληνικά Русский язык Українська עברית العربية فارسی हिन्दी বাংলা தமிழ் ไทย ქართული",
    "日本語のテキスト、漢字とかなカナ。中文字符測試，简体与繁體。한국어 텍스트 입니다.",
    "🙂👍🏽👩‍👩‍👧‍👦🏳️‍🌈🇪🇺 ❤️ ☃ © ™ ½ ² ₂ ① Ⅷ",
    "\u00a0nbsp\u2003em\u3000ideographic\u200bzero\u200djoin\ufeffbom\u2028line\u2029para\u0085next",
    "\x00\x01\x1b[31m\x7f\x80",
    "\U0001d54f\U00010348\U0002070e\ue000\ufffd\uffff",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    " " * 100 + "x" + "\n" * 50 + "y" + "\t" * 20,
    "ab" * 200,
    "1" * 101,
    "é" * 70 + "日" * 70 + "🙂" * 30,
    "<s></s><pad><unk><mask>[CLS][SEP][MASK][PAD][UNK]",
    "<|endoftext|> <|im_start|>user\nhi<|im_end|>\n<|begin_of_text|><|eot_id|><|start_header_id|>",
    "<bos><eos><start_of_turn><end_of_turn>[INST] hi [/INST]<<SYS>><</SYS>>",
    "a<|im_end|>b <|im_end|> c\n<|im_end|>\n",
    "don't DON'T Don't 'tis 'll'll 's'S ’s ‘quoted’ “double” «guillemets»",
    "word" + "\u0301" * 20 + " z̀́̂̃̄",
    "AbC123dEf456 7h8i9j 10th 2nd 3RD x2 2x H2O",
    "end with newline\n",
    "end with spaces   ",
    "\n\nstarts with newlines",
    # Regular-expression libraries disagree on spaces, digits, letters and folding case.
    " \u180e` a\u180eb \u180e\u13a0",
    "\u1680\u202f\u205f\u2060\x0b\x0c\x1c\x1d\x1e\x1f a\x0bb",
    "1 12 123 1234 12345 \u0663\u0664 \u00b2\u00bd\u2460\u2167 \u0663\u2460 \u2460",
    " ß ẞ \u017f \u212a \u0130\u0131 STRASSE 'S 'LL '\u017f",
    "\u1e9b\u0323 q\u0307\u0323 \u0958 e\u0323\u0302 \u0301 x\u0301y \u103b\u1019\u1039",
    "\uac00\u1112\u1161\u11ab \u3131 \uac01\u11a8 \u1780\u17d2\u1798",
    "\u01c5 \u02b0 \u02bc \u00aa \ua66e \U0001d518\U0001d7d8 \U0010ffff\U000e0001\ufdd0",
    "f f: [ ) { aλx 5at 1AR 9do x-y_z",
    "\u2581a \u2581 \u2581\u2581x \u0120x \u010a",
)


def samples(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield texts for comparing two tokenizers of a tokenizer.json, some with its own added tokens in them."""
    yield from TEXTS
    added: list[dict[str, Any]] = facts.get("added_tokens") or []
    odd = [
        token for token in added if any(token.get(flag) for flag in ("lstrip", "rstrip", "single_word", "normalized"))
    ]
    for token in [*added[:6], *added[-6:], *odd][:MAX_ADDED]:
        word: str = token["content"]
        yield from (word, word + word, f" {word} ", f"a{word}b", f"{word}\n", f"\n{word} x", word[:-1])
        yield from (f"{word}\n\n{word}", word.upper() + word.lower())
        for space in [other["content"] for other in added if not other["content"].strip()][:4]:
            yield from (word + space, space + word, space + space)
