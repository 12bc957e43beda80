"""`CODES`: every error code that a client can get, with its status and what it means. Values only.

A code that is sent is in this table: tests/protocol/test_codes.py reads the sources. docs/reference/errors.md is made
of it. The classes that carry the codes are in errors.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

# Where a code comes without a status of its own.
STREAM, SOCKET, FILE, JOB, PYTHON = "stream", "WebSocket", "batch file", "job", "Python"


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """One code. `places` are the HTTP statuses that it comes with, and the other places where it is seen."""

    code: str
    places: tuple[int | str, ...]
    meaning: str


def _codes(*places: int | str, **meanings: str) -> Iterator[Code]:
    for code, meaning in meanings.items():
        yield Code(code=code, places=places, meaning=meaning)


_ALL = (
    *_codes(
        400,
        invalid_json="The body is not one JSON object in UTF-8: syntax, NaN, Infinity, 1e999, ints beyond 24 digits, "
        "duplicate keys, half a surrogate pair, deeper than 64.",
        too_many_containers="The JSON has more than 20,000 arrays and objects, or the arguments of a conversation's "
        "tool calls have as many. Text in strings does not count, however many brackets it has.",
        invalid_type="A field is of the wrong type: true is not 1, 1.0 is not 1.",
        previous_response_not_found="`previous_response_id` names no response that is kept (docs/responses.md).",
        conversation_full="The conversation has 4,000 messages, as many as it may. Begin another.",
        nothing_to_share="The conversation has no message yet that a share link could show.",
        too_many_shares="The conversation has 100 share links that work, as many as it may.",
        invalid_value="A field is out of range, not one of the allowed words, or empty.",
        missing_field="A field that is needed is absent.",
        unsupported_protocol_version="MCP: `MCP-Protocol-Version` is a version that is not spoken here.",
        header_mismatch="MCP: a header says something else than the message.",
        unknown_field="The body has a field that is not known here. The message names the nearest known field.",
        conflicting_fields="Two fields exclude each other.",
        empty_prompt='`prompt`, or the content of a user\'s message, is "".',
        unsupported_content="An image, audio or file that the model does not take. Most take text only.",
        unsupported_parameter="A field that this server lacks, whose effect an answer would silently miss; a tool that "
        "is no function.",
        thread_unsupported_request="Anthropic's `thread` (docs/anthropic.md).",
        prompt_over_limit="The prompt alone has more tokens than a limit over time allows (docs/limits.md).",
        context_length_exceeded="The messages are over the limit of characters, or the prompt leaves no room for an "
        "answer in the model.",
        never_fits="The prompt, with a token of an answer, never fits into the memory of the model's engine.",
        invalid_grammar="The grammar is none, or no text matches it.",
        unsupported_grammar="The grammar has a part that cannot be enforced. The message names it "
        "(docs/structured-output.md).",
        grammar_too_complex="The grammar breaks a limit of size, depth, time or memory.",
        grammar_unavailable="The server lacks llguidance. The message has the command that installs it.",
        no_chat_template="The model has no chat template. Send `prompt`.",
        template_error="The model's chat template refuses these messages, or cannot show the message or the `tools` "
        "that `param` names (docs/reasoning-and-tools.md#what-reaches-the-model).",
        wrong_kind_of_model="An answer is asked of an embedding model, or embeddings of a model that gives answers. "
        "The message names the models that were meant.",
        tokenizer_error="The prompt has no tokens.",
        not_sent="An acknowledgement names an event that was not sent.",
        tools_unsupported="The model's output has no tool calls, so none can be forced "
        "(docs/reasoning-and-tools.md#forced-calls-and-grammars).",
        invalid_idempotency_key="The `Idempotency-Key` is not 1 to 255 visible ASCII characters.",
        upstream_refused="The server that runs the model refuses the request. The message is that server's, and so may "
        "be `param`.",
        too_many_prompts="`/v1/completions` has more prompts than you may have answers at a time.",
        invalid_form="An upload is no form with one file.",
        file_in_use="A file that a batch reads is not deleted.",
        attachment_in_use="An attached file that a question has brought is not deleted before its conversations.",
        pdf_unavailable="The server lacks pypdf, which reads PDFs. The message has the command that installs it.",
        encrypted_file="The PDF is locked by a password.",
        broken_file="The PDF is damaged, or no PDF.",
        file_too_complex="The PDF takes too much time or memory to read.",
        file_without_text="The file has no text, as a PDF of scanned pages.",
        wrong_encoding="The file is not text in UTF-8, nor in UTF-16 with its mark.",
        invalid_endpoint="Rows of a batch cannot ask this address.",
        not_interrupted="The stream waits for no approval (docs/pipelines.md#tools-that-ask-first).",
        unknown_call="An approval names no call that waits for one.",
        missing_approval="A call that waits for an approval has no answer in `approvals`.",
        batch_not_cancellable="The batch has ended.",
        batch_not_ended="The batch has not ended: its results are not there yet.",
        webhook_not_found="The settings have no webhook of that name (docs/jobs.md#webhooks).",
        invalid_request="The request is wrong in another way, which the message names.",
    ),
    *_codes(400, FILE, empty_file="The file is empty."),
    *_codes(
        400,
        SOCKET,
        unknown_type="The message has a `type` that is not known.",
        in_conversation="`input` to a stream of a conversation that the server keeps. Send `start` with its id.",
        no_conversation="`input` to a stream that began with a bare prompt, which cannot be continued.",
    ),
    *_codes(
        SOCKET, too_many_on_socket="More streams on one socket than its caller may have, and have wait. Open another."
    ),
    *_codes(
        401,
        unauthorized="No credentials, or a request that needs a login.",
        invalid_api_key="The API key is not known, revoked or expired.",
        unknown_scheme="`Authorization` has another scheme than Bearer, without cookies, where visitors are served.",
    ),
    *_codes(401, SOCKET, rights_lost="A key, account or login that was active is not any more."),
    *_codes(
        403,
        forbidden="The caller is known, and may not do this.",
        csrf_failed="A POST with cookies has no valid CSRF token.",
        cross_origin="A page of another origin calls with cookies. Use an API key and `CORS_ORIGINS`.",
        host_not_allowed="The `Host` header is not in `ALLOWED_HOSTS`.",
        insufficient_scope="The API key lacks the scope that this route needs.",
        prompt_in_url_off="`GET /streams/new` and `GET /v1/completions/stream` may not start an answer here "
        "(`PROMPT_IN_URL`).",
    ),
    *_codes(
        404,
        not_found="Nothing of that name that this caller may see.",
        unknown_url="There is nothing at this address. The message names the address that was meant.",
        model_not_found="No model has this name. The message names the models that are served.",
        pipeline_not_found="No pipeline has this name.",
        unknown_method="MCP: there is no method of this name here, or not in this version of the protocol.",
        session_not_found="MCP: no session of the caller has this id. Send `initialize` without `Mcp-Session-Id`.",
        stream_not_found="No stream of the caller has this id; or the text is no id of a stream.",
        file_not_found="No file of the caller has this id.",
        attachment_not_found="No attached file of the caller has this id.",
        batch_not_found="No batch of the caller has this id.",
        results_not_found="The batch failed before any request was run. Create it again.",
        completion_not_found="No chat completion of that id is stored (docs/openai.md#stored-completions).",
        response_not_found="No response of that id is kept (docs/responses.md).",
        item_not_found="The response, or the conversation, has no item with this id.",
        timings_off="The site takes no readers' times (`READER_TIMINGS`).",
        usage_off="The site keeps no usage (`USAGE`).",
        moderation_off="The site moderates no texts (`MODERATION`).",
        conversations_off="The site keeps no conversations (`CONVERSATIONS`).",
        share_links_off="The site has no share links (`SHARE_LINKS`).",
        conversation_not_found="No conversation of the caller has this id.",
        message_not_found="The conversation, or the stored chat completion, has no message with this id.",
        share_not_found="The share link does not exist, was revoked, or has expired.",
        job_not_found="No job of the caller has this id.",
    ),
    *_codes(405, method_not_allowed="The address exists, and does not take this method. `Allow` names what it takes."),
    *_codes(408, request_timeout="The body did not arrive in time."),
    *_codes(409, answer_running="The answer is asked for as a whole, and is still being made. Ask again."),
    *_codes(409, approval_answered="The approval was given or refused before. The message names the stream."),
    *_codes(
        410,
        approval_expired="The run has waited for its user for longer than `APPROVAL_SECONDS`. Ask again.",
        stream_expired="The events of the stream are no longer kept.",
        unknown_event_id="`Last-Event-ID` or `after` names no event of this stream.",
    ),
    *_codes(410, SOCKET, conversation_gone="What was asked is not kept any more (`input`). Send it all with `start`."),
    *_codes(
        413,
        body_too_large="The body is over the limit.",
        file_too_large="The file is over `MAX_FILE_BYTES`, or `MAX_ATTACHMENT_BYTES`.",
    ),
    *_codes(413, text_too_long="An attached file has too many pages, or characters of text."),
    *_codes(415, unsupported_file="A file of this kind cannot be attached. The message names those that can."),
    *_codes(415, unsupported_media_type="The body is not JSON by its content type, or it is compressed."),
    *_codes(422, idempotency_key_reused="The `Idempotency-Key` came with another body before. Send a new key."),
    *_codes(
        429,
        quota_exceeded="Your own limit is reached.",
        rate_limit_exceeded="A limit over time is reached (docs/limits.md): `Retry-After` says when it ends.",
        too_many_streams="Your request has waited (docs/fairness.md#the-door) for one of your answers to end for as "
        "long as it may, or as many wait already.",
        too_many_batches="You have as many open batches as you may.",
        too_many_readers="As many readers follow this stream as may.",
        too_many_acks="More than 20 acknowledgements a second.",
        too_many_wrong_keys="Your address has sent too many wrong API keys within a minute.",
        too_many_connections="Your address has as many connections as it may.",
        too_many_jobs="You have as many open jobs as you may.",
    ),
    *_codes(FILE, too_many_requests="The batch has more requests than `MAX_BATCH_LINES`."),
    *_codes(429, too_many_uploads="You upload as many files at a time as you may."),
    *_codes(
        499,
        STREAM,
        cancelled="The answer was stopped. Of an answer that was not streamed, a response with status 499.",
        abandoned="The answer had no reader for too long.",
    ),
    *_codes(FILE, batch_cancelled="The row was not answered before its batch was cancelled (499)."),
    *_codes(
        500,
        STREAM,
        internal_error="A fault of the server. Its log has the cause under `X-Request-Id`.",
        numerical_error="The model gave numbers that are not finite for this request.",
        too_many_tool_rounds="The model of a pipeline called tools in each of its rounds, and gave no answer.",
        pipeline_failed="The function of a pipeline raised. The log has the cause under the stream's id.",
        producer_lost="The process that wrote the answer is gone, and no process can continue it.",
        out_of_memory="The engine ran out of memory on this request.",
        grammar_failed="The grammar became too complex, or no token of the model continues the text.",
        log_lost="The site's log has lost events that were shown.",
    ),
    *_codes(
        503,
        overloaded="The request would wait too long, or the server has too many connections. `Retry-After`: until it "
        "would be accepted, at most 120 s.",
        anonymous_places_taken="Visitors without a login have all their places, and the request has waited.",
        engine_loading="The model is still being loaded after a minute (`ENGINE_WAIT_SECONDS`).",
        model_waiting_for_memory="The model waits for the memory of models that answer (`MEMORY_BYTES`). The message "
        "has its place in the queue.",
        model_too_large="The model takes more memory than all engines (`MEMORY_BYTES`) or this machine have. The "
        "message has both sizes.",
        engine_asleep="The model is asleep, and the action is for a model that is loaded.",
        engine_busy="The model answers, or is not ready, and does not go to sleep now.",
        no_engine="The engine of the model was not started. The message has the command.",
        asgi_required="The site runs under WSGI.",
        site_misconfigured="The site's settings are wrong, or its folder cannot be used. Its log has the problem.",
        engine_paused="An operator has paused the model.",
        engine_draining="The engine finishes its open answers before it is stopped or replaced.",
        grammar_queue_full="Too many grammars wait to be compiled, or those of open answers take all the memory.",
        unmet_needs="During a rolling restart: a newer process began this answer, which needs what this process lacks.",
        rule_failed="A function of the site (`PERMISSION`, `TENANT`, `MODERATION`) failed; the site's log "
        "has the cause.",
        stop_pending="The stop is recorded, and its end could not be written for 9 s. It takes effect by itself.",
        database_unavailable="The site's database is locked, or cannot be reached: within five seconds of the query. A "
        "write may have been done all the same where the database went away under it: send an `Idempotency-Key`.",
        uploads_busy="All callers together upload as many files at a time as they may.",
        log_down="The site's stream log cannot be reached.",
    ),
    *_codes(
        503,
        STREAM,
        engine_unavailable="The engine failed, is being replaced, or this server goes down.",
        engine_died="The engine stopped working.",
        engine_closed="The engine was shut down.",
        upstream_error="The server that runs the model answered something that is no answer.",
        upstream_timeout="The server that runs the model gave no token in time.",
        cannot_continue="The connection to the server that runs the model was lost in the middle, and that server "
        "cannot continue there. Ask again.",
        queue_timeout="An accepted request waited too long for its first step.",
        mcp_unavailable="An MCP server whose tools a pipeline offers cannot be reached, or lacks a tool of its `TOOLS` "
        "(docs/mcp.md).",
    ),
    *_codes(503, load_failed="The model cannot be loaded: the state of a model in `/readyz`."),
    *_codes(504, STREAM, timeout="`timeout_seconds` ran out."),
    *_codes(FILE, batch_expired="The row was not answered within the batch's window (504)."),
    *_codes(
        507,
        log_full="The disk or memory of the site's stream log is full.",
        storage_full="Your files take all the room they may. Delete some.",
        insufficient_storage="The server's disk has no room for your upload.",
    ),
    *_codes(
        FILE,
        invalid_json_line="A line is no JSON object.",
        missing_required_parameter="A line lacks `custom_id`, `method`, `url` or `body`.",
        invalid_custom_id="A `custom_id` is no text, empty or too long.",
        duplicate_custom_id="A `custom_id` comes twice.",
        invalid_method="A line's `method` is not POST.",
        invalid_url="A line's `url` is not the batch's endpoint.",
        invalid_body="A line's `body` is no request for its address.",
        stream_not_supported="A line asks for a stream.",
        line_too_large="A line is over the limit of a body.",
        input_file_not_found="The file of the batch is gone.",
    ),
    *_codes(FILE, JOB, worker_lost="Workers that ran this batch or job were killed, again and again."),
    *_codes(
        JOB,
        not_repeatable="A pipeline that is tried again took its steps in another order (docs/jobs.md).",
        step_result_too_large="The result of a pipeline's step is too large to be kept.",
        webhook_refused="The target of a webhook refused the message.",
        webhook_unreachable="The target of a webhook could not be reached.",
    ),
    *_codes(
        PYTHON,
        inside_transaction="SQLite lets no job be queued in a transaction. Call `transaction.on_commit`.",
    ),
)

CODES: Mapping[str, Code] = MappingProxyType({code.code: code for code in _ALL})
