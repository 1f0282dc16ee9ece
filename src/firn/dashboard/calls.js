// Requests as bars over time, and the details of the selected one.

import { html, useRef, useState } from "./vendor/htm-preact.js";
import { clock, count, percent, rate, seconds, tokens } from "./format.js";
import { Empty, Legend, Panel, Table, useTick, useWidth } from "./components.js";

const ROW = 26;
const BAR = 13;
const MIN_PX = 3;
const WINDOWS = [[60, "1 min"], [300, "5 min"], [1800, "30 min"], [7200, "2 h"]];
const N_LISTED = 100;
const N_DRAWN = 400;

const REASONS = {
  "": "nothing more could be",
  "no cache": "reuse is off",
  cold: "nothing that is stored begins like this prompt",
  evicted: "more was stored once, and had to give way to other prefixes",
  "slower to load": "loading more would have taken longer than computing it",
  "not yet loaded": "the rest was still being read when computing got there",
  "no state checkpoint": "more is stored, but this model can resume only where its state was kept",
  "whole chunks only": "with exact reuse a prompt resumes at whole chunks only",
  "one token": "a prompt of one token has nothing to reuse",
  "reading off": "the request asked not to read the cache, or for the logprobs of its prompt",
  damaged: "a record was damaged, so it was not used",
  "read failed": "a record could not be read",
  fault: "the cache had a fault, so it was not used",
};

const FIRST = `Every request will be a bar here: how long it queued, what it reused, what it computed, how long it
  wrote. Ask something, below or from any client.`;
const TIMES = [
  ["queued", "queued"],
  ["lookup", "lookup"],
  ["loading", "loading, while others go on"],
  ["computed", "computing the prompt"],
  ["decoding", "writing the reply"],
  ["crossed", "failed, or the client left"],
];
const ORIGINS = [
  ["memory", "reused from memory"],
  ["ssd", "from SSD"],
  ["neighbour", "from a request beside it"],
  ["computed", "computed (the thin bar below: shares of the prompt)"],
];

export function why(reason) {
  const diverged = /^diverged at token (\d+)/.exec(reason);
  if (diverged) return `from token ${count(Number(diverged[1]))} on it differs from everything stored`;
  return REASONS[reason] ?? reason;
}

/** The phases of a call: [class, from, to] in seconds since its arrival. */
export function phases(call, now) {
  const end = call.ended_s ?? Math.max(now - call.arrived_at, 0);
  const first = call.first_token_s ?? end;
  const row = Math.min(call.row_s ?? (call.phase === "reading" ? 0 : first), end);
  const parts = [["queued", 0, row], ["computed", row, first], ["decoding", first, end]];
  return parts.filter(([, from, to]) => to > from);
}

/** Tokens of its prompt by where they came from: [class, name, tokens]. */
export function origins(call) {
  const tiers = Object.entries(call.tiers).map(([tier, n]) => [tierClass(tier), tierName(tier), n]);
  const parts = [...tiers, ["computed", "computed", computed(call)]];
  return call.skipped_tokens ? [...parts, ["skipped", "not read", call.skipped_tokens]] : parts;
}

/** Tokens of its prompt that are computed: neither reused nor, where it is read in part only, skipped. */
function computed(call) {
  return Math.max(call.prompt_tokens - call.cached_tokens - (call.skipped_tokens ?? 0), 0);
}

export function tierClass(tier) {
  return ["memory", "ssd", "neighbour"].includes(tier) ? tier : "remote";
}

export function tierName(tier) {
  return { memory: "memory", ssd: "SSD", neighbour: "a neighbour" }[tier] ?? tier;
}

export function Calls({ store, model }) {
  const [span, setSpan] = useState(300);
  const [selected, setSelected] = useState(null);
  const [hovered, setHovered] = useState(null);
  const calls = [...store.calls.values()].filter((c) => !model || c.model === model);
  const open = calls.filter((c) => c.ended_s == null);
  useTick(open.length ? 500 : 2000, calls.length > 0);
  const now = store.now();
  const within = calls.filter((c) => c.arrived_at + (c.ended_s ?? Infinity) > now - span);
  const shown = within.sort((a, b) => a.arrived_at - b.arrived_at).slice(-N_DRAWN);
  const last = calls.reduce((a, b) => (a && a.arrived_at > b.arrived_at ? a : b), null);
  const focused = store.calls.get(hovered) ?? store.calls.get(selected) ?? null;
  const tools = html`<span class="field"><label for="span">Time shown</label> <select id="span" value=${span} onChange=${(e) => setSpan(Number(e.target.value))}>
    ${WINDOWS.map(([s, name]) => html`<option value=${s}>${name}</option>`)}
  </select></span>`;
  return html`<${Panel} id="requests" title="Requests" wide tools=${tools}
      note="${open.length ? `${count(open.length)} under way` : "none under way"}, ${count(calls.length)} known${within.length > shown.length ? `, the newest ${count(shown.length)} drawn` : ""}">
    ${shown.length
      ? html`<${Timeline} store=${store} calls=${shown} now=${now} span=${span} selected=${selected}
          onSelect=${setSelected} onHover=${setHovered} />`
      : html`<${Empty}>${calls.length
          ? html`No request in this time. The last one arrived at ${clock(last.arrived_at)}.
              <button class="link" onClick=${() => setSpan(reach(now - last.arrived_at))}>Show it</button>`
          : FIRST}<//>`}
    <${Legend} items=${TIMES} />
    <${Legend} items=${ORIGINS} />
    <div class="details">${focused
      ? html`<${Details} call=${focused} now=${now} />`
      : html`<p class="hint">Point at a bar, or reach it with Tab and the arrow keys, to see its details.</p>`}</div>
    ${calls.length > 0 && html`<${Table} caption="Requests, the newest first" head=${HEAD} rows=${() => rows(calls, now)} />`}
  <//>`;
}

