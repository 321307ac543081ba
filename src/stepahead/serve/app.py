"""The routes.  Knows requests, the front and answers; no processes, no sockets."""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from msgspec import UNSET, UnsetType
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from stepahead import __version__
from stepahead.errors import RequestError
from stepahead.llm.prompts import Prompt, template_variables
from stepahead.llm.reader import Reader
from stepahead.llm.tools import read_tools
from stepahead.serve.calls import Call
from stepahead.serve.cards import (
    Aborted,
    Detokenized,
    Flushed,
    ModelCard,
    ModelList,
    Status,
    TokenizerInfo,
    Tokens,
    Version,
)
from stepahead.serve.embeddings import AskedEmbeddings, embedding_reply, read_embedding_request
from stepahead.serve.front import Front
from stepahead.serve.http import (
    KeyGuard,
    StreamAnswer,
    fault_answer,
    json_answer,
    query_of,
    read_body,
    refusal_answer,
    unheard_answer,
    watching,
)
from stepahead.serve.openapi import Exposed, openapi_document
from stepahead.serve.options import ServeConfig
from stepahead.serve.refusal import Refusal, bad_request, refusal_of
from stepahead.serve.replies import chat_reply, text_reply
from stepahead.serve.requests import (
    AskedChat,
    AskedCompletion,
    TokenizeFields,
    read_abort,
    read_chat_request,
    read_completion_request,
    read_detokenize,
    read_tokenize,
)
from stepahead.serve.streams import ChatStory, TextStory
from stepahead.serve.web import web_page
from stepahead.text.bad_words import with_bad_word_ids
from stepahead.text.texts import Texts
from stepahead.types import RequestOutput, SamplingParams, as_prompt
from stepahead.watch.loopback import LocalOnly

Endpoint = Callable[[Request], Awaitable[Response]]


def serve_app(front: Front, config: ServeConfig, model: str, reader: Reader) -> Starlette:
    """The app of a server; `model` is what clients call it."""
    routes = Routes(front, config, model, reader)
    endpoints: list[tuple[str, str, Endpoint]] = [
        ("POST", "/v1/chat/completions", routes.chat),
        ("POST", "/v1/completions", routes.completions),
        ("POST", "/v1/embeddings", routes.embeddings),
        ("GET", "/v1/models", routes.models),
        ("GET", "/v1/models/{model:path}", routes.model),
        ("POST", "/tokenize", routes.tokenize),
        ("POST", "/detokenize", routes.detokenize),
        ("GET", "/tokenizer_info", routes.tokenizer_info),
        ("GET", "/health", routes.health),
        ("GET", "/ready", routes.ready),
        ("GET", "/version", routes.version),
        ("GET", "/openapi.json", routes.openapi),
        ("POST", "/abort", routes.abort),
        ("POST", "/flush_cache", routes.flush_cache),
        *(("GET", path, routes.page) for path in ("/state", "/metrics", "/lanes", "/trace")),
        ("GET", "/", web_page),
    ]
    exposed = [Exposed(how, path, _first_line(endpoint)) for how, path, endpoint in endpoints]
    with_key = config.api_key is not None
    routes.document = openapi_document(exposed, with_key, model, reader.vocab_size)
    middleware = []
    if config.allow_origins:
        open_to: dict[str, Any] = {"allow_origins": config.allow_origins}
        allowed = {"allow_methods": ["GET", "POST"], "allow_headers": ["*"]}
        middleware.append(Middleware(CORSMiddleware, **open_to, **allowed))
    if config.api_key is not None:
        middleware.append(Middleware(KeyGuard, key=config.api_key))
    elif config.local:
        # nobody is asked for a key: a page whose own name leads to this machine must not be served
        middleware.append(Middleware(LocalOnly, more=(config.host,)))
    return Starlette(
        routes=[Route(path, endpoint, methods=[how]) for how, path, endpoint in endpoints],
        middleware=middleware,
        exception_handlers={
            Refusal: refusal_answer,
            HTTPException: refusal_answer,
            ClientDisconnect: unheard_answer,
            Exception: fault_answer,
        },
    )


def _first_line(endpoint: Endpoint) -> str:
    return (endpoint.__doc__ or "").partition("\n")[0].rstrip(".")


