"""Tables of what is refused: for each kind of error, rows of what is tried and the message that it has."""


def rows(refused):
    """The rows of all kinds, each with its error in front, as `pytest.mark.parametrize` takes them."""
    return [(error, *row) for error, rows in refused.items() for row in rows]
