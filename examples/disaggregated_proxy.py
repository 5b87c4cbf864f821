#!/usr/bin/env python3
"""A proxy before two servers: one computes prompts, the other goes on with their pages, which it reads over NIXL.

    python disaggregated_proxy.py --port 8000 --prefill http://localhost:8100 --decode http://localhost:8200

Clients talk to it as to one server (completions and chats). No balancing, no retries: see docs/disaggregated.md.
"""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import ClientSession, ClientTimeout, web

SESSION: web.AppKey[ClientSession] = web.AppKey("session", ClientSession)
ENDS = ("max_tokens", "max_completion_tokens")


def prefill_request(body: dict[str, Any]) -> dict[str, Any]:
    """`body` as the prefill server gets it: one token, and a note that another server goes on."""
    rest = {name: value for name, value in body.items() if name not in ("stream_options", "min_tokens", *ENDS)}
    params = {"do_remote_decode": True, "do_remote_prefill": False}
    return {**rest, "max_tokens": 1, "stream": False, "kv_transfer_params": params}


def make_app(prefill: str, decode: str) -> web.Application:
    """The proxy of the servers with the URLs `prefill` and `decode`."""

    async def complete(request: web.Request) -> web.StreamResponse:
        body, session = await request.json(), request.app[SESSION]
        async with session.post(prefill + request.path, json=prefill_request(body)) as answer:
            if answer.status != 200:
                return web.Response(status=answer.status, body=await answer.read(), content_type=answer.content_type)
            params = (await answer.json())["kv_transfer_params"]
        async with session.post(decode + request.path, json={**body, "kv_transfer_params": params}) as answer:
            response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            return response

    async def keep_session(app: web.Application) -> AsyncIterator[None]:
        async with ClientSession(timeout=ClientTimeout(total=None)) as app[SESSION]:
            yield

    app = web.Application()
    app.cleanup_ctx.append(keep_session)
    app.router.add_post("/v1/completions", complete)
    app.router.add_post("/v1/chat/completions", complete)
    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8000, help="default: %(default)s")
    parser.add_argument("--prefill", default="http://localhost:8100", help="prefill server (default: %(default)s)")
    parser.add_argument("--decode", default="http://localhost:8200", help="decode server (default: %(default)s)")
    options = parser.parse_args()
    web.run_app(make_app(options.prefill, options.decode), port=options.port)


if __name__ == "__main__":
    main()
