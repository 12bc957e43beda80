"""`Limits`: bounds every number and size that a client can send, before anything is allocated. Pure.

A site sets them in LIMITS. Dialects check bodies by them, the guard bytes, the quota places, durable work its rows.
What an engine can compute with, whatever a site allows, is `Range` (requests.py).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Upper bounds, inclusive. Sizes in bytes, lengths in characters or tokens, times in seconds."""

    max_body_bytes: int = 1024 * 1024
    """Bytes of a request's body (1 MiB)."""
    max_json_depth: int = 64
    """How deep its JSON may be nested."""
    max_json_containers: int = 20_000
    """Arrays and objects in its JSON, in a WebSocket message, or in a line of a batch; in the arguments of all its tool
    calls again as many. Brackets inside strings do not count, and a list of numbers is one.
    """
    max_messages: int = 512
    """Messages of a conversation."""
    max_prompt_chars: int = 400_000
    """Characters of a prompt, or of all messages."""
    max_tokens: int = 16_384
    """The largest `max_tokens`, which is lowered to it, and `min_tokens`."""
    max_n: int = 16
    """Answers to one prompt (`n`); each is a sequence of the engine's, and waits and takes memory like any other."""
    max_prompts: int = 16
    """Prompts of one `POST /v1/completions`; each is a stream."""
    max_embedding_inputs: int = 2_048
    """Inputs of one `POST /v1/embeddings`; together they have `MAX_PROMPT_CHARS` characters or token ids."""
    max_stop: int = 16
    """Strings in `stop`."""
    max_stop_chars: int = 64
    """Characters of each string in `stop`."""
    max_stop_token_ids: int = 64
    """Ids in `stop_token_ids`."""
    max_logprobs: int = 20
    """Candidates of a token: `logprobs` and `prompt_logprobs`."""
    max_logit_bias: int = 1_024
    """Token ids in `logit_bias`."""
    max_allowed_token_ids: int = 4_096
    """Ids in `allowed_token_ids`."""
    max_bad_words: int = 64
    """Strings in `bad_words`."""
    max_bad_word_chars: int = 64
    """Characters of each of `bad_words`."""
    max_temperature: float = 2.0
    """The largest `temperature`."""
    max_top_k: int = 1_000_000
    """The largest `top_k`."""
    max_timeout_seconds: float = 3600.0
    """The largest `timeout_seconds`."""
    max_websocket_message_bytes: int = 256 * 1024
    """Bytes of a WebSocket message (256 KiB)."""
    max_metadata_keys: int = 16
    """Entries of `metadata`."""
    max_metadata_key_chars: int = 64
    """Characters of each name in `metadata`."""
    max_metadata_chars: int = 512
    """Characters of each value in `metadata`."""
    max_template_kwargs: int = 16
    """Entries of `chat_template_kwargs`."""
    max_tools: int = 128
    """Functions in `tools`."""
    max_grammar_chars: int = 65_536
    """Characters of a grammar; of a schema, as JSON."""
    max_file_bytes: int = 200 * 1024 * 1024
    """Bytes of a file that is uploaded (200 MiB): 413 beyond."""
    max_tenant_file_bytes: int = 2 * 1024 * 1024 * 1024
    """Bytes of all files that a tenant keeps (2 GiB): 507 beyond."""
    max_uploads: int = 64
    """Bodies with a file (`/v1/files`, `/v1/messages/batches`) that a process receives at a time: 503 beyond."""
    max_uploads_per_principal: int = 8
    """Such bodies of a user or key: 429 beyond."""
    max_upload_bytes: int = 2 * 1024 * 1024 * 1024
    """Bytes of all bodies with a file together, as they are announced (2 GiB): 503 beyond. The disk of `TMPDIR` needs
    twice as much.
    """
    max_attachment_bytes: int = 20 * 1024 * 1024
    """Bytes of a file that is attached to a question (20 MiB): 413 beyond."""
    max_attachment_chars: int = 200_000
    """Characters of its text: 413 beyond."""
    max_pdf_pages: int = 500
    """Pages of a PDF: 413 beyond."""
    max_attachments: int = 8
    """Files of a question."""
    max_tenant_attachments: int = 1_000
    """Attached files that a tenant keeps: 507 beyond."""
    max_tenant_attachment_bytes: int = 512 * 1024 * 1024
    """Bytes of them (512 MiB): 507 beyond."""
    max_batch_lines: int = 50_000
    """Requests of a batch; its file may have four times as many lines, blank lines included."""
    max_batches: int = 16
    """Batches of a tenant that have not ended: 429 beyond."""
    max_streams_per_principal: int = 16
    """Streams at once of a user or a key: more wait (docs/fairness.md#the-door)."""
    max_streams_per_visitor: int = 4
    """Streams at once of a visitor without a login, and of all requests without a cookie from one client address (of
    IPv6 a /64): more wait.
    """
    max_streams_per_address: int = 16
    """Streams at once of all visitors of one client address, with and without a cookie: more wait; 0: no bound."""
    max_streams_anonymous: int = 64
    """Streams at once of all visitors together: more wait."""
    max_queued_per_principal: int = 64
    """Requests of one user, key, visitor or address that wait for a place, in a process: 429 beyond; 0: none waits."""
    max_queued_anonymous: int = 256
    """Such requests of all visitors together: 503 beyond, but for a client address whose visitors have less than its
    share of them.
    """
    max_jobs_per_principal: int = 100
    """Jobs of a user or key that have not ended, queued or running: 429 beyond."""
    max_jobs_per_visitor: int = 4
    """Open jobs of a visitor, and of all requests without a cookie from one client address: 429 beyond."""
    max_jobs_anonymous: int = 32
    """Open jobs of all visitors together: 503 beyond."""
    max_conversations: int = 50_000
    """Conversations of a user, or of a key without a user: 429 beyond."""
    max_conversation_messages: int = 4_000
    """Questions and answers of a conversation, those of all its branches: 400 beyond. Its prompt has the newest
    `MAX_MESSAGES` of a branch, and `MAX_PROMPT_CHARS` characters.
    """
    max_connections: int = 10_000
    """Requests and WebSockets in progress in a process: 503, or close code 1013, beyond, but not for the probes; 0: no
    bound.
    """
    max_connections_per_address: int = 0
    """Requests and WebSockets in progress of one client address, of IPv6 a /64: 429 beyond; 0: no bound. Loopback
    addresses and unix sockets, which are a proxy's, are not counted.
    """
    max_wrong_keys: int = 20
    """Wrong API keys that one address may send within a minute: 429 beyond, for keys that were not right before."""
