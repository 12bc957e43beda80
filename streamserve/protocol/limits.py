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
    max_json_depth: int = 64
    max_json_containers: int = 20_000  # arrays and objects in a body; a flat list of numbers is one array
    max_messages: int = 512
    max_prompt_chars: int = 400_000
    max_tokens: int = 16_384
    max_n: int = 16
    max_prompts: int = 16
    max_stop: int = 16
    max_stop_chars: int = 64
    max_stop_token_ids: int = 64
    max_logprobs: int = 20
    max_logit_bias: int = 1_024
    max_allowed_token_ids: int = 4_096
    max_bad_words: int = 64
    max_bad_word_chars: int = 64
    max_temperature: float = 2.0
    max_top_k: int = 1_000_000
    max_timeout_seconds: float = 3600.0
    max_websocket_message_bytes: int = 256 * 1024
    max_metadata_keys: int = 16
    max_metadata_key_chars: int = 64
    max_metadata_chars: int = 512
    max_template_kwargs: int = 16
    max_tools: int = 128
    max_grammar_chars: int = 65_536
    max_file_bytes: int = 200 * 1024 * 1024
    max_tenant_file_bytes: int = 2 * 1024 * 1024 * 1024  # of all files that a tenant keeps
    max_uploads: int = 64  # bodies with a file that a process receives at a time
    max_uploads_per_principal: int = 8
    max_upload_bytes: int = 2 * 1024 * 1024 * 1024  # of all those bodies together
    max_batch_lines: int = 50_000
    max_batches: int = 16  # of a tenant that have not ended
    max_streams_per_principal: int = 16
    max_streams_per_visitor: int = 4  # without a login; requests without a cookie: of one client address
    max_streams_per_address: int = 16  # of all visitors of one client address; 0 is no bound
    max_streams_anonymous: int = 64  # of all visitors together
    max_queued_per_principal: int = 64  # requests that wait for one of these places, in a process
    max_queued_anonymous: int = 256  # of all visitors together
    max_jobs_per_principal: int = 100  # that have not ended
    max_jobs_per_visitor: int = 4
    max_jobs_anonymous: int = 32
    max_connections: int = 10_000  # requests and WebSockets in progress in a process; 0 is no bound
    max_connections_per_address: int = 0
    max_wrong_keys: int = 20  # that one address may send within a minute
