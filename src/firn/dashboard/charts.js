// Charts over time, drawn with SVG: scales from zero, units on the axes, values readable by arrow keys.

import { html, useState } from "./vendor/htm-preact.js";
import { clock, count, percent, rate, seconds, short, ticks } from "./format.js";
import { Empty, Legend, Panel, Table, useTick, useWidth } from "./components.js";

const SPANS = [60, 300];
const SPAN = SPANS.at(-1);
const N_BINS = 60;
const N_DOTS = 500;
const HEIGHT = 130;
const LEFT = 48;
const BOTTOM = 18;

export function Rates({ store, model }) {
  const calls = [...store.calls.values()].filter((c) => !model || c.model === model);
  useTick(1000, calls.length > 0);
  const now = store.now();
  const oldest = Math.min(...calls.map((c) => c.arrived_at));
  const span = SPANS.find((s) => s > now - oldest) ?? SPAN;
  const bins = binned(calls, now, span);
  if (!calls.length) return null;
  return html`<${Panel} id="rates" title="Tokens per second" note=${`of the last ${span === 60 ? "minute" : "five minutes"}`}>
      <h3>Written</h3>
      <${Bars} span=${span} bins=${bins} series=${[["decoding", "reply tokens per second", "written"]]}
        empty="Nothing was written in this time." />
      <h3>Prompts</h3>
      <${Bars} span=${span} bins=${bins} series=${[["memory", "reused tokens per second", "reused"], ["computed", "computed tokens per second", "computed"]]}
        empty="No prompt was read in this time." />
      <${Legend} items=${[["decoding", "written"], ["memory", "reused"], ["computed", "computed"]]} />
      <${Table} caption="Tokens per second" head=${["from", "written", "reused", "computed"]}
        rows=${() => bins.filter((b) => b.written || b.reused || b.computed).map((b) => ({ key: b.at, cells: [clock(b.at), rate(b.written), rate(b.reused), rate(b.computed)] }))} />
    <//>`;
}

/** Tokens of each kind per second, bin by bin. A call's tokens are spread over the time they took. */
export function binned(calls, now, span) {
  const size = span / N_BINS;
  const start = Math.floor(now / size) * size - span + size;
  const bins = Array.from({ length: N_BINS }, (_, i) => ({ at: start + i * size, written: 0, reused: 0, computed: 0 }));
  const spread = (name, n, from, to) => {
    if (!(n > 0)) return;
    const length = Math.max(to - from, 1e-6);
    const first = Math.max(Math.floor((from - start) / size), 0);
    const last = Math.min(Math.floor((from + length - start) / size), N_BINS - 1);
    for (let i = first; i <= last; i += 1) {
      const covered = Math.min(from + length, bins[i].at + size) - Math.max(from, bins[i].at);
      bins[i][name] += (n * Math.max(covered, 0)) / length / size;
    }
  };
  for (const call of calls) {
    const t0 = call.arrived_at;
    const end = t0 + (call.ended_s ?? Math.max(now - t0, 0));
    const first = call.first_token_s == null ? end : t0 + call.first_token_s;
    if (end < start) continue;
    spread("written", call.reply_tokens, first, end);
    if (call.admitted_s == null) continue;
    spread("reused", call.cached_tokens, t0 + (call.row_s ?? 0), t0 + call.admitted_s);
    spread("computed", call.read_tokens - call.cached_tokens, t0 + (call.row_s ?? 0), first);
  }
  return bins;
}

