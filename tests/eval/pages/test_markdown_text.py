"""Texts of unknown origin in Markdown."""

from __future__ import annotations

import pytest

from eval.pages.markdown_text import cell, code, line, plain


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a\nb\r\nc\u2028d", "a b c d"),
        ("12\u00a0%", "12\u00a0%"),
        ("\x1b]0;t\x07", "\\x1b]0;t\\x07"),
        ("\u202eab\u2066", "\\u202eab\\u2066"),  # text turned round
        ("é 日 😀", "é 日 😀"),
        ("\ud800", "\\ud800"),
    ],
)
def test_a_line_shows_all_that_is_in_it(text: str, wanted: str) -> None:
    assert line(text) == wanted


def test_no_html_link_image_or_column() -> None:
    assert plain("<b>a</b> 1 < 2 <!-- x") == "&lt;b>a&lt;/b> 1 < 2 &lt;!-- x"
    assert plain("![i](http://a/x) [x](javascript:y)") == "![i]\\(http://a/x) [x]\\(javascript:y)"
    assert cell("a|b\\|c") == "a\\|b\\\\\\|c"
    assert code("a`b\n``") == "``` a`b `` ```"
