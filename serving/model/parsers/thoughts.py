"""What a model thinks before it answers, between markers."""

from dataclasses import dataclass

from serving.model.parsers.answer import ParsedAnswer, Script, markers


@dataclass(frozen=True, slots=True, kw_only=True)
class Thoughts:
    """A format of reasoning."""

    starts: tuple[str, ...] = ("<think>",)
    """What precedes it, in the prompt or in the answer; models write the first."""
    ends: tuple[str, ...] = ("</think>",)
    """What follows it; models write the first."""
    begins: bool = True
    """Whether an answer begins inside it if the prompt is unknown."""
    ends_with_calls: bool = False
    """Whether the start of a call ends it as well."""
    noise: tuple[str, ...] = ()
    """Texts around the answer that are no part of it."""

    def is_open(self, prompt_end: str | None) -> bool:
        """Return whether the answer to a prompt begins inside the reasoning."""
        return self.begins if prompt_end is None else prompt_end.rstrip().endswith(tuple(map(str.strip, self.starts)))

    def read(self, answer: ParsedAnswer, prompt_end: str | None, triggers: tuple[str, ...]) -> Script[None]:
        """Read reasoning, if the answer starts with any."""
        answer.hold()
        yield from answer.space()
        has_start = yield from answer.expect(*self.starts)
        if has_start:
            answer.forget()
        elif not self.is_open(prompt_end):
            answer.give_up()
            return
        answer.give_up(answer.reasoning)
        stops = [text for text in triggers if len(text) > 1] if self.ends_with_calls else []  # thoughts hold brackets
        found = yield from answer.until(markers(*self.ends, *stops), answer.reasoning)
        if found in self.ends:
            yield from answer.expect(found)
