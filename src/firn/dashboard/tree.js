// The stored prefixes as an icicle chart: a row for each level, each run as wide as all bytes below it.

import { html, useEffect, useMemo, useRef, useState } from "./vendor/htm-preact.js";
import { ago, bytes, count, seconds, short } from "./format.js";
import { Empty, Legend, Panel, Announcement, Table, useWidth } from "./components.js";
import { json } from "./server.js";
import { tierClass, tierName } from "./calls.js";

const ROW = 30;
const MIN_PX = 1.5; // narrower runs are not drawn; those above them show that there is more
const LIMIT = 600;
const EVERY_MS = 5000;
const AT_LEAST_MS = 30000;

const FIRST = `Nothing is stored yet. What prompts begin with will be drawn here, once they have been read: what
  several share above, and below where they part.`;
const BUSY = "What is stored will be drawn here. If the model is busy with a long step, that is when the step ends.";

export function Tree({ store, model, off }) {
  const [path, setPath] = useState([]); // runs that were entered, the last is the top of what is shown
  const [tree, setTree] = useState(null);
  const [fault, setFault] = useState("");
  const [selected, setSelected] = useState(null);
  const [stale, setStale] = useState(0);
  const top = path.at(-1)?.node;
  const query = new URLSearchParams({ limit: LIMIT, ...(top && { node: top }), ...(store.several && model && { model }) });
  const url = `v1/cache/tree?${query}`;
  const live = store.status === "live" && !off;

  useEffect(() => setPath([]), [model]);
  useEffect(() => {
    if (!live) return undefined;
    const abort = new AbortController();
    let [seen, at] = [-1, 0];
    const refresh = async () => {
      const old = Date.now() - at > AT_LEAST_MS; // records are also written and evicted between requests
      if ((seen === store.ended && !old) || document.visibilityState !== "visible") return;
      [seen, at] = [store.ended, Date.now()];
      try {
        const answer = await json(url, { signal: abort.signal });
        if (answer.age_s != null) seen = -1; // it may lack what has ended since: ask again soon
        setTree(answer);
        setFault("");
      } catch (error) {
        if (abort.signal.aborted) return;
        if (error.status === 404 && top) setPath([]);
        else setFault(error.message);
      }
    };
    refresh();
    const timer = setInterval(refresh, EVERY_MS);
    return () => {
      abort.abort();
      clearInterval(timer);
    };
  }, [url, live, stale]);

  const runs = tree?.runs ?? [];
  const layout = useMemo(() => arrange(runs), [tree]);
  const chosen = layout.byNode.get(selected) ?? null;
  const enter = (run) => setPath([...path, { node: run.node, name: `${count(run.start)}–${count(run.end)}` }]);
  const places = tree?.places ?? ["memory"];
  return html`<${Panel} id="tree" title="Stored prefixes" wide note=${tree?.enabled && runs.length ? summaryOf(tree, layout) : ""}>
    ${path.length > 0 && html`<nav class="crumbs" aria-label="Where in the tree"><button class="link" onClick=${() => setPath([])}>everything</button>
      ${path.map((step, i) => html`<span key=${step.node}> › ${i < path.length - 1
        ? html`<button class="link" onClick=${() => setPath(path.slice(0, i + 1))}>${step.name}</button>`
        : html`<b>tokens ${step.name}</b>`}</span>`)}</nav>`}
    ${fault && html`<p class="warn" role="alert">${fault}</p>`}
    ${(off || (tree && !tree.enabled)) && html`<${Empty}>Nothing is stored: ${off ? `reuse is ${off}` : tree.why || "reuse is off"}.<//>`}
    ${!off && (!tree || (tree.enabled && runs.length === 0)) && html`<${Empty}>${tree ? FIRST : BUSY}<//>`}
    ${runs.length > 0 && html`<${Icicle} layout=${layout} places=${places} selected=${chosen?.run.node} onSelect=${setSelected} onEnter=${enter} now=${store.now()} />
      <${Legend} items=${[...places.map((p) => [tierClass(p), p === "memory" ? "in memory" : `on ${tierName(p)} only`]), ["pinned", "pinned"], ["hollow", "no longer stored"]]} />
      ${chosen ? html`<${Chosen} key=${chosen.run.node} run=${chosen.run} places=${places} model=${store.several ? model : ""} now=${store.now()} onEnter=${enter}
          onChanged=${() => setStale((n) => n + 1)} />` : html`<p class="hint">Choose a prefix to see what it saves, to pin it or to forget it. Arrow keys move, Enter goes in.</p>`}
      <${Table} caption="Stored prefixes, the largest first" head=${["tokens", "text", "bytes", "with all below", "where", "last use", "shared by", "pinned"]} rows=${() => rows(runs, places, store.now())} />`}
  <//>`;
}

