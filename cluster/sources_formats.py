"""JSON documents of logs → exchanges: one answer of a model, with all that it was given.

Known kinds: token ids; OpenAI request/response pairs, chat and plain; batch API input and output lines (joined by
`sources_batch`); ShareGPT conversations; `{prompt, completion}`; `messages`. What is not a usable answer becomes a
`Skip` that says why: a tool call, an image, an empty text, a role out of place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Json = Mapping[str, Any]
Message = dict[str, str]

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "system": "system",
    "developer": "system",
}
_ANSWERS = ("completion", "response", "output", "answer")


class Skip(NamedTuple):
    """An answer, or a whole document, that is left out, and why."""

    reason: str
    answers: int = 1


@dataclass(frozen=True)
class Exchange:
    """One answer. Either `messages`, `prompt` or `prompt_ids` says what was asked; `text` or `output_ids` what came.

    `finish`: `stop`, `length` or None where the log does not say. `notes`: why counts from it are estimates.
    """

    kind: str
    prompt_id: str | None
    turn: int = 0
    workload: str | None = None
    messages: tuple[Message, ...] = ()
    prompt: str | None = None
    prompt_ids: tuple[int, ...] | None = None
    text: str | None = None
    output_ids: tuple[int, ...] | None = None
    finish: str | None = None
    notes: tuple[str, ...] = field(default=())


RENDERED = "the prompt was rendered here, the server's template may differ"
RETOKENISED = "text was tokenised again, the model may have cut it into other tokens"
SAMPLED = "the answer was sampled (temperature above 0)"
UNKNOWN_SAMPLING = "the log does not say whether the answer was greedy"
NO_TOOLS = "the request's tools are left out of the prompt"
NO_REASONING = "the reasoning text is not in the answer"
ASSUMED_END = "the answer is taken to have ended by itself"

BATCH_INPUT, BATCH_OUTPUT = "batch input", "batch output"


def kind_of(document: Json) -> str | None:
    """Which known kind a document is, by its keys alone; None for none of them."""
    has = document.__contains__
    if has("output_ids"):
        return "token ids"
    if has("custom_id") and not has("messages"):
        if has("body") and not has("response"):
            return BATCH_INPUT
        if not has("request") and (has("response") or has("error")):
            return BATCH_OUTPUT
    if has("request") and has("response"):
        return "request/response"
    if has("choices"):
        return "request/response" if has("messages") or has("prompt") else "response alone"
    if has("conversations") or has("conversation"):
        return "ShareGPT"
    if has("prompt") or has("messages"):
        answered = any(has(key) for key in _ANSWERS)
        return "prompt/completion" if answered else ("messages" if has("messages") else "prompt alone")
    return None


def exchanges(document: Json) -> Iterator[Exchange | Skip]:
    """Every answer in a document, in order, and every one that is left out. Not for batch lines, which come in twos."""
    kind = kind_of(document)
    if kind == "token ids":
        yield _token_ids(document)
    elif kind == "request/response":
        yield from pair(document.get("request", document), document.get("response", document), document, kind)
    elif kind == "ShareGPT":
        yield from _conversation(document, document.get("conversations") or document.get("conversation"), kind)
    elif kind == "messages":
        yield from _conversation(document, document["messages"], kind)
    elif kind == "prompt/completion":
        yield _plain(document)
    elif kind in ("response alone", "prompt alone"):
        yield Skip(f"a {kind}, without what belongs to it")
    else:
        yield Skip("no known kind of log")


def identity(document: Json) -> tuple[str | None, str | None]:
    """The prompt id and the workload that a document names."""
    named = next((document[k] for k in ("prompt_id", "custom_id", "id", "task_id") if _is_name(document.get(k))), None)
    workload = document.get("workload")
    return (None if named is None else str(named)), (workload if isinstance(workload, str) and workload else None)


def _is_name(value: Any) -> bool:
    return (isinstance(value, str) and value != "") or (isinstance(value, int) and not isinstance(value, bool))


def _token_ids(document: Json) -> Exchange | Skip:
    ids = {key: document.get(key) for key in ("prompt_ids", "output_ids")}
    for key, value in ids.items():
        if not isinstance(value, list) or not all(type(i) is int for i in value):
            return Skip(f"'{key}' is not a list of token ids")
        if not value:
            return Skip("an empty answer" if key == "output_ids" else "an empty prompt")
    name, workload = identity(document)
    turn = document.get("turn", 0)
    return Exchange(
        "token ids",
        name,
        turn if type(turn) is int and 0 <= turn < 2**15 else 0,
        workload,
        prompt_ids=tuple(ids["prompt_ids"] or ()),
        output_ids=tuple(ids["output_ids"] or ()),
    )


def pair(request: Any, response: Any, document: Json, kind: str) -> Iterator[Exchange | Skip]:
    """An OpenAI request and what the server said to it; envelopes of the batch API are opened."""
    request, response = _open(request), _open(response)
    if response is None or request is None:
        yield Skip("a failed request")
        return
    choices = response.get("choices")
    if str(response.get("object")).endswith(".chunk"):
        yield Skip("a streamed chunk")
    elif not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        yield Skip("a response without choices")
    else:
        yield _choice(request, response, choices[0], document, kind)
        if len(choices) > 1:
            yield Skip("a further choice of one request", len(choices) - 1)


def _open(part: Any) -> Json | None:
    """The body inside a batch envelope; None where the server reported a failure."""
    if not isinstance(part, dict):
        return None
    if part.get("status_code", 200) != 200 or part.get("error"):
        return None
    body = part.get("body", part)
    return body if isinstance(body, dict) else None


def _choice(request: Json, response: Json, choice: Json, document: Json, kind: str) -> Exchange | Skip:
    message = choice.get("message") if isinstance(choice.get("message"), dict) else None
    answer = _answer_text(message) if message is not None else choice.get("text")
    output_ids, prompt_ids = _ids(choice.get("token_ids")), _ids(response.get("prompt_token_ids"))
    prompt_ids = prompt_ids or _ids(choice.get("prompt_token_ids"))
    exact = output_ids is not None and prompt_ids is not None
    if not exact and isinstance(answer, Skip):
        return answer
    if not exact and not (isinstance(answer, str) and answer):
        return Skip("an empty answer")
    asked = _asked(request)
    if isinstance(asked, Skip):
        if not exact:
            return asked
        asked = ()  # ids say all that is needed
    name, workload = identity(document)
    return Exchange(
        kind,
        name,
        0,
        workload,
        messages=() if isinstance(asked, str) else asked,
        prompt=asked if isinstance(asked, str) else None,
        prompt_ids=prompt_ids if exact else None,
        text=answer if isinstance(answer, str) else None,
        output_ids=output_ids if exact else None,
        finish=choice.get("finish_reason") if isinstance(choice.get("finish_reason"), str) else None,
        notes=tuple(_pair_notes(request, message, exact)),
    )


def _pair_notes(request: Json, message: Json | None, exact: bool) -> Iterator[str]:
    temperature = request.get("temperature")
    if temperature is None:
        yield UNKNOWN_SAMPLING
    elif temperature:
        yield SAMPLED
    if exact:
        return
    if request.get("tools"):
        yield NO_TOOLS
    if message is not None and (message.get("reasoning_content") or message.get("reasoning")):
        yield NO_REASONING


def _ids(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, list) and value and all(type(i) is int for i in value):
        return tuple(value)
    return None


def _asked(request: Json) -> tuple[Message, ...] | str | Skip:
    """What a request asks: its messages as plain text, or its prompt."""
    if "messages" in request:
        return _messages(request["messages"])
    prompt = request.get("prompt")
    if isinstance(prompt, str) and prompt:
        return prompt
    return Skip("a request without a text prompt")


def _messages(given: Any) -> tuple[Message, ...] | Skip:
    if not isinstance(given, list) or not given:
        return Skip("a request without messages")
    messages: list[Message] = []
    for entry in given:
        message = _message(entry)
        if isinstance(message, Skip):
            return message
        messages.append(message)
    if messages[-1]["role"] != "user":
        return Skip("a question that does not end with the user")
    return tuple(messages)


def _message(entry: Any) -> Message | Skip:
    """A chat message as role and text. Tool calls, tool results and anything that is not text are skipped."""
    if not isinstance(entry, dict):
        return Skip("a message that is not an object")
    given = entry.get("role", entry.get("from"))
    if given in ("tool", "function", "function_call", "observation"):
        return Skip("a tool call")
    role = ROLES.get(given) if isinstance(given, str) else None
    if role is None:
        return Skip("an unknown role")
    text = _answer_text(entry)
    return text if isinstance(text, Skip) else {"role": role, "content": text}


def _answer_text(message: Json) -> str | Skip:
    """The text of one message; parts of it are joined."""
    if message.get("tool_calls") or message.get("function_call"):
        return Skip("a tool call")
    content = message.get("content", message.get("value", message.get("text")))
    if isinstance(content, list):
        texts: list[str] = []
        for part in content:
            if not isinstance(part, dict) or not isinstance(part.get("text"), str):
                kind = str(part.get("type", "")) if isinstance(part, dict) else ""
                return Skip("an image" if "image" in kind else "content that is not text")
            texts.append(part["text"])
        content = "".join(texts)
    if content is None:
        return Skip("a refusal" if message.get("refusal") else "an empty answer")
    return content if isinstance(content, str) else Skip("content that is not text")


def _conversation(document: Json, given: Any, kind: str) -> Iterator[Exchange | Skip]:
    """Every answer of a conversation, each with all that came before it.

    An answer needs a user's message right before it. From the first message that cannot be used on, every later
    answer is left out as well, for its context is not known.
    """
    if not isinstance(given, list) or not given:
        yield Skip("a conversation without messages")
        return
    name, workload = identity(document)
    context: list[Message] = []
    broken: Skip | None = None
    turn = answers = 0
    for entry in given:
        message = _message(entry)
        if isinstance(message, Skip):
            broken = broken or message
            if isinstance(entry, dict) and ROLES.get(str(entry.get("role", entry.get("from")))) == "assistant":
                answers += 1
                yield message
        elif message["role"] != "assistant":
            context.append(message)
        else:
            yield _turn(context, message, broken, Exchange(kind, name, turn, workload))
            context.append(message)
            turn += 1
            answers += 1
    if not answers:
        yield broken or Skip("a conversation without an answer")


def _turn(context: Sequence[Message], message: Message, broken: Skip | None, base: Exchange) -> Exchange | Skip:
    if broken is not None:
        return Skip(f"an answer after {broken.reason}")
    if not message["content"]:
        return Skip("an empty answer")
    if not context or context[-1]["role"] != "user":
        return Skip("an answer without a question right before it")
    return Exchange(
        base.kind,
        base.prompt_id,
        base.turn,
        base.workload,
        messages=tuple(context),
        text=message["content"],
        notes=(UNKNOWN_SAMPLING,),
    )


def _plain(document: Json) -> Exchange | Skip:
    key = next(key for key in _ANSWERS if key in document)
    answer = document[key]
    if isinstance(answer, dict):
        answer = _answer_text(answer)
    if isinstance(answer, Skip):
        return answer
    if not isinstance(answer, str):
        return Skip("content that is not text")
    if not answer:
        return Skip("an empty answer")
    given = document.get("messages", document.get("prompt"))
    asked = _messages(given) if isinstance(given, list) else given
    if isinstance(asked, Skip):
        return asked
    if not isinstance(asked, str | tuple) or not asked:
        return Skip("an empty prompt")
    name, workload = identity(document)
    finish = document.get("finish_reason")
    return Exchange(
        "prompt/completion",
        name,
        0,
        workload,
        messages=asked if isinstance(asked, tuple) else (),
        prompt=asked if isinstance(asked, str) else None,
        text=answer,
        finish=finish if isinstance(finish, str) else None,
        notes=(UNKNOWN_SAMPLING,),
    )
