"""Texts that ways of cutting cut differently: letters of many scripts, signs, digits, spaces, endings by chance."""

from __future__ import annotations

import random

_LETTERS = (
    "abcXYZ019 .,'!?-_/\\\n\r\t()[]{}<>=+*&^%$#@~`|\""
    "éÉñßµªºÀÿœŒΑαΩωДджЯאבגעربيةहिन्दीไทย中文字日本語かなカナ한국어😀🙂🇩🇪½²³Ⅷ٣٤१२…“”‘’–—€£©®×÷∑√≤ﬁ"
)
_PIECES = [
    "'s",
    "'LL",
    "'ve",
    " the",
    "Hello",
    "world",
    "123",
    "4567",
    "\n\n",
    "   ",
    "\r\n",
    "\u0301",
    "\u3000",
    "\u200b",
    "\u200d",
]
WORDS = [
    "Hello, world! It's 2024; they'll WON'T I'd've.",
    "  two  spaces\n\nlines \r\n\t tabs   \n   end  ",
    "12345678901 3.14159 1,000,000 x2y3 ٣٤٥ ²³ Ⅷ",
    "naïve café Ünïcödé ﬁ Ａ 日本語の文章です。中文字符 한국어 ไทย हिन्दी العربية עברית",
    "camelCaseWordsHTTPServer snake_case_words __init__ a/b\\c <tag attr='1'>{}[]()#$%^&*~`",
    "def f(x):\n    return x ** 2  # comment\n\n\n'''s''' \"t\" 's 'S 'll'LL",
]


def texts(count: int) -> list[str]:
    """Return :data:`WORDS` and ``count`` texts of 1 to 30 pieces."""
    chance = random.Random(1)
    pieces = [*_LETTERS, *_PIECES]
    return WORDS + ["".join(chance.choices(pieces, k=chance.randint(1, 30))) for _ in range(count)]
