// A failure in words: what happened, and what can be done about it.

/** Whether the server refused because prompt and answer do not fit the model's context. */
function tooLong(error) {
  if (error.code === "context_length_exceeded") return true;
  return (
    error.status === 400 && /context (?:length|window)|max_model_len|maximum context|too long/i.test(error.message)
  );
}

/** The server's message as a sentence: it begins small and has no full stop. */
function sentence(message) {
  const text = message.trim();
  return text && text[0].toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");
}

/**
 * Explain an ApiError. `settings` tells which parameters have a field here.
 * Returns {title, text, actions}, where actions are of "retry", "key", "new", "settings" (with `field`) and `wait`
 * is the number of seconds after which it is worth trying again by itself.
 */
export function explain(error, settings) {
  const text = sentence(error.message);
  if (error.kind === "unreachable") {
    const advice = "Check that qengine serve is running and that this computer reaches it, then try again.";
    return { title: "The server does not answer", text: advice, actions: ["retry"] };
  }
  if (error.kind === "interrupted") {
    const advice =
      "What had come is kept. The server may have been stopped or restarted, or a proxy closed the connection.";
    return { title: "The answer broke off", text: advice, actions: ["retry"] };
  }
  if (error.status === 401) {
    return { title: "The server asks for an API key", text, actions: ["key"] };
  }
  if (error.status === 429) {
    return { title: "The server is busy", text, actions: ["retry"], wait: error.retryAfter ?? 5 };
  }
  if (error.status === 503) {
    return { title: "The server is not ready", text, actions: ["retry"], wait: error.retryAfter ?? undefined };
  }
  if (tooLong(error)) {
    const advice = "Start a new conversation, shorten the message (edit it), or lower max tokens.";
    return {
      title: "The conversation is too long",
      text: `${text} ${advice}`,
      actions: ["new", "settings"],
      field: "max_tokens",
    };
  }
  if (error.status === 404) {
    return { title: "The server does not have this model", text, actions: ["retry"] };
  }
  if (error.status !== null && error.status < 500) {
    const field = settings.has(error.param) ? error.param : undefined;
    const actions = field ? ["settings", "retry"] : ["retry"];
    return { title: "The server refused the request", text, actions, field };
  }
  const advice = "If it happens again, the server's log says why.";
  return { title: "The server failed", text: `${text} ${advice}`, actions: ["retry"] };
}
