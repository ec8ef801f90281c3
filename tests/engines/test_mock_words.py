"""Which tokens a mocker's answer may have."""

import pytest

from serving.engines.mock.answers.words import without


class Words(list):
    """Words that count how many of them are looked at."""

    num_read = 0

    def __getitem__(self, place):
        self.num_read += 1
        return super().__getitem__(place)


def test_the_last_token_of_a_banned_sequence_becomes_the_next_word_that_is_allowed():
    words = [10, 20, 30, 40]
    assert without([10, 20, 10], [(20,)], words) == [10, 30, 10]
    assert without([10, 20, 20], [(10, 20)], words) == [10, 30, 20]
    assert without([40], [(40,), (10,)], words) == [20]
    assert without([20], [(20,), (30,), (40,)], words) == [10]


def test_what_comes_instead_completes_no_banned_sequence_either():
    assert without([10, 20], [(10, 20), (10, 30)], [10, 20, 30, 40]) == [10, 40]


def test_a_banned_token_that_is_no_word_becomes_the_word_after_it():
    assert without([25, 50], [(25,), (50,)], [10, 20, 30, 40]) == [30, 10]


def test_words_that_are_all_banned_are_refused():
    with pytest.raises(ValueError, match="bad_words leave no token"):
        without([10], [(10,), (20,)], [10, 20])


def test_of_a_large_vocabulary_few_words_are_read():
    words = Words(range(1 << 17))
    assert len(without(list(range(500)), [(number, number + 1) for number in range(400)], words)) == 500
    assert words.num_read < 500 * 20