function reach(age) {
  return (WINDOWS.find(([s]) => s > age) ?? WINDOWS.at(-1))[0];
}

function Timeline({ store, calls, now, span, selected, onSelect, onHover }) {
  const [ref, width] = useWidth();
  const box = useRef(null);
  const lanes = 1 + Math.max(...calls.map((c) => store.lanes.get(c.id) ?? 0));
  const height = lanes * ROW + 22;
  const from = now - span;
  const x = (t) => ((t - from) / span) * width;
  const inOrder = [...calls].sort((a, b) => a.arrived_at - b.arrived_at);
  const current = inOrder.some((c) => c.id === selected) ? selected : inOrder.at(-1).id;
  const move = (event) => {
    const at = inOrder.findIndex((c) => c.id === current);
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, ArrowUp: at - 1, ArrowDown: at + 1, Home: 0, End: inOrder.length - 1 }[event.key];
    if (to === undefined || !inOrder[to]) return;
    event.preventDefault();
    onHover(null);
    onSelect(inOrder[to].id);
    requestAnimationFrame(() => box.current?.querySelector("[tabindex='0']")?.focus());
  };
  return html`<div class="timeline scroll" ref=${ref}>
    ${width > 0 && html`<svg ref=${box} width=${width} height=${height} role="listbox" aria-label="Requests over time"
        onKeyDown=${move} onMouseLeave=${() => onHover(null)}>
      ${axis(span).map((t) => html`<g key=${t}>
        <line class="grid" x1=${x(now - t)} x2=${x(now - t)} y1="0" y2=${height - 18} />
        <text class="tick" x=${x(now - t)} y=${height - 5} text-anchor=${t === 0 ? "end" : "middle"}>${t === 0 ? "now" : `−${t % 60 ? `${t} s` : `${t / 60} min`}`}</text>
      </g>`)}
      ${inOrder.map((call) => html`<${Bar} key=${call.id} call=${call} now=${now} x=${x} width=${width}
        y=${(store.lanes.get(call.id) ?? 0) * ROW + 4} focusable=${call.id === current} chosen=${call.id === selected}
        onSelect=${onSelect} onHover=${onHover} />`)}
    </svg>`}
  </div>`;
}

function axis(span) {
  const step = { 60: 15, 300: 60, 1800: 300, 7200: 1800 }[span];
  return Array.from({ length: span / step }, (_, i) => i * step);
}

function Bar({ call, now, x, y, width, focusable, chosen, onSelect, onHover }) {
  const t0 = call.arrived_at;
  const clip = (a, b) => {
    const left = Math.max(x(t0 + a), 0);
    return [left, Math.max(Math.min(x(t0 + b), width) - left, 0)];
  };
  const end = call.ended_s ?? Math.max(now - t0, 0);
  const [left, wide] = clip(0, end);
  const lookup = call.lookup_s != null && x(t0 + call.lookup_s) >= 0 && clip(call.lookup_s, call.looked_up_s);
  const loading = call.loads && clip(call.looked_up_s, call.admitted_s ?? end);
  const least = Math.max(wide, MIN_PX);
  const total = Math.max(call.prompt_tokens, 1);
  let at = left;
  return html`<g class="call ${call.phase} ${chosen ? "chosen" : ""}" role="option" aria-selected=${chosen} aria-label=${summary(call)}
      tabindex=${focusable ? 0 : -1} onFocus=${() => onSelect(call.id)} onClick=${() => onSelect(call.id)} onMouseEnter=${() => onHover(call.id)}>
    <rect class="outline" x=${left - 2} y=${y - 2} width=${least + 4} height=${BAR + 9} rx="3" />
    <rect class="fill queued" x=${left} y=${y} width=${least} height=${BAR} />
    ${phases(call, now).map(([name, a, b]) => {
      const [px, w] = clip(a, b);
      return html`<rect key=${name} class="fill ${name}" x=${px} y=${y} width=${w} height=${BAR} />`;
    })}
    ${lookup && html`<rect class="fill lookup" x=${lookup[0]} y=${y} width=${Math.max(lookup[1], 1)} height=${BAR} />`}
    ${loading && html`<rect class="fill loading" x=${loading[0]} y=${y + BAR - 4} width=${Math.max(loading[1], 2)} height="4" />`}
    ${call.admitted_s != null && origins(call).map(([name, , n], i) => {
      const px = at;
      at += (n / total) * least;
      return html`<rect key=${`from ${i}`} class="fill ${name}" x=${px} y=${y + BAR + 1.5} width=${at - px} height="3.5" />`;
    })}
    ${["failed", "gone"].includes(call.phase) && html`<text class="cross" x=${left + least + 3} y=${y + BAR - 2}>✕</text>`}
  </g>`;
}

