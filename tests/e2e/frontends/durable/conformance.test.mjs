// The package's own tests of the protocol, against answers of our site: SITE, STATE and KEY name it.

import { runConformanceTests } from "@durable-streams/server-conformance-tests"
import { afterAll, beforeAll } from "vitest"

import { bridge } from "./bridge.mjs"

const options = { baseUrl: "", longPollTimeoutMs: 20_000 }
let front

beforeAll(async () => {
  front = await bridge(process.env.SITE, process.env.STATE, process.env.KEY)
  options.baseUrl = front.url
})
afterAll(() => front.close())
runConformanceTests(options)
