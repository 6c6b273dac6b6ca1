"""Error responses of the server, in both languages and with a code."""

from typing import Any

from starlette.exceptions import HTTPException

from headwise.reports.messages import message
from headwise.wording import Message


class Refusal(HTTPException):
    """An error response: the status and its message."""

    def __init__(self, status: int, says: Message, *, retry_after: int | None = None) -> None:
        headers = None if retry_after is None else {"Retry-After": str(retry_after)}
        super().__init__(status, str(says), headers)
        self.says = says


def misfit(name: str, sentence: str) -> Refusal:
    """400: an invalid request; the page itself never sends one."""
    return Refusal(400, message("misfit", name=name, sentence=sentence))


def error_body(says: Message) -> dict[str, Any]:
    """The body of an error response."""
    body = says.to_dict()
    return {"error": body.pop("text"), **body}
