// Reads a stream with @durable-streams/client. Arguments: what to read, the address of its log, and for `live` the mode.
// The key is in KEY. `every` reads on from each offset; `live` follows to the end, and tells each event's number at once.

import { stream } from "@durable-streams/client"

const [what, url, mode] = process.argv.slice(2)
const headers = { authorization: `Bearer ${process.env.KEY}` }
const tell = (value) => console.log(JSON.stringify(value))

async function whole(offset = "-1") {
  const response = await stream({ url, headers, offset, live: false })
  const items = await response.json()
  return { items, offset: response.offset, isClosed: response.streamClosed, upToDate: response.upToDate }
}

async function every() {
  const { items, offset } = await whole()
  const head = offset.slice(0, offset.lastIndexOf("-") + 1)
  const rests = []
  for (let seq = 0; seq <= items.length; seq += 1) {
    const rest = await whole(head + String(seq).padStart(16, "0"))
    rests.push(rest.items.map((item) => item.seq))
  }
  tell({ num: items.length, rests })
}

async function live() {
  const response = await stream({ url, headers, offset: "-1", live: mode, sseResilience: { logWarnings: false } })
  const items = []
  for await (const item of response.jsonStream()) {
    items.push(item)
    tell({ seq: item.seq })
  }
  tell({ items, isClosed: response.streamClosed })
}

if (what === "whole") tell(await whole())
else if (what === "every") await every()
else await live()
