from foundation.text import listed, one_line, printable


def test_what_a_terminal_would_obey_is_spelled_out():
    assert printable("a\x1b[31mb\u202ec\nd") == "a\\x1b[31mb\\u202ec\nd"


def test_what_only_sets_words_apart_or_together_stays_as_it_is():
    text = "if:\n\tpass, 10\u202f% \u3000\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645 \U0001f469\u200d\U0001f4bb"
    assert printable(text) == text


def test_text_that_no_file_can_hold_is_spelled_out():
    assert printable("a\ud800") == "a\\ud800"


def test_a_line_is_the_beginning_of_a_text_bytes_or_an_error():
    assert one_line("a\n  b\tc") == "a b c"
    assert one_line(b"\xffx" * 1000, 4) == "\ufffdx\ufffdx..."
    assert one_line(ValueError("bad\nvalue")) == "bad value"
    assert one_line(TimeoutError()) == "TimeoutError"


def test_words_are_joined_by_commas_and_the_last_by_and():
    assert [listed(["a", "b", "c"][:count]) for count in range(4)] == ["", "a", "a and b", "a, b and c"]