function summary(call) {
  const settled = call.admitted_s != null;
  const reused = settled ? `, ${percent(share(call))} reused` : "";
  const left = settled ? `; why not more: ${why(call.reason)}` : "";
  const failed = call.error ? ` (${call.error})` : "";
  return `${clock(call.arrived_at)} ${call.model}: ${call.phase}${failed}, ${count(call.prompt_tokens)} prompt tokens${reused}, ${count(call.reply_tokens)} written${left}`;
}

function share(call) {
  return call.prompt_tokens ? call.cached_tokens / call.prompt_tokens : 0;
}

export function speed(call, now) {
  if (call.first_token_s == null || call.reply_tokens < 2) return null;
  const end = call.ended_s ?? now - call.arrived_at;
  return (call.reply_tokens - 1) / Math.max(end - call.first_token_s, 1e-6);
}

function Details({ call, now }) {
  const settled = call.admitted_s != null;
  const facts = [
    ["arrived", `${clock(call.arrived_at)}, ${PHASES[call.phase]}`],
    ["model", call.model],
    ["key", keyName(call.key)],
    ["prompt", tokens(call.prompt_tokens)],
    ["reused", settled ? `${tokens(call.cached_tokens)}, ${percent(share(call))}${tierList(call)}` : "–"],
    ["computed", settled ? tokens(computed(call)) : `${count(call.read_tokens)} read so far`],
    ["queued", seconds(call.row_s ?? (call.phase === "queued" ? now - call.arrived_at : null))],
    ["lookup", call.lookup_s == null ? "–" : seconds(call.looked_up_s - call.lookup_s)],
    ["loading", call.loads ? seconds((call.admitted_s ?? now - call.arrived_at) - call.looked_up_s) : "none"],
    ["first token", call.first_token_s == null ? "–" : `after ${seconds(call.first_token_s)}`],
    ["reply", `${tokens(call.reply_tokens)}${speed(call, now) ? `, ${rate(speed(call, now))} per second` : ""}`],
    ["total", seconds(call.ended_s ?? now - call.arrived_at)],
  ];
  if (call.skipped_tokens) facts.push(["not read", `${tokens(call.skipped_tokens)}: the answer is approximate`]);
  if (call.drafted_tokens) facts.push(["drafted", `${tokens(call.drafted_tokens)}, ${count(call.accepted_tokens)} accepted`]);
  return html`<dl class="facts">
      ${facts.map(([name, text]) => html`<div key=${name}><dt>${name}</dt><dd>${text}</dd></div>`)}
    </dl>
    ${call.error && html`<p class="why"><b>Why it failed:</b> ${call.error}</p>`}
    ${settled && html`<p class="why"><b>Why not more was reused:</b> ${why(call.reason)}.
      ${call.differs && html` There the prompt goes on: <q>${call.differs}</q>`}</p>`}`;
}

const PHASES = { queued: "waiting", reading: "being read", decoding: "being answered", done: "done", failed: "failed", gone: "the client disconnected" };

export function keyName(key) {
  return key === "shared" ? "none" : `${key}…`;
}

function tierList(call) {
  const named = Object.entries(call.tiers).map(([tier, n]) => `${count(n)} from ${tierName(tier)}`);
  return named.length ? ` (${named.join(", ")})` : "";
}

const HEAD = ["arrived", "model", "key", "state", "prompt", "reused", "from", "why not more", "first token", "reply", "total"];

function rows(calls, now) {
  const newest = [...calls].sort((a, b) => b.arrived_at - a.arrived_at).slice(0, N_LISTED);
  return newest.map((c) => ({
    key: c.id,
    cells: [clock(c.arrived_at), c.model, keyName(c.key), c.phase, count(c.prompt_tokens), percent(share(c)),
      Object.keys(c.tiers).map(tierName).join(", ") || "–", c.reason || "–", seconds(c.first_token_s),
      count(c.reply_tokens), seconds(c.ended_s ?? now - c.arrived_at)],
  }));
}
