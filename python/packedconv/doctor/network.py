"""Whether the package index answers that pip will ask."""

import base64
import configparser
import http.client
import os
import sys
import typing
import urllib.error
import urllib.parse
import urllib.request

from packedconv.doctor.findings import MISSING, OK, WARNING, Finding

DEFAULT_INDEX = "https://pypi.org/simple"
ANSWER_SECONDS = 10.0


def package_index(url: typing.Optional[str] = None) -> Finding:
    """Ask the index for one page of it, as pip will: through the same proxy variables.

    url: the index; by default the one that pip is configured for.
    """
    name = "package index"
    settings = pip_settings()
    if url is None and settings.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        places = settings.get("find-links", "nowhere")
        return Finding(OK, name, f"not used: pip is told to take packages from {places}")
    url = (url or settings.get("index-url") or DEFAULT_INDEX).rstrip("/")
    host = urllib.parse.urlsplit(url).hostname or "the index"
    try:
        with urllib.request.urlopen(_request(url + "/pip/"), timeout=ANSWER_SECONDS) as answer:
            answer.read(1)
    except urllib.error.HTTPError as error:
        return Finding(
            WARNING,
            name,
            f"{host} answers with HTTP {error.code} ({error.reason})",
            "pip config list, to see whether this is the index that is meant",
        )
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        if "CERTIFICATE" in str(reason).upper():
            return Finding(
                WARNING,
                name,
                f"{host} answers, but this Python does not trust its certificate; pip has a list"
                " of its own",
                "export PIP_CERT=/etc/ssl/certs/ca-certificates.crt, should pip say the same",
            )
        return Finding(
            MISSING,
            name,
            f"{host} does not answer ({reason}); expected a network for the first call",
            "a network; behind a proxy: export HTTPS_PROXY=http://host:port; for another index:"
            " export PIP_INDEX_URL=https://host/simple",
        )
    return Finding(OK, name, f"{host} answers")


def _request(url: str) -> urllib.request.Request:
    """A request for a page; a user name and password in its address go where they belong."""
    parts = urllib.parse.urlsplit(url)
    login, _, place = parts.netloc.rpartition("@")
    request = urllib.request.Request(urllib.parse.urlunsplit(parts._replace(netloc=place)))
    if login:
        credentials = base64.b64encode(urllib.parse.unquote(login).encode("utf-8"))
        request.add_header("Authorization", "Basic " + credentials.decode("ascii"))
    return request


def pip_settings(root: str = "/") -> typing.Dict[str, str]:
    """What pip's files and variables say, for `pip install` in a new environment; by option.

    root: where etc lies.
    """
    home = os.path.expanduser("~")
    config = os.environ.get("XDG_CONFIG_HOME") or os.path.join(home, ".config")
    chosen = os.environ.get("PIP_CONFIG_FILE")
    files = [
        os.path.join(root, "etc/xdg/pip/pip.conf"),
        os.path.join(root, "etc/pip.conf"),
        os.path.join(home, ".pip", "pip.conf"),
        os.path.join(config, "pip", "pip.conf"),
    ]
    if chosen == os.devnull:
        files = []
    elif chosen:
        files.append(chosen)
    parser = configparser.RawConfigParser()
    try:
        parser.read(files, encoding="utf-8")
    except (OSError, ValueError, configparser.Error) as error:
        print(f"artifact: pip's configuration cannot be read: {error}", file=sys.stderr)
    found = {}  # type: typing.Dict[str, str]
    for section in ("global", "install"):
        if parser.has_section(section):
            found.update(parser.items(section))
    for variable, value in os.environ.items():
        if variable.startswith("PIP_"):
            found[variable[len("PIP_") :].lower().replace("_", "-")] = value
    return found
