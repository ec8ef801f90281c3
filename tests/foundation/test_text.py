from foundation.text import one_line, printable


def test_what_a_terminal_would_obey_is_spelled_out():
    assert printable("a\x1b[31mb\u202ec\nd") == "a\\x1b[31mb\\u202ec\nd"


def test_a_line_is_the_beginning_of_a_text_bytes_or_an_error():
    assert one_line("a\n  b\tc") == "a b c"
    assert one_line(b"\xffx" * 1000, 4) == "\ufffdx\ufffdx..."
    assert one_line(ValueError("bad\nvalue")) == "bad value"
    assert one_line(TimeoutError()) == "TimeoutError"
