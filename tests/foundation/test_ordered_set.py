from foundation.ordered_set import OrderedSet


def test_elements_are_iterated_in_the_order_in_which_they_came_whatever_their_hashes():
    elements = [object() for _ in range(1000)]
    found = OrderedSet()
    for element in elements:
        found.add(element)
    found.add(elements[0])
    assert list(found) == elements


def test_an_element_is_removed_once_and_comes_back_as_the_last():
    found = OrderedSet()
    for element in "abc":
        found.add(element)
    found.discard("a")
    found.discard("a")
    found.add("a")
    assert list(found) == ["b", "c", "a"]
    assert len(found) == 3
    assert "b" in found
