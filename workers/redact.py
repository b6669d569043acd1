"""Keep secrets out of records and logs: tokens that an error message, a URL or an environment variable may carry."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

HIDDEN = "[hidden]"
_NAME = re.compile(r"TOKEN(?!IZ)|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY", re.IGNORECASE)
_SHORTEST = 8
"""Values of variables shorter than this are words such as "token", not secrets."""
_SECRET_QUERY = r"(?:token|secret|signature|password|key|credential|sig)"
_PATTERNS = (
    # user:password@ in a URL, or a lone token there
    (re.compile(r"""(?<=://)[^/\s@"']+(?=@)"""), HIDDEN),
    # ?token=… and the like in a URL
    (re.compile(rf"""(?i)([?&;][\w.-]*{_SECRET_QUERY}=)[^&\s#"']+"""), rf"\1{HIDDEN}"),
    (re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{8,}"), rf"\1 {HIDDEN}"),
    # Tokens that their issuers made recognisable: Hugging Face, OpenAI and its like, GitHub, AWS, Slack
    (re.compile(r"\b(?:hf_|sk-|gh[pousr]_|github_pat_|AKIA|xox[abpr]-)[\w-]{12,}"), HIDDEN),
)


def redact(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """`text` without secrets: values of variables that are named like one, credentials in URLs, well-known tokens."""
    for name, value in environ.items():
        if len(value) >= _SHORTEST and _NAME.search(name) and not _is_path(value):
            text = text.replace(value, HIDDEN)
    for pattern, instead in _PATTERNS:
        text = pattern.sub(instead, text)
    return text


def _is_path(value: str) -> bool:
    """RAY_AUTH_TOKEN_PATH and its like name a file; where it lies is no secret and helps a reader."""
    return value.startswith(("/", "~/", "./"))
