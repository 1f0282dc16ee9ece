// A chat that shows what each turn reuses: before it is sent, while it is read, and when it is done.

import { html, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { count, percent, rate, seconds } from "./format.js";
import { Empty, Panel, Announcement, Stack } from "./components.js";
import { ask, events, json, read, write } from "./server.js";
import { origins, speed, tierName, why } from "./calls.js";

const KEPT = "firn.chat";
const PROBE_MS = 500;
const QUIET_MS = 60000; // after a refusal: probes must not use up the quota that the turns need
const MAX_KEPT = 400000;

export function Chat({ store, model }) {
  const [turns, setTurns] = useState(recall);
  const [draft, setDraft] = useState("");
  const [probe, setProbe] = useState(null);
  const [fault, setFault] = useState("");
  const abort = useRef(null);
  const quiet = useRef(0);
  const log = useRef(null);
  const writing = turns.at(-1)?.writing ?? false;
  const known = store.models.find((m) => m.id === model);
  const loaded = !store.several || known?.state === "loaded";
  const chats = !known?.capabilities?.length || known.capabilities.includes("chat");

  // While the user types: what would this turn reuse? No model is loaded for the answer.
  useEffect(() => {
    if (!draft.trim() || writing || !loaded || store.status !== "live" || Date.now() < quiet.current) return setProbe(null);
    const stop = new AbortController();
    const timer = setTimeout(async () => {
      try {
        const body = { model, messages: [...history(turns), { role: "user", content: draft }] };
        setProbe(await json("v1/cache/probe", { method: "POST", body, signal: stop.signal }));
      } catch (error) {
        if (error.status === 429) quiet.current = Date.now() + QUIET_MS;
        setProbe(null); // only a hint: the turn itself says what is wrong
      }
    }, PROBE_MS);
    return () => {
      clearTimeout(timer);
      stop.abort();
    };
  }, [draft, writing, model, loaded, store.status, store.ended]);

  useEffect(() => {
    const kept = JSON.stringify(turns.map(({ writing: _, ...turn }) => turn));
    write(sessionStorage, KEPT, turns.length && kept.length < MAX_KEPT ? kept : "");
    if (log.current) log.current.scrollTop = log.current.scrollHeight;
  }, [turns]);

  const send = async (event) => {
    event?.preventDefault();
    const text = draft.trim();
    if (!text || writing) return;
    const messages = [...history(turns), { role: "user", content: text }];
    setDraft("");
    setFault("");
    setTurns([...turns, { role: "user", text }, { role: "assistant", text: "", thought: "", writing: true, complete: false }]);
    const line = (abort.current = new AbortController());
    const update = (change) => setTurns((old) => {
      if (abort.current !== line) return old; // a new chat has begun meanwhile
      return [...old.slice(0, -1), { ...old.at(-1), ...change(old.at(-1)) }];
    });
    try {
      const body = { model, messages, stream: true, stream_options: { include_usage: true } };
      const response = await ask("v1/chat/completions", { method: "POST", body, signal: line.signal });
      const call = response.headers.get("x-request-id");
      update(() => ({ call }));
      for await (const [, data] of events(response)) {
        if (data === "[DONE]") break;
        take(JSON.parse(data), update);
      }
      update(() => ({ writing: false }));
    } catch (error) {
      const stopped = line.signal.aborted;
      update(() => ({ writing: false, stopped, failed: !stopped }));
      if (!stopped) setFault(error.message || "The connection was lost.");
    }
  };

  const keys = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
  };
  const anew = () => {
    abort.current?.abort();
    abort.current = null;
    setTurns([]);
    setFault("");
  };
  return html`<${Panel} id="chat" title="Chat" note=${model} tools=${turns.length > 0 && html`<button onClick=${anew}>New chat</button>`}>
    <div class="log" ref=${log} tabindex="0" role="log" aria-label="Conversation">
      ${turns.length === 0 && html`<${Empty}>Say something. Each turn shows how much of its prompt was reused: from the second one on, nearly all.<//>`}
      ${turns.map((turn, i) => html`<${Turn} key=${i} turn=${turn} call=${store.calls.get(turn.call)} now=${store.now()} />`)}
    </div>
    ${fault && html`<p class="warn" role="alert">${fault}</p>`}
    <form class="composer" onSubmit=${send}>
      <label class="unseen" for="draft">Message</label>
      <textarea id="draft" rows="2" value=${draft} placeholder=${chats ? "Message (Enter sends, Shift+Enter is a new line)" : "This model does not chat"} disabled=${!chats}
        onInput=${(e) => setDraft(e.target.value)} onKeyDown=${keys} aria-describedby="probe"></textarea>
      ${writing ? html`<button type="button" onClick=${() => abort.current?.abort()}>Stop</button>` : html`<button class="primary" disabled=${!draft.trim() || !chats}>Send</button>`}
    </form>
    <p id="probe" class="reading" aria-live="polite">${probeText(probe, loaded, model)}</p>
  <//>`;
}

