// Requests as bars over time, and the details of the selected one.

import { html, useRef, useState } from "./vendor/htm-preact.js";
import { clock, count, percent, rate, seconds, tokens } from "./format.js";
import { Empty, Legend, Panel, Table, useTick, useWidth } from "./components.js";

const ROW = 34;
const BAR = 18;
const SHARE = 5;
const AXIS = 20;
const MIN_PX = 4;
const LABEL_PX = 44;
const SPANS = [[0, "the latest"], [60, "1 min"], [300, "5 min"], [1800, "30 min"], [7200, "2 h"]];
const FIT = [5, 10, 20, 30, 45, 60, 90, 120, 180, 300, 600, 1200, 1800, 3600, 7200, 14400, 86400];
const STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600];
const N_FITTED = 24; // requests that the latest ones are, unless there was a long pause between them
const GAP = 1 / 100; // of the time shown is between two bars of a row
const PAUSE_S = 20;
const MEASURED_S = 0.25; // a reply that took less came in one piece: its speed would be nonsense
const N_LISTED = 100;
const N_DRAWN = 400;

const REASONS = {
  "": "nothing more could be",
  "no cache": "reuse is off",
  cold: "nothing that is stored begins like this prompt",
  evicted: "more was stored once, and had to give way to other prefixes",
  "slower to load": "loading more would have taken longer than computing it",
  "not yet loaded": "the rest was still being read when computing got there",
  "a store did not answer": "a shared store failed or was too slow, so what it has of this prompt is unknown",
  "no state checkpoint": "more is stored, but this model can resume only where its state was kept",
  "whole chunks only": "with exact reuse a prompt resumes at whole chunks only",
  "one token": "a prompt of one token has nothing to reuse",
  "reading off": "the request asked not to read the cache, or for the logprobs of its prompt",
  damaged: "a record was damaged, so it was not used",
  "read failed": "a record could not be read",
  fault: "the cache had a fault, so it was not used",
};

const FIRST = `Every request will be a bar here: how long it waited, how long its prompt was read, how long it
  wrote, and how much was reused. Ask something in the chat, or connect a client.`;
const TIMES = [
  ["queued", "waiting"],
  ["computed", "reading the prompt"],
  ["decoding", "writing the reply"],
];
const ENDED_BADLY = ["crossed", "failed, or the client left"];
const ORIGINS = { memory: "memory", ssd: "SSD", neighbour: "a request at the same time", remote: "a store" };

/** Only what is drawn is explained. */
function legends(calls) {
  const bad = calls.some((c) => ["failed", "gone"].includes(c.phase));
  const tiers = new Set(["memory", ...calls.flatMap((c) => Object.keys(c.tiers).map(tierClass))]);
  const reused = Object.entries(ORIGINS).filter(([css]) => tiers.has(css)).map(([css, name]) => [css, tiers.size > 1 ? `reused from ${name}` : "reused"]);
  const skipped = calls.some((c) => c.skipped_tokens) ? [["skipped", "not read"]] : [];
  return [bad ? [...TIMES, ENDED_BADLY] : TIMES, [...reused, ["computed", "computed"], ...skipped]];
}

export function why(call) {
  const at = count(call.differs_at ?? 0);
  if (call.cause === "new") return `all that is stored of it was reused; from token ${at} on it is new`;
  if (call.cause === "diverged") return `at token ${at} what is stored goes on differently`;
  return REASONS[call.reason] ?? call.reason;
}

/** The phases of a call: [class, from, to] in seconds since its arrival. */
export function phases(call, now) {
  const end = call.ended_s ?? Math.max(now - call.arrived_at, 0);
  const first = Math.min(call.first_token_s ?? end, end);
  const row = Math.min(call.row_s ?? (call.phase === "reading" ? 0 : first), first);
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
  return { memory: "memory", ssd: "SSD", neighbour: "a request at the same time" }[tier] ?? tier;
}

