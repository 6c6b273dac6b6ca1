"""What the server says when something is not to be had: a sentence, and what it is made of, so that the page can say it
in its own language."""

from typing import Any

from starlette.exceptions import HTTPException

from headwise.lm.loading.remarks import Remark


class Refusal(HTTPException):
    """An answer that is an error: the status, and what is said of it."""

    def __init__(self, status: int, says: Remark, *, retry_after: int | None = None) -> None:
        headers = None if retry_after is None else {"Retry-After": str(retry_after)}
        super().__init__(status, str(says), headers)
        self.says = says


def misfit(name: str, sentence: str) -> Refusal:
    """400: what was asked for does not fit; only a program of one's own asks so."""
    return Refusal(400, Remark("misfit", "{sentence}", name=name, sentence=sentence))


def error_body(says: Remark) -> dict[str, Any]:
    """The body of an answer that is an error."""
    body = says.told()
    return {"error": body.pop("text"), **body}
