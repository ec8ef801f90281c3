"""What a form is refused with."""


class FormError(ValueError):
    """A form that no text has, or whose texts the mocker cannot make up; the message names the reason."""