export function Calls({ store, model }) {
  const [span, setSpan] = useState(0);
  const [selected, setSelected] = useState(null);
  const [hovered, setHovered] = useState(null);
  const calls = [...store.calls.values()].filter((c) => !model || c.model === model);
  const open = calls.filter((c) => c.ended_s == null);
  useTick(open.length ? 500 : 2000, calls.length > 0);
  const now = store.now();
  const time = span ? { from: now - span, to: now } : latest(calls, now);
  const within = calls.filter((c) => endOf(c) > time.from && c.arrived_at <= time.to);
  const shown = within.sort((a, b) => a.arrived_at - b.arrived_at).slice(-N_DRAWN);
  const focused = store.calls.get(hovered) ?? store.calls.get(selected) ?? null;
  const [times, shares] = legends(shown);
  const tools = html`<span class="field"><label for="span">Time shown</label> <select id="span" value=${span} onChange=${(e) => setSpan(Number(e.target.value))}>
    ${SPANS.map(([s, name]) => html`<option value=${s}>${name}</option>`)}
  </select></span>`;
  return html`<${Panel} id="requests" title="Requests" tools=${calls.length > 0 && tools}
      note=${calls.length > 0 && `${underWay(open)}, ${count(calls.length)} known${within.length > shown.length ? `, the newest ${count(shown.length)} drawn` : ""}`}>
    ${shown.length
      ? html`<${Timeline} lanes=${lanesOf(calls, (time.to - time.from) * GAP)} calls=${shown} now=${now} time=${time} selected=${selected}
          onSelect=${setSelected} onHover=${setHovered} />
        <div class="legends"><${Legend} items=${times} /><${Legend} title="The thin line is the prompt:" items=${shares} /></div>
        <div class="details">${focused
          ? html`<${Details} call=${focused} now=${now} />`
          : html`<p class="hint">Choose a bar to see its details.</p>`}</div>`
      : html`<${Empty}>${calls.length
          ? html`No request in this time. <button class="link" onClick=${() => setSpan(0)}>Show the latest</button>`
          : FIRST}<//>`}
    ${calls.length > 0 && html`<${Table} caption="Requests, the newest first" head=${HEAD} rows=${() => rows(calls, now)} />`}
  <//>`;
}

function underWay(open) {
  const waiting = open.filter((c) => c.phase === "queued").length;
  const running = open.length - waiting;
  return [(running || !waiting) && `${running ? count(running) : "none"} running`, waiting && `${count(waiting)} waiting`].filter(Boolean).join(", ");
}

function endOf(call) {
  return call.ended_s == null ? Infinity : call.arrived_at + call.ended_s;
}

/** The time of the latest requests, without those before a long pause. It ends now if it is not long over. */
export function latest(calls, now) {
  const newest = [...calls].sort((a, b) => b.arrived_at - a.arrived_at).slice(0, N_FITTED);
  if (!newest.length) return { from: now - FIT[0], to: now };
  const last = Math.min(Math.max(...newest.map(endOf)), now);
  const to = now - last < PAUSE_S ? now : last;
  let from = newest[0].arrived_at;
  for (const call of newest) {
    if (from - Math.min(endOf(call), now) > Math.max(PAUSE_S, to - from)) break;
    from = Math.min(from, call.arrived_at);
  }
  const span = FIT.find((s) => s >= (to - from) * 1.02) ?? to - from;
  return { from: to - span, to };
}

/** Each call's row: the first one that is free as long as the call goes on. */
function lanesOf(calls, gap) {
  const lanes = new Map();
  const free = [];
  for (const call of [...calls].sort((a, b) => a.arrived_at - b.arrived_at)) {
    const found = free.findIndex((at) => at <= call.arrived_at);
    const lane = found < 0 ? free.length : found;
    free[lane] = endOf(call) + gap;
    lanes.set(call.id, lane);
  }
  return lanes;
}

function Timeline({ lanes, calls, now, time, selected, onSelect, onHover }) {
  const [ref, width] = useWidth();
  const box = useRef(null);
  const used = [...new Set(calls.map((c) => lanes.get(c.id)))].sort((a, b) => a - b);
  const height = used.length * ROW + AXIS;
  const x = (t) => ((t - time.from) / (time.to - time.from)) * width;
  const current = calls.some((c) => c.id === selected) ? selected : calls.at(-1).id;
  const move = (event) => {
    const at = calls.findIndex((c) => c.id === current);
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, ArrowUp: at - 1, ArrowDown: at + 1, Home: 0, End: calls.length - 1 }[event.key];
    if (to === undefined || !calls[to]) return;
    event.preventDefault();
    onHover(null);
    onSelect(calls[to].id);
    requestAnimationFrame(() => box.current?.querySelector("[tabindex='0']")?.focus());
  };
  return html`<div class="timeline scroll" ref=${ref}>
    ${width > 0 && html`<svg ref=${box} width=${width} height=${height} role="listbox" aria-label="Requests over time"
        onKeyDown=${move} onMouseLeave=${() => onHover(null)}>
      ${axis(time, width).map((t) => html`<g key=${t}>
        <line class="grid" x1=${x(t)} x2=${x(t)} y1=${AXIS - 4} y2=${height} />
        <text class="tick" x=${x(t)} y="10" text-anchor="middle">${clock(t)}</text>
      </g>`)}
      ${calls.map((call) => html`<${Bar} key=${call.id} call=${call} now=${now} x=${x} width=${width}
        y=${used.indexOf(lanes.get(call.id)) * ROW + AXIS} focusable=${call.id === current} chosen=${call.id === selected}
        onSelect=${onSelect} onHover=${onHover} />`)}
    </svg>`}
  </div>`;
}