function summaryOf(tree, layout) {
  const total = layout.tops.reduce((n, item) => n + item.run.total_bytes, 0);
  return `${bytes(total)} in ${count(tree.nodes)} blocks${tree.cut_off ? " and more" : ""}; each box continues the one above it, and is as wide as the bytes in and below it`;
}

/** Places for all runs: depth, and from where to where in shares of the whole width. */
export function arrange(runs) {
  const byNode = new Map();
  const tops = [];
  for (const run of runs) byNode.set(run.node, { run, children: [], above: null, depth: 0, from: 0, to: 1 });
  for (const item of byNode.values()) {
    item.above = byNode.get(item.run.above) ?? null;
    (item.above ? item.above.children : tops).push(item);
  }
  const whole = tops.reduce((n, item) => n + Math.max(item.run.total_bytes, 1), 0);
  let depth = 0;
  const place = (items, from, to, level, sum) => {
    let at = from;
    depth = Math.max(depth, items.length ? level + 1 : 0);
    for (const item of items.sort((a, b) => b.run.total_bytes - a.run.total_bytes)) {
      item.depth = level;
      item.from = at;
      at += ((to - from) * Math.max(item.run.total_bytes, 1)) / sum;
      item.to = at;
    }
  };
  place(tops, 0, 1, 0, whole || 1);
  for (const item of ordered(tops)) {
    // A run is as wide as all that hangs on it; its own bytes are the part without children.
    const below = item.children.reduce((n, c) => n + c.run.total_bytes, 0);
    const share = below / Math.max(item.run.total_bytes, below, 1);
    place(item.children, item.from, item.from + (item.to - item.from) * share, item.depth + 1, below || 1);
  }
  return { byNode, tops, depth };
}

function* ordered(items) {
  const todo = [...items];
  while (todo.length) {
    const item = todo.shift();
    yield item;
    todo.push(...item.children);
  }
}

function Icicle({ layout, places, selected, onSelect, onEnter, now }) {
  const [ref, width] = useWidth();
  const box = useRef(null);
  const items = [...layout.byNode.values()].filter((item) => (item.to - item.from) * width >= MIN_PX);
  const current = items.some((i) => i.run.node === selected) ? selected : items[0]?.run.node;
  const choose = (item) => {
    onSelect(item.run.node);
    requestAnimationFrame(() => box.current?.querySelector("[tabindex='0']")?.focus());
  };
  const move = (event) => {
    const item = layout.byNode.get(current);
    if (!item) return;
    if (event.key === "Enter") return onEnter(item.run);
    const row = (item.above ? item.above.children : layout.tops);
    const at = row.indexOf(item);
    const to = { ArrowLeft: row[at - 1], ArrowRight: row[at + 1], ArrowUp: item.above, ArrowDown: item.children[0] }[event.key];
    if (!to) return undefined;
    event.preventDefault();
    choose(to);
    return undefined;
  };
  return html`<div class="icicle scroll" ref=${ref}>
    ${width > 0 && html`<svg ref=${box} width=${width} height=${layout.depth * ROW + 2} role="tree" aria-label="Stored prefixes" onKeyDown=${move}>
      ${items.map((item) => html`<${Run} key=${item.run.node} item=${item} width=${width} places=${places} now=${now}
        chosen=${item.run.node === selected} focusable=${item.run.node === current} onSelect=${onSelect} onEnter=${onEnter} />`)}
    </svg>`}
  </div>`;
}