class Routes:
    """One method a route; `document` is what /openapi.json tells of them."""

    def __init__(self, front: Front, config: ServeConfig, model: str, reader: Reader) -> None:
        self._front = front
        self._model = model
        self._reader = reader
        self._vocab_size = reader.vocab_size
        self._most_bytes = int(config.max_body_mb * 1e6)
        self._began = int(time.time())
        self.document: dict[str, Any] = {}

    # --- answers ------------------------------------------------------------------------------

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions"""
        asked = read_chat_request(await self._body(request))
        self._check_model(asked.model)
        self._front.check_room(asked.params.n)
        prompt = await self._off_loop(partial(_chat_prompt, self._reader, asked))
        id, created = asked.label or f"chatcmpl-{uuid.uuid4().hex}", int(time.time())
        held = asked.structure if asked.tools is None else "tools"
        call = await self._begin(id, [prompt], asked.params, asked.stream, held)
        texts = self._front.texts
        if asked.stream:
            story = ChatStory(asked, call, texts, created, self._model)
            return StreamAnswer(call, story, self._front.cancel)
        outputs = await self._whole(request, call)
        return json_answer(chat_reply(asked, texts, id, created, self._model, outputs[0]))

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions"""
        asked = read_completion_request(await self._body(request))
        self._check_model(asked.model)
        many = "n" if len(asked.prompts) == 1 else "prompt"
        self._front.check_room(asked.params.n * len(asked.prompts), many)
        prompts = await self._prompts(asked)
        id, created = asked.label or f"cmpl-{uuid.uuid4().hex}", int(time.time())
        call = await self._begin(id, prompts, asked.params, asked.stream, asked.structure)
        texts = self._front.texts
        if asked.stream:
            story = TextStory(asked, call, texts, created, self._model)
            return StreamAnswer(call, story, self._front.cancel)
        outputs = await self._whole(request, call)
        return json_answer(text_reply(asked, texts, id, created, self._model, outputs))

    async def embeddings(self, request: Request) -> Response:
        """POST /v1/embeddings"""
        asked = read_embedding_request(await self._body(request))
        self._check_model(asked.model)
        self._front.check_room(len(asked.prompts), "input")
        id, created = asked.label or f"embd-{uuid.uuid4().hex}", int(time.time())
        try:
            prompts = await self._prompts(asked)
            call = await self._begin(id, prompts, asked.params, False)
        except Refusal as refusal:
            if refusal.param == "prompt":
                refusal.param = "input"
            raise
        outputs = await self._whole(request, call)
        return json_answer(embedding_reply(asked, id, created, self._model, outputs))

    async def _prompts(self, asked: AskedCompletion | AskedEmbeddings) -> list[Prompt]:
        found: list[Prompt] = await self._off_loop(
            lambda: [_prompt(self._reader, one, asked) for one in asked.prompts]
        )
        return found

    async def _begin(
        self,
        id: str,
        prompts: list[Prompt],
        params: SamplingParams,
        stream: bool,
        held: str = "structured_outputs",
    ) -> Call:
        """A call that the engine has taken; Refusal.  `held` is the field that grammars are of."""
        front = self._front
        front.check_room(params.n * len(prompts))  # others may have come meanwhile
        front.check_lengths(prompts)
        if params.bad_words:
            params = await self._off_loop(partial(with_bad_word_ids, params, front.texts))
            front.check_room(params.n * len(prompts))
        call = front.begin(id, prompts, params, stream)
        try:
            await call.settled()
        except BaseException as error:
            front.cancel(call)
            if isinstance(error, Refusal) and error.param == "structured_outputs":
                error.param = held
            raise
        return call

    async def _whole(self, request: Request, call: Call) -> list[RequestOutput]:
        try:
            with watching(request.receive, partial(self._front.cancel, call)):
                return await call.answers()
        finally:
            self._front.cancel(call)

    async def _body(self, request: Request) -> bytes:
        return await read_body(request, self._most_bytes)

    async def _off_loop(self, fn: Callable[[], Any]) -> Any:
        try:
            return await self._front.off_loop(fn)
        except RequestError as error:
            raise refusal_of(error) from error

    def _check_model(self, named: str | None) -> None:
        if named is not None and named != self._model:
            words = f"model {named!r} is not here; {self._model!r} is"
            raise Refusal(404, words, "model_not_found", "model")

    # --- texts --------------------------------------------------------------------------------

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize"""
        fields = read_tokenize(await self._body(request))
        self._check_model(fields.model)
        ids = await self._off_loop(partial(_tokenize, self._reader.texts, fields))
        strs: list[str] | UnsetType = UNSET
        if fields.return_token_strs:
            pieces = self._front.texts.token_bytes
            strs = [pieces[token].decode("utf-8", "replace") for token in ids]
        return json_answer(Tokens(len(ids), self._model_len(), ids, strs))

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize"""
        fields = read_detokenize(await self._body(request))
        self._check_model(fields.model)
        for token in fields.tokens:
            if not 0 <= token < self._vocab_size:
                words = f"token id {token} is outside the vocabulary 0..{self._vocab_size - 1}"
                raise bad_request(words, "tokens")
        texts = self._front.texts
        prompt = await self._off_loop(partial(texts.decode, fields.tokens, False))
        return json_answer(Detokenized(prompt))

    async def tokenizer_info(self, request: Request) -> Response:
        """GET /tokenizer_info: the texts of its special tokens, as far as clients need them."""
        texts = self._front.texts
        ids = (texts.bos_id, next(iter(texts.eos_ids), None))
        pieces = [None if id is None else texts.token_bytes[id].decode() for id in ids]
        return json_answer(TokenizerInfo(*pieces))

    # --- the server itself --------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        """GET /v1/models"""
        return json_answer(ModelList([self._card()]))

    async def model(self, request: Request) -> Response:
        """GET /v1/models/NAME"""
        self._check_model(request.path_params["model"])
        return json_answer(self._card())

    def _card(self) -> ModelCard:
        return ModelCard(self._model, self._began, self._model_len())

    def _model_len(self) -> int | None:
        return None if self._front.ready is None else self._front.ready.model_len

    async def health(self, request: Request) -> Response:
        """GET /health: whether it lives."""
        front = self._front
        if front.failure is not None:
            front.check_ready()
        if front.draining:
            return json_answer(Status("draining"))
        return json_answer(Status("loading" if front.ready is None else "ok"))

    async def ready(self, request: Request) -> Response:
        """GET /ready: whether it takes requests."""
        self._front.check_ready()
        return json_answer(Status("ready"))

    async def version(self, request: Request) -> Response:
        """GET /version"""
        return json_answer(Version(__version__))

    async def openapi(self, request: Request) -> Response:
        """GET /openapi.json: all of this, for programs."""
        return json_answer(self.document)

    async def abort(self, request: Request) -> Response:
        """POST /abort"""
        label = read_abort(await self._body(request))
        return json_answer(Aborted(self._front.abort(label)))

    async def flush_cache(self, request: Request) -> Response:
        """POST /flush_cache"""
        return json_answer(Flushed(await self._front.flush_cache()))

    async def page(self, request: Request) -> Response:
        """GET /state, /metrics, /lanes and /trace, which the engine's process makes."""
        accepted = request.headers.get("accept-encoding", "")
        page = await self._front.page(request.url.path, query_of(request), accepted)
        headers = {name: value for name, value in page.headers if name != "content-length"}
        return Response(page.body, page.status, headers)


def _chat_prompt(reader: Reader, asked: AskedChat) -> Prompt:
    return reader.read_chat(
        asked.messages,
        asked.params,
        asked.tools,
        param=asked.structure,
        parse=asked.told_apart,
        add_generation_prompt=asked.add_generation_prompt,
        **template_variables(asked.template_kwargs),
    )


def _prompt(
    reader: Reader, given: str | list[int], asked: AskedCompletion | AskedEmbeddings
) -> Prompt:
    if isinstance(given, str):
        prompt = Prompt(reader.texts.encode(given, asked.add_special_tokens), given)
    else:
        as_prompt(given, reader.vocab_size)  # refuses ids that are not there
        prompt = Prompt(given)
    return reader.hold(prompt, asked.params, asked.structure)


def _tokenize(texts: Texts, fields: TokenizeFields) -> list[int]:
    if fields.messages is None:
        return texts.encode(fields.prompt or "", fields.add_special_tokens is not False)
    variables = template_variables(fields.chat_template_kwargs)
    if (wish := read_tools(fields.tools)) is not None:
        variables["tools"] = list(wish.given)
    return texts.encode_chat(
        fields.messages, add_generation_prompt=fields.add_generation_prompt, **variables
    )