function Bars({ span, bins, series, empty }) {
  const [ref, width] = useWidth();
  const [at, setAt] = useState(null);
  const sum = (bin) => series.reduce((total, [, , name]) => total + bin[name], 0);
  const top = Math.max(...bins.map(sum));
  const marks = ticks(Math.max(top, 1));
  const scale = marks.at(-1);
  const w = Math.max(width - LEFT, 0) / bins.length;
  const y = (n) => (HEIGHT - BOTTOM) * (1 - n / scale) + 4;
  const focused = at == null ? null : bins[at];
  const move = (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    setAt((i) => Math.min(Math.max((i ?? bins.length) + step, 0), bins.length - 1));
  };
  const text = focused && `${clock(focused.at)}: ${series.map(([, unit, name]) => `${rate(focused[name])} ${unit}`).join(", ")}`;
  return html`<div class="chart" ref=${ref}>
    ${top <= 0 && html`<${Empty}>${empty}<//>`}
    ${width > 0 && top > 0 && html`<svg width=${width} height=${HEIGHT + 6} role="img" tabindex="0" onKeyDown=${move} onBlur=${() => setAt(null)}
        aria-label="${series.map(([, text]) => text).join(" and ")}, at most ${rate(top)}. Arrow keys read single values.">
      ${marks.map((n) => html`<g key=${n}><line class="grid" x1=${LEFT} x2=${width} y1=${y(n)} y2=${y(n)} />
        <text class="tick" x=${LEFT - 6} y=${y(n) + 4} text-anchor="end">${short(n)}</text></g>`)}
      ${bins.map((bin, i) => {
        let base = 0;
        return html`<g key=${bin.at}>
          ${series.map(([css, , name]) => {
            const from = base;
            base += bin[name];
            return html`<rect class="fill ${css}" x=${LEFT + i * w} width=${Math.max(w - 1, 1)} y=${y(base)} height=${y(from) - y(base)} />`;
          })}
          <rect class="target ${i === at ? "chosen" : ""}" x=${LEFT + i * w} width=${w} y="4" height=${HEIGHT - BOTTOM} onMouseEnter=${() => setAt(i)} onMouseLeave=${() => setAt(null)} />
        </g>`;
      })}
      <text class="tick" x=${LEFT} y=${HEIGHT + 2}>−${seconds(span)}</text>
      <text class="tick" x=${width} y=${HEIGHT + 2} text-anchor="end">now</text>
    </svg>`}
    ${top > 0 && html`<p class="reading" aria-live="polite">${text ?? "\u00a0"}</p>`}
  </div>`;
}

/** How long first tokens took, by how much of the prompt was reused. */
export function FirstTokens({ store, model }) {
  const [ref, width] = useWidth();
  const [focused, setFocused] = useState(null);
  const calls = [...store.calls.values()].filter((c) => !model || c.model === model);
  const points = calls.filter((c) => c.first_token_s != null && c.prompt_tokens > 0).slice(-N_DOTS)
    .map((c) => ({ id: c.id, x: c.cached_tokens / c.prompt_tokens, y: Math.max(c.first_token_s, 1e-3), n: c.prompt_tokens, call: c }));
  const low = Math.floor(Math.log10(Math.min(...points.map((p) => p.y), 0.1)));
  const high = Math.ceil(Math.log10(Math.max(...points.map((p) => p.y), 1)));
  const tall = 190;
  const px = (s) => LEFT + 6 + s * Math.max(width - LEFT - 18, 0);
  const py = (s) => (tall - BOTTOM - 8) * (1 - (Math.log10(s) - low) / (high - low)) + 8;
  const decades = Array.from({ length: high - low + 1 }, (_, i) => 10 ** (low + i));
  const groups = [[0, 0.05, "up to 5 %"], [0.05, 0.5, "5 to 50 %"], [0.5, 0.9, "50 to 90 %"], [0.9, 1.01, "90 % and more"]];
  if (!points.length) return null;
  return html`<${Panel} id="first" title="What reuse does for the first token" note="each dot is a request: the lower, the sooner it was answered">
    <div class="chart" ref=${ref}>
      ${width > 0 && html`<svg width=${width} height=${tall + 20} role="img"
          aria-label="Seconds to the first token by share of the prompt that was reused; the table below has the medians.">
        ${decades.map((s) => html`<g key=${s}><line class="grid" x1=${LEFT} x2=${width} y1=${py(s)} y2=${py(s)} />
          <text class="tick" x=${LEFT - 6} y=${py(s) + 4} text-anchor="end">${s < 1 ? seconds(s) : `${count(s)} s`}</text></g>`)}
        ${[0, 0.25, 0.5, 0.75, 1].map((s) => html`<text key=${s} class="tick" x=${px(s)} y=${tall + 2}
          text-anchor=${s === 1 ? "end" : s ? "middle" : "start"}>${percent(s)}</text>`)}
        <text class="tick" x=${px(0.5)} y=${tall + 17} text-anchor="middle">of the prompt reused</text>
        ${points.map((p) => html`<circle key=${p.id} class="dot" cx=${px(p.x)} cy=${py(p.y)} r=${2.5 + Math.min(Math.sqrt(p.n) / 30, 6)}
          onMouseEnter=${() => setFocused(p)} onMouseLeave=${() => setFocused(null)} />`)}
      </svg>`}
    </div>
    <p class="reading">${focused
        ? `${count(focused.n)} prompt tokens, ${percent(focused.x)} reused: first token after ${seconds(focused.y)}`
        : "Larger dots are longer prompts."}</p>
      <${Table} caption="Time to the first token by reused share" head=${["reused", "requests", "median", "longest"]}
        rows=${() => groups.map(([from, to, name]) => {
          const times = points.filter((p) => p.x >= from && p.x < to).map((p) => p.y).sort((a, b) => a - b);
          return { key: name, cells: [name, count(times.length), times.length ? seconds(times[times.length >> 1]) : "–", times.length ? seconds(times.at(-1)) : "–"] };
        })} />
  <//>`;
}

