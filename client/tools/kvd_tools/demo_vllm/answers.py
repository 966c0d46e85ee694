"""Whether two engines, or one engine twice, said the same."""

from kvd_tools.demo_vllm.wire import Answer


def comparable(a: Answer, b: Answer) -> str:
    """Where two answers differ first, in one sentence; "" if every number is the same."""
    for name, answer in (("first", a), ("second", b)):
        if answer.error:
            return f"the {name} answer is incomplete: {answer.error}"
    if len(a.tokens) != len(b.tokens):
        return f"one answer has {len(a.tokens)} tokens, the other {len(b.tokens)}"
    if len(a.logprobs) != len(b.logprobs):
        return f"one answer has {len(a.logprobs)} log-probabilities, the other {len(b.logprobs)}"
    for at, (one, other) in enumerate(zip(a.tokens, b.tokens, strict=True)):
        if one != other:
            return f"token {at} is {one} in one answer and {other} in the other"
        if at < len(a.logprobs) and a.logprobs[at] != b.logprobs[at]:
            return (
                f"log-probabilities of token {at} are {a.logprobs[at]} in one answer"
                f" and {b.logprobs[at]} in the other"
            )
    return ""
