"""`RemoteConfig`: a model that servers elsewhere run, and how long they are waited for. `Upstream`: one of several
servers. Values only.

`SERVERS` names the software there, because servers differ in what they take beside OpenAI's own fields: `Dialect` has
what each of them does with them. `read_key` takes the server's key from the environment only, so that no settings file
and no log has it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from urllib.parse import urlsplit

from streamserve.protocol.requests import GRAMMAR_KINDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """What one kind of server takes. `fields`: our sampling fields under its names; any other is refused.

    `grammars`: kinds of grammar it takes, and the field of each (clients/remote/body.py). `continues`: it continues
    a last message of the assistant; with `drops_generation_prompt` only where it is asked for no new turn. `counts`: it
    gives the usage so far in each chunk when asked to. `no_top_k` is its word for `top_k` 0, where that is another.
    """

    fields: Mapping[str, str] = field(default_factory=dict)
    grammars: Mapping[str, str] = field(default_factory=dict)
    takes_template_kwargs: bool = False
    continues: bool = False
    drops_generation_prompt: bool = False
    counts: bool = False
    no_top_k: int = 0


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


_JSON = dict.fromkeys(("json_object", "json_schema"), "response_format")
_USUAL = ("top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos", "logit_bias")

# Both kinds of vLLM: its fields for grammars have changed, and it ignores those that it does not know.
_VLLM = Dialect(
    fields={
        **_same(*_USUAL, "allowed_token_ids", "bad_words", "skip_special_tokens", "truncate_prompt_tokens"),
        "include_stop": "include_stop_str_in_output",
    },
    grammars={
        **_JSON,
        "regex": "structured_outputs.regex",
        "choice": "structured_outputs.choice",
        "lark": "structured_outputs.grammar",
        "gbnf": "structured_outputs.grammar",
    },
    takes_template_kwargs=True,
    continues=True,
    drops_generation_prompt=True,
    counts=True,
    no_top_k=-1,
)

SERVERS: Mapping[str, Dialect] = MappingProxyType(
    {
        "openai": Dialect(fields=_same("logit_bias"), grammars=_JSON),
        "vllm": _VLLM,
        "vllm-guided": replace(
            _VLLM,
            grammars={
                **_JSON,
                "regex": "guided_regex",
                "choice": "guided_choice",
                "lark": "guided_grammar",
                "gbnf": "guided_grammar",
            },
        ),
        "sglang": Dialect(
            fields={**_same(*_USUAL, "skip_special_tokens"), "include_stop": "no_stop_trim"},
            grammars={**_JSON, "regex": "regex", "choice": "regex", "gbnf": "ebnf"},
            no_top_k=-1,
            takes_template_kwargs=True,
            continues=True,
            drops_generation_prompt=True,
        ),
        "llama-server": Dialect(
            fields={
                **_same("top_k", "min_p", "ignore_eos", "logit_bias"),
                "repetition_penalty": "repeat_penalty",
            },
            grammars={**_JSON, "choice": "grammar", "gbnf": "grammar"},
            takes_template_kwargs=True,
            continues=True,
            drops_generation_prompt=True,
        ),
        "streamserve": Dialect(
            fields=_same(
                *_USUAL,
                "allowed_token_ids",
                "bad_words",
                "include_stop",
                "skip_special_tokens",
                "truncate_prompt_tokens",
            ),
            counts=True,
            grammars=dict.fromkeys(GRAMMAR_KINDS, "grammar"),
            takes_template_kwargs=True,
            continues=True,
        ),
    }
)
AUTO = "auto"
# `owned_by` of a server's models → its name here.
OWNERS = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llama-server", "streamserve": "streamserve"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Upstream:
    """One of the servers of a model. What its entry leaves out is as for the model."""

    url: str
    """The base of this server's routes, as the model's `URL`."""
    name: str = ""
    """Its name in metrics and log lines; `""`: host and port of its `URL`."""
    weight: int = 1
    """Its share of the requests: a server of weight 2 gets twice as many as a server of weight 1."""
    remote_model: str = ""
    """The model's name at this server."""
    api_key_env: str = ""
    """The environment variable that has this server's key."""
    server: str = ""
    """The software of this server."""
    max_concurrent: int = 0
    """Requests of this web process that run at this server at once; 0: as for the model."""
    max_waiting: int = 0
    """What it adds to the requests that may wait for a place at any server; 0: as for the model."""
    ca_file: str = ""
    """Certificates that this server's is checked by."""

    def __post_init__(self) -> None:
        if self.weight < 1:
            raise ValueError(f"weight is {self.weight}; it takes 1 or more")

    @property
    def label(self) -> str:
        """Its name in metrics and log lines."""
        parts = urlsplit(self.url)
        return self.name or f"{parts.hostname or self.url}{'' if parts.port is None else f':{parts.port}'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteConfig:
    """Where a model is served, and the bounds of its use by one process."""

    alias: str
    url: str = ""
    """The base of the server's routes, as `http://10.0.0.5:8000/v1`. Redirects are not followed, and no proxy is taken
    from the environment.
    """
    upstreams: tuple[Upstream, ...] = ()
    """Several servers of the same model, in the place of `URL`: a list of [UPSTREAMS](#upstreams)."""
    remote_model: str = ""
    """The model's name there; `""`: the alias."""
    api_key_env: str = ""
    """The environment variable of the web processes that has the server's key. The key is in no setting, log line or
    message.
    """
    server: str = AUTO
    """The software there: `"vllm"`, `"vllm-guided"` (before 0.11), `"sglang"`, `"llama-server"`, `"streamserve"`,
    `"openai"` (anything else); `"auto"`: by `owned_by` of its `/models`. It decides which fields are sent, and whether
    a partial answer can be continued.
    """
    max_concurrent: int = 64
    """Requests of this web process that run at the server at once; of several, at each."""
    max_waiting: int = 256
    """Requests that wait for one of these places; the next is refused with 503, unless its tenant has less than its
    share of them. Several servers: so many for each.
    """
    queue_seconds: float = 30.0
    """How long a request waits for a place."""
    warm_connections: int = 2
    """Connections that are kept open, so that a request need not make one."""
    connect_seconds: float = 5.0
    """How long a connection may take to be made."""
    first_token_seconds: float = 120.0
    """How long the first token may take, from sending the request."""
    silence_seconds: float = 60.0
    """How long the server may be silent after the first token."""
    lead_tokens: int = 256
    """How far an answer is read ahead of what its reader has received."""
    hold_seconds: float = 10.0
    """A reader that is so far behind for so long has the connection closed, where the server can continue the answer;
    else it is held.
    """
    content_parts: tuple[str, ...] = ()
    """Parts of a user's message that the model takes beside text: `"image_url"`, `"input_audio"`, `"file"`. They are
    passed on as they came; any other is refused.
    """
    part_addresses: bool = False
    """Let callers name addresses in `image_url`, which the model's server then fetches; else only `data:` addresses
    pass. This site fetches none.
    """
    max_line_bytes: int = 1024 * 1024
    """A longer line of the server's ends the answer."""
    poll_seconds: float = 15.0
    """How often the server is asked for its models; with requests more often, as that keeps connections open."""
    ca_file: str = ""
    """Certificates that an https server's is checked by; `""`: certifi's."""

    def __post_init__(self) -> None:
        for name in ("max_concurrent", "lead_tokens", "max_line_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it takes 1 or more")
        for name in ("queue_seconds", "connect_seconds", "first_token_seconds", "silence_seconds", "poll_seconds"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it takes more than 0")
        if bool(self.url) == bool(self.upstreams):
            raise ValueError("it takes a URL or UPSTREAMS, and not both")
        labels = [upstream.label for upstream in self.upstreams]
        twice = next((label for label in labels if labels.count(label) > 1), None)
        if twice is not None:
            raise ValueError(f"two UPSTREAMS have the name {twice}; give each a NAME of its own")

    @property
    def model(self) -> str:
        """The model's name at its server."""
        return self.remote_model or self.alias

    @property
    def servers(self) -> tuple[tuple[Upstream, RemoteConfig], ...]:
        """Each server, and the config of the model as it is served there alone."""
        return tuple((one, self._at(one)) for one in self.upstreams or (Upstream(url=self.url),))

    @property
    def address(self) -> str:
        """The addresses of its servers, for people."""
        return ", ".join(config.url for _, config in self.servers)

    def _at(self, upstream: Upstream) -> RemoteConfig:
        own = {name: getattr(upstream, name) for name in _OWN if getattr(upstream, name)}
        return replace(self, upstreams=(), url=upstream.url.rstrip("/"), **own)


# What an upstream may have of its own.
_OWN = ("remote_model", "api_key_env", "server", "max_concurrent", "max_waiting", "ca_file")


def read_key(config: RemoteConfig) -> str:
    """Return the key; "" where none is named, or the variable is not set."""
    return os.environ.get(config.api_key_env, "").strip() if config.api_key_env else ""
