// A front for the conformance suite of Durable Streams, whose tests write what they read: PUT starts an answer of the
// pipeline `tape` at the site, POST writes the tape, GET and HEAD are the site's own, untouched.

import { appendFileSync, mkdirSync } from "node:fs"
import { createServer } from "node:http"
import { join } from "node:path"
import { Readable } from "node:stream"

const NEVER = "0".repeat(32)

export async function bridge(site, state, key) {
  const authorization = `Bearer ${key}`
  const streams = new Map()
  const tapes = join(state, "tapes")
  mkdirSync(tapes, { recursive: true })

  const urlOf = (path) => `${site}/streams/${streams.get(path)?.id ?? NEVER}/log`
  const tail = (path) => fetch(urlOf(path), { method: "HEAD", headers: { authorization } })

  async function write(path, line) {
    const before = (await tail(path)).headers.get("stream-next-offset")
    appendFileSync(join(tapes, streams.get(path).name), line)
    for (;;) {
      const now = (await tail(path)).headers
      if (now.get("stream-next-offset") !== before) return now
      await new Promise((done) => setTimeout(done, 10))
    }
  }

  async function put(path, body) {
    const isNew = !streams.has(path)
    if (isNew) {
      const name = `tape${streams.size}`
      const response = await fetch(`${site}/streams`, {
        method: "POST",
        headers: { authorization, "content-type": "application/json" },
        body: JSON.stringify({ model: "tape", prompt: name }),
      })
      if (!response.ok) throw new Error(`no answer: ${response.status} ${await response.text()}`)
      streams.set(path, { id: response.headers.get("x-stream-id"), name })
      response.body.pipeTo(new WritableStream()).catch(() => {}) // the reader for whom the answer is made
      if (body) await write(path, `${JSON.stringify(body)}\n`)
    }
    const offset = (await tail(path)).headers.get("stream-next-offset")
    return new Response(null, { status: isNew ? 201 : 200, headers: { "stream-next-offset": offset } })
  }

  async function post(path, body, isClosing) {
    if (!streams.has(path)) return new Response(null, { status: 404 })
    let headers = body ? await write(path, `${JSON.stringify(body)}\n`) : undefined
    if (isClosing) headers = await write(path, "end\n")
    return new Response(null, { status: 204, headers: { "stream-next-offset": headers.get("stream-next-offset") } })
  }

  const server = createServer(async (request, response) => {
    const { pathname, search } = new URL(request.url, site)
    const body = await new Response(Readable.toWeb(request)).text()
    const left = new AbortController()
    response.on("close", () => left.abort())
    try {
      let reply
      if (request.method === "PUT") reply = await put(pathname, body)
      else if (request.method === "POST") reply = await post(pathname, body, request.headers["stream-closed"] === "true")
      else {
        const headers = new Headers({ authorization })
        for (const name of ["accept", "if-none-match"]) if (request.headers[name]) headers.set(name, request.headers[name])
        const url = urlOf(pathname) + request.url.slice(pathname.length)
        reply = await fetch(url, { method: request.method, headers, signal: left.signal })
      }
      const kept = [...reply.headers].filter(([name]) => !["content-encoding", "content-length", "connection"].includes(name))
      response.writeHead(reply.status, Object.fromEntries(kept))
      if (reply.body) for await (const chunk of reply.body) response.write(chunk)
      response.end()
    } catch (error) {
      if (left.signal.aborted) return
      console.error(error)
      response.destroy()
    }
  })
  await new Promise((done) => server.listen(0, "127.0.0.1", done))
  return { url: `http://127.0.0.1:${server.address().port}`, close: () => server.close() }
}
