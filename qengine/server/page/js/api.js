// The server's API: requests with the key, streams of answers, and failures as ApiError.

import { forget, load, save } from "./storage.js";

const KEY = "api-key";

/**
 * A request that failed. kind: "unreachable" (no answer), "interrupted" (the stream broke off), "refused" (the server
 * said no, with a status), "failed" (the server said within a stream that it could not go on).
 */
export class ApiError extends Error {
  constructor(kind, message, { status = null, param = null, code = null, type = null, retryAfter = null } = {}) {
    super(message);
    Object.assign(this, { kind, status, param, code, type, retryAfter });
  }
}

/** The API key in use, or "". */
export function apiKey() {
  return load(KEY, "", "sessionStorage") || load(KEY, "");
}

/** Use a key ("" for none) in this tab, and where `keep` is true in this browser from now on. */
export function setApiKey(key, keep) {
  forget(KEY);
  forget(KEY, "sessionStorage");
  if (key) save(KEY, key, keep ? "localStorage" : "sessionStorage");
}

function headers(more = {}) {
  return apiKey() ? { Authorization: `Bearer ${apiKey()}`, ...more } : more;
}

/** Seconds that Retry-After asks for: a number, or a date. */
function retryAfter(response) {
  const value = response.headers.get("retry-after");
  if (value === null) return null;
  const seconds = /^\d+$/.test(value.trim()) ? Number(value) : (Date.parse(value) - Date.now()) / 1000;
  return Number.isFinite(seconds) ? Math.max(0, Math.ceil(seconds)) : null;
}

/** The error of OpenAI's form in a body, or what else the body has. */
function errorOf(kind, body, fallback, more) {
  const error = body?.error ?? {};
  const message = typeof error === "string" ? error : (error.message ?? body?.detail ?? body?.message ?? fallback);
  const text = typeof message === "string" ? message : JSON.stringify(message);
  const { param = null, code = null, type = null } = typeof error === "string" ? {} : error;
  return new ApiError(kind, text, { param, code, type, ...more });
}

async function refusal(response) {
  const text = await response.text().catch(() => "");
  let body = null;
  try {
    body = JSON.parse(text);
  } catch {
    // a proxy's page, say: the status has to do
  }
  const more = { status: response.status, retryAfter: retryAfter(response) };
  return errorOf("refused", body, `${response.status} ${response.statusText}`.trim(), more);
}

async function request(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { ...options, headers: headers(options.headers), cache: "no-store" });
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new ApiError("unreachable", "The server does not answer.");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

/** The JSON at a path of this server; `timeout` in milliseconds. */
export async function getJson(path, timeout = 10_000) {
  const signal = AbortSignal.timeout(timeout);
  try {
    return await (await request(path, { signal })).json();
  } catch (error) {
    if (error instanceof ApiError) throw error;
    throw new ApiError(
      "unreachable",
      signal.aborted ? "The server takes too long to answer." : "The answer is not JSON.",
    );
  }
}

/** The `data:` texts of an event stream, as they come. */
async function* eventData(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines.map((item) => item.replace(/\r$/, ""))) {
      if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
      else if (line === "" && data.length) {
        yield data.join("\n");
        data = [];
      }
    }
  }
}

/**
 * The chunks of a streamed chat completion. Ends when the server says [DONE]; an abort of `signal` closes the
 * connection, which ends the request on the server too.
 */
export async function* streamChat(body, signal) {
  const options = {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  };
  const response = await request("v1/chat/completions", options);
  try {
    for await (const data of eventData(response)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw errorOf("failed", chunk, "The server could not go on.", {});
      yield chunk;
    }
  } catch (error) {
    if (error instanceof ApiError || signal.aborted) throw error;
    throw new ApiError("interrupted", "The connection broke off before the answer was complete.");
  }
  throw new ApiError("interrupted", "The answer broke off before its end.");
}