function Run({ item, width, places, now, chosen, focusable, onSelect, onEnter }) {
  const { run } = item;
  const x = item.from * width;
  const w = Math.max((item.to - item.from) * width - 1, 1);
  const y = item.depth * ROW + 1;
  let at = x;
  return html`<g class="run ${chosen ? "chosen" : ""}" role="treeitem" aria-level=${item.depth + 1} aria-selected=${chosen} aria-label=${summary(run, places, now)}
      tabindex=${focusable ? 0 : -1} onClick=${() => onSelect(run.node)} onFocus=${() => onSelect(run.node)} onDblClick=${() => onEnter(run)}>
    <rect class="fill hollow" x=${x} y=${y} width=${w} height=${ROW - 3} />
    ${storedShares(run, places).map(([css, share], i) => {
      const px = at;
      at += share * w;
      return share > 0 && html`<rect key=${i} class="fill ${css}" x=${px} y=${y} width=${share * w} height=${ROW - 3} />`;
    })}
    ${run.pins > 0 && html`<rect class="fill pinned" x=${x} y=${y + ROW - 6} width=${w} height="3" />`}
    ${run.more && html`<line class="morebelow" x1=${x + w * 0.25} x2=${x + w * 0.75} y1=${y + ROW - 4} y2=${y + ROW - 4} />`}
    <rect class="outline" x=${x} y=${y} width=${w} height=${ROW - 3} />
    ${w > 46 && html`<text class="label" aria-hidden="true" x=${x + 5} y=${y + 17}>${label(run, w)}</text>`}
    <title>${summary(run, places, now)}</title>
  </g>`;
}

/** Shares of a run's bytes: what memory has, then what only a tier below has. */
function storedShares(run, places) {
  if (run.namespace && !run.bytes) return [[run.total_places[0] >= run.total_bytes / 2 ? "memory" : tierClass(places[1] ?? "memory"), 1]];
  const whole = Math.max(run.bytes, 1);
  let left = 1;
  return places.map((place, i) => {
    const share = Math.min(run.places[i] / whole, left);
    left -= share;
    return [tierClass(place), share];
  });
}

function label(run, w) {
  const text = run.namespace ? owner(run) : quoted(run, Infinity) || `${short(run.end - run.start)} tokens`;
  const room = Math.floor((w - 8) / 6.6);
  return text.length > room ? `${text.slice(0, Math.max(room - 1, 1))}…` : text;
}

/** The text from where it parts from the others, if it may be shown. */
function quoted(run, n) {
  const text = (run.text ?? "").slice(0, n);
  return text && run.parts_at > run.start ? `… ${text}` : text;
}

function owner(run) {
  return run.namespace === "shared" ? "all prompts" : `key ${run.namespace}…`;
}

function summary(run, places, now) {
  const begins = run.text ? `, “${quoted(run, 60)}”` : "";
  const what = run.namespace ? owner(run) : `tokens ${count(run.start)} to ${count(run.end)}${begins}`;
  const where = places.map((p, i) => run.total_places[i] ? `${bytes(run.total_places[i])} in ${tierName(p)}` : "").filter(Boolean).join(", ");
  return `${what}: ${bytes(run.total_bytes)} with all below${where ? ` (${where})` : ""}, shared by ${count(run.ends)}, last used ${ago(now - run.used_at)}${run.pins ? ", pinned" : ""}`;
}