/** Round times for the axis, as many as there is room for. */
function axis({ from, to }, width) {
  const least = (to - from) / Math.max(width / 110, 1);
  const step = STEPS.find((s) => s >= least) ?? STEPS.at(-1);
  const first = Math.ceil(from / step) * step;
  const marks = Array.from({ length: Math.max(Math.floor((to - first) / step) + 1, 0) }, (_, i) => first + i * step);
  const margin = ((to - from) / width) * 28;
  return marks.filter((t) => t > from + margin && t < to - margin);
}

function Bar({ call, now, x, y, width, focusable, chosen, onSelect, onHover }) {
  const t0 = call.arrived_at;
  const clip = (a, b) => {
    const left = Math.max(x(t0 + a), 0);
    return [left, Math.max(Math.min(x(t0 + b), width) - left, 0)];
  };
  const end = call.ended_s ?? Math.max(now - t0, 0);
  const [start, wide] = clip(0, end);
  const least = Math.max(wide, MIN_PX);
  const left = Math.min(start, width - least);
  const scale = least / Math.max(wide, 1e-6); // the shortest bars are drawn wider, in proportion
  const total = Math.max(call.prompt_tokens, 1);
  const drawn = phases(call, now).map(([name, a, b]) => {
    const [from, w] = clip(a, b);
    return [name, left + (from - start) * scale, w * scale];
  });
  const label = drawn.find(([name]) => name !== "queued")?.[1] ?? left;
  const room = left + least - label;
  let at = left;
  return html`<g class="call ${call.phase} ${chosen ? "chosen" : ""}" role="option" aria-selected=${chosen} aria-label=${summary(call)}
      tabindex=${focusable ? 0 : -1} onFocus=${() => onSelect(call.id)} onClick=${() => onSelect(call.id)} onMouseEnter=${() => onHover(call.id)}>
    <rect class="outline" x=${left - 2} y=${y - 2} width=${least + 4} height=${BAR + SHARE + 5} rx="3" />
    ${drawn.map(([name, px, w]) => html`<rect key=${name} class="fill ${name}" x=${px} y=${y} width=${w} height=${BAR} />`)}
    ${call.admitted_s != null && origins(call).map(([name, , n], i) => {
      const px = at;
      at = Math.min(at + (n / total) * least, left + least);
      return html`<rect key=${i} class="fill ${name}" x=${px} y=${y + BAR + 1} width=${at - px} height=${SHARE} />`;
    })}
    ${["failed", "gone"].includes(call.phase)
      ? html`<text class="cross" x=${left + Math.min(least + 3, width - left - 11)} y=${y + BAR - 4}>✕</text>`
      : room > LABEL_PX && call.admitted_s != null && html`<text class="label" aria-hidden="true" x=${label + 5} y=${y + BAR - 5}>${percent(share(call))}${room > 2.2 * LABEL_PX ? " reused" : ""}</text>`}
  </g>`;
}

function summary(call) {
  const settled = call.admitted_s != null;
  const reused = settled ? `, ${percent(share(call))} reused` : "";
  const left = settled ? `; why not more: ${why(call)}` : "";
  const failed = call.error ? ` (${call.error})` : "";
  return `${clock(call.arrived_at)} ${call.model}: ${call.phase}${failed}, ${count(call.prompt_tokens)} prompt tokens${reused}, ${count(call.reply_tokens)} written${left}`;
}

function share(call) {
  return call.prompt_tokens ? call.cached_tokens / call.prompt_tokens : 0;
}

export function speed(call, now) {
  if (call.first_token_s == null || call.reply_tokens < 2) return null;
  const took = (call.ended_s ?? now - call.arrived_at) - call.first_token_s;
  return took >= MEASURED_S ? (call.reply_tokens - 1) / took : null;
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
    ["waited", seconds(call.row_s ?? (call.phase === "queued" ? now - call.arrived_at : null))],
    ["loading", call.loads ? seconds((call.admitted_s ?? now - call.arrived_at) - call.looked_up_s) : "nothing had to be"],
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
    ${settled && html`<p class="why"><b>Why not more was reused:</b> ${why(call)}.
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
