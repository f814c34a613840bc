"""A file that holds the digest of its content: any change of a value is seen."""

import json

import pytest

from packedconv.seal import is_intact, require_intact, sealed_text

CONTENT = {
    "text": "é, \n and ≤",
    "numbers": [1, 0.1, 1e-300, -0.0, 2**63, float("inf")],
    "nested": {"b": {"10": None, "9": True}, "a": []},
    # JSON makes these text and a list.
    "keys": {10: "ten", 9: "nine"},
    "pair": (1, 2),
}


def test_what_is_read_is_what_was_sealed():
    text = sealed_text(CONTENT)
    assert is_intact(json.loads(text))
    content = json.loads(text)
    content.pop("content_sha256")
    assert content == json.loads(json.dumps(CONTENT))
    # However a program that copied the file laid it out.
    assert is_intact(json.loads(json.dumps(json.loads(text), indent=4)))


def test_sealing_again_changes_nothing():
    text = sealed_text(CONTENT)
    assert sealed_text(json.loads(text)) == text


def test_every_flipped_digit_and_letter_is_seen():
    text = sealed_text(CONTENT)
    seen = 0
    for at, character in enumerate(text):
        if not (character.isalnum() and character.isascii()):
            continue
        changed = text[:at] + ("7" if character != "7" else "3") + text[at + 1 :]
        try:
            content = json.loads(changed)
        except ValueError:
            continue
        if '"content_sha256"' in changed:
            seen += 1
            assert not is_intact(content), (at, changed)
    assert seen > 60


def test_files_without_a_seal_are_taken_as_they_are():
    for content in ({}, {"a": 1}, [1], "text", None):
        assert is_intact(content)


def test_the_message_names_the_file_and_the_next_step():
    content = {**json.loads(sealed_text({"a": 1})), "a": 2}
    with pytest.raises(
        ValueError, match=r"^x/oc8\.json: expected what was written, got .*; again$"
    ):
        require_intact("x/oc8.json", content, "again")