/** Tokens that a step of a row makes, where tokens are drafted. */
export function Drafts({ store, model }) {
  const [ref, width] = useWidth();
  const now = store.now();
  const states = [...store.states.values()].filter((s) => !model || s.model === model);
  const totals = states.map((s) => s.speculation ?? {}).filter((s) => s.steps != null);
  const steps = totals.reduce((n, s) => n + s.row_steps, 0);
  const taken = totals.reduce((n, s) => n + s.taken, 0);
  const drafted = totals.reduce((n, s) => n + s.drafted, 0);
  const accepted = totals.reduce((n, s) => n + s.accepted, 0);
  const points = [];
  for (const samples of [...store.samples].filter(([id]) => !model || id === model).map(([, s]) => s)) {
    for (let i = 1; i < samples.length; i += 1) {
      const [t, n, k] = samples[i];
      const [, n0, k0] = samples[i - 1];
      if (n > n0 && t > now - SPAN) points.push([t, (k - k0) / (n - n0)]);
    }
  }
  points.sort((a, b) => a[0] - b[0]);
  const marks = ticks(Math.max(2, ...points.map(([, n]) => n)));
  const x = (t) => LEFT + ((t - now + SPAN) / SPAN) * (width - LEFT - 6);
  const y = (n) => (HEIGHT - BOTTOM) * (1 - n / marks.at(-1)) + 4;
  if (!steps || !drafted) return null;
  return html`<${Panel} id="drafts" title="Tokens per step" note="of a row; more than one where drafts were accepted">
    <p class="figure"><b>${(taken / steps).toFixed(2)}</b> tokens per step since the start,
      ${" "}${percent(accepted / drafted)} of ${count(drafted)} drafted tokens accepted</p>
    <div class="chart" ref=${ref}>
      ${width > 0 && points.length > 1 && html`<svg width=${width} height=${HEIGHT + 6} role="img" aria-label="Tokens per step over the last five minutes, last ${points.at(-1)[1].toFixed(2)}">
        ${marks.map((n) => html`<g key=${n}><line class="grid" x1=${LEFT} x2=${width} y1=${y(n)} y2=${y(n)} />
          <text class="tick" x=${LEFT - 6} y=${y(n) + 4} text-anchor="end">${n}</text></g>`)}
        <path class="line decoding" d=${points.map(([t, n], i) => `${i ? "L" : "M"}${x(t).toFixed(1)} ${y(n).toFixed(1)}`).join("")} />
        <text class="tick" x=${LEFT} y=${HEIGHT + 2}>−${seconds(SPAN)}</text><text class="tick" x=${width} y=${HEIGHT + 2} text-anchor="end">now</text>
      </svg>`}
    </div>
  <//>`;
}
