"""A digest inside a JSON file, which tells whether the file is still what was written."""

import hashlib
import json
import typing

# In files of earlier versions it is missing; they are taken as they are.
KEY = "content_sha256"

Content = typing.Dict[str, typing.Any]


def sealed_text(content: typing.Mapping[str, typing.Any]) -> str:
    """An object as JSON text that holds the digest of the rest of it."""
    plain = json.loads(json.dumps(content))
    plain[KEY] = _digest(plain)
    return json.dumps(plain, indent=1, sort_keys=True) + "\n"


def is_intact(content: typing.Any) -> bool:
    """Whether an object that was read from JSON is the one that was sealed, or never was."""
    return not isinstance(content, dict) or content.get(KEY, _digest(content)) == _digest(content)


def require_intact(path: str, content: typing.Any, step: str) -> None:
    """Raise ValueError that names the file and the next step unless `is_intact`."""
    if not is_intact(content):
        raise ValueError(f"{path}: expected what was written, got a file changed since; {step}")


def _digest(content: Content) -> str:
    rest = {key: value for key, value in content.items() if key != KEY}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