/** What is known of one run, and what may be done with it. */
function Chosen({ run, places, model, now, onEnter, onChanged }) {
  const [details, setDetails] = useState(null);
  const [message, setMessage] = useState("");
  const [asks, setAsks] = useState(false);
  const [busy, setBusy] = useState(false);
  const suffix = model ? `?${new URLSearchParams({ model })}` : "";
  const url = `v1/cache/tree/${run.node}`;
  const loadDetails = () => json(url + suffix).then(setDetails, (error) => setMessage(error.message));
  useEffect(() => {
    if (!run.namespace) loadDetails();
  }, [run.node, run.pins]);
  const act = async (action, tell) => {
    setBusy(true);
    setAsks(false);
    try {
      const answer = await json(`${url}/${action}${suffix}`, { method: "POST" });
      setMessage(tell(answer));
      if (action !== "forget") setDetails(answer);
    } catch (error) {
      setMessage(error.message);
    }
    setBusy(false);
    onChanged();
  };
  const facts = [
    ["tokens", run.namespace ? "–" : `${count(run.start)} to ${count(run.end)}`],
    ["stored here", places.map((p, i) => `${bytes(run.places[i])} ${tierName(p)}`).join(", ")],
    ["with all below", `${bytes(run.total_bytes)} in ${count(run.blocks)} blocks`],
    ["last use", ago(Math.max(now - run.used_at, 0))],
    ["shared by", `${count(run.ends)} stored ${run.ends === 1 ? "prompt" : "prompts"}${run.in_use ? `, ${count(run.in_use)} in use now` : ""}`],
  ];
  for (const [part, where] of Object.entries(details?.where || {})) facts.push([`last block: ${part}`, where]);
  if (run.more) facts.push(["not drawn", `${count(run.more.runs)} more below, ${bytes(run.more.bytes)}`]);
  return html`<div class="details">
    <dl class="facts">${facts.map(([k, v]) => html`<div key=${k}><dt>${k}</dt><dd>${v}</dd></div>`)}</dl>
    ${run.text && html`<p class="why">${run.parts_at > run.start ? `At token ${count(run.parts_at)} it parts from others: ` : "It begins: "}<q>${run.text}</q></p>`}
    ${details && html`<p class="why"><b>Saves ${seconds(details.saves_s)}</b> each time that its ${count(details.tokens)} tokens are asked for again:
      computing them takes about ${seconds(details.compute_s)}, ${details.load_s ? `loading ${seconds(details.load_s)}` : "and nothing has to be loaded"}.${details.measured ? "" : " (No prompt has been computed since the start: an estimate.)"}</p>`}
    <div class="actions">
      ${!run.namespace && (run.pins
        ? html`<button disabled=${busy} onClick=${() => act("unpin", () => "Unpinned.")}>Unpin</button>`
        : html`<button disabled=${busy} onClick=${() => act("pin", (f) => `Pinned: ${count(f.tokens)} tokens stay until they are unpinned.`)}>Pin</button>`)}
      ${!run.namespace && !asks && html`<button disabled=${busy} onClick=${() => setAsks(true)}>Forget …</button>`}
      ${asks && html`<span role="alertdialog" aria-label="Forget this prefix?">Forget ${bytes(run.total_bytes)}, with all that continues it?
        <button class="danger" disabled=${busy} onClick=${() => act("forget", forgotten)}>Forget it</button>
        <button onClick=${() => setAsks(false)}>Keep it</button></span>`}
      ${!run.namespace && html`<button onClick=${() => onEnter(run)}>Show only this</button>`}
    </div>
    ${message && html`<p class="message">${message}</p>`}
    <${Announcement}>${message}<//>
  </div>`;
}

function forgotten({ freed_bytes, kept_blocks }) {
  return `Forgotten: ${bytes(freed_bytes)}${kept_blocks ? `; ${count(kept_blocks)} blocks are in use or pinned and stay` : ""}.`;
}

function rows(runs, places, now) {
  return runs.filter((r) => !r.namespace).slice(0, 100).map((r) => ({
    key: r.node,
    cells: [`${count(r.start)}–${count(r.end)}`, quoted(r, Infinity) || "–", bytes(r.bytes), bytes(r.total_bytes),
      places.filter((_, i) => r.places[i]).map(tierName).join(", ") || "nowhere", ago(Math.max(now - r.used_at, 0)), count(r.ends), r.pins ? "yes" : "no"],
  }));
}