function probeText(probe, loaded, model) {
  if (!loaded) return `${model} is not loaded: the first message loads it.`;
  if (!probe || probe.enabled === false) return "\u00a0";
  const { cached_tokens: cached, prompt_tokens: prompt } = probe;
  const tiers = Object.keys(probe.tiers ?? {}).map(tierName).join(" and ");
  const from = cached ? (tiers ? ` from ${tiers}` : "") : `: ${why(probe)}`;
  return `Sent now, ${count(cached)} of ${count(prompt)} tokens (${percent(cached / Math.max(prompt, 1))}) would be reused${from}.`;
}

function take(chunk, update) {
  if (chunk.error) throw new Error(chunk.error.message);
  const delta = chunk.choices?.[0]?.delta ?? {};
  if (delta.content) update((turn) => ({ text: turn.text + delta.content }));
  if (delta.reasoning_content) update((turn) => ({ thought: turn.thought + delta.reasoning_content }));
  if (chunk.choices?.[0]?.finish_reason) update(() => ({ complete: true }));
  if (chunk.usage) {
    const { prompt_tokens, completion_tokens, prompt_tokens_details } = chunk.usage;
    update(() => ({ usage: { prompt: prompt_tokens, reply: completion_tokens, cached: prompt_tokens_details?.cached_tokens ?? 0 } }));
  }
}

function Turn({ turn, call, now }) {
  if (turn.role === "user") return html`<div class="turn user"><p>${turn.text}</p></div>`;
  const whole = turn.complete || turn.stopped || turn.failed || turn.writing;
  const forgotten = turn.text ? "" : ", and the question is left out of what follows";
  return html`<div class="turn assistant">
    ${turn.thought && html`<details class="thought"><summary>Thinking</summary><p>${turn.thought}</p></details>`}
    <p>${turn.text}${turn.writing && html`<span class="caret" aria-hidden="true"></span>`}</p>
    ${!turn.text && !turn.thought && turn.complete && html`<p class="hint">(The reply is empty.)</p>`}
    ${turn.stopped && html`<p class="hint">Stopped here${forgotten}.</p>`}
    ${turn.failed && html`<p class="hint">${turn.text ? "The reply broke off here" : "No reply"}${forgotten}.</p>`}
    ${!whole && html`<p class="hint">The page was loaded again while this was being written.</p>`}
    <${Reuse} turn=${turn} call=${call} now=${now} />
  </div>`;
}

/** What the server reports of the call; once it no longer does, what the reply itself reported. */
function Reuse({ turn, call, now }) {
  const usage = turn.usage;
  if (!call && !usage) return turn.writing ? html`<p class="reuse">waiting …</p>` : null;
  const prompt = call?.prompt_tokens || usage?.prompt || 0;
  const cached = call ? call.cached_tokens : usage.cached;
  const settled = !call || call.admitted_s != null;
  const parts = call && settled ? origins(call) : [["memory", "reused", cached], ["computed", "computed", Math.max((call?.read_tokens ?? prompt) - cached, 0)]];
  const quick = call && speed(call, now);
  return html`<div class="reuse">
    <${Stack} label="The prompt of this turn" whole=${prompt} parts=${parts} format=${count} />
    <p>${settled ? html`<b>${percent(cached / Math.max(prompt, 1))} reused</b>: ${count(cached)} of ${count(prompt)} tokens` : `${count(call.read_tokens)} of ${count(prompt)} tokens read`}
      ${call?.first_token_s != null && `, first token after ${seconds(call.first_token_s)}`}
      ${quick ? `, ${rate(quick)} tokens per second` : ""}
      ${call && settled && cached < prompt - 1 ? `; ${why(call)}` : ""}</p>
    ${!turn.writing && html`<${Announcement}>${percent(cached / Math.max(prompt, 1))} of the prompt was reused<//>`}
  </div>`;
}

/** What the model is told: a question that brought no text, as one that was refused, is left out. */
function history(turns) {
  const kept = turns.filter((turn, i) => (turn.role === "user" ? turns[i + 1]?.text : turn.text));
  return kept.map((turn) => ({ role: turn.role, content: turn.text }));
}

function recall() {
  try {
    return JSON.parse(read(sessionStorage, KEPT) || "[]");
  } catch {
    return [];
  }
}
